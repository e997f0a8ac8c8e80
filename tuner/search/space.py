"""Search spaces: a union of sketches, each a box of integer parameters cut down by one vectorised constraint.

Nothing here knows what a parameter means. A whole population is one *code* matrix `(R, 1 + P) int32`: column 0 is the
sketch, the rest are positions in the parameters' domains (zero beyond a sketch's own parameters), so that mutation,
de-duplication and membership are array operations. A `Candidate` is the same thing by value, for records and for
people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_tune.errors import ScheduleError, UserError

IntArray = npt.NDArray[np.int64]
CodeArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
FeatureArray = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
KeyArray = npt.NDArray[Any]

Constraint = Callable[[IntArray], BoolArray]
Features = Callable[[IntArray, IntArray], FeatureArray]

ENUMERATE_LIMIT = 1 << 18
"""A sketch whose box holds at most this many points is listed completely instead of sampled by rejection."""
DRAW_LIMIT = 1 << 21
"""Points drawn from a larger box before rejection sampling gives up."""


@dataclass(frozen=True, order=True, slots=True)
class Candidate:
    """One point of a space: the sketch's position in the union and a value for each of its parameters. Sorts
    canonically.
    """

    sketch: int
    values: tuple[int, ...]

    @property
    def key(self) -> str:
        """A canonical text, such as `0:64,32,1`; equal exactly when the candidates are."""
        return f"{self.sketch}:{','.join(map(str, self.values))}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A named integer with a finite domain.

    `ordered`: the order of the domain has a meaning (sizes, counts), so that neighbours are similar and a scale exists;
    otherwise the values are labels.

    Raises:
        UserError: The domain is empty or repeats a value.
    """

    name: str
    domain: tuple[int, ...]
    ordered: bool = True

    def __post_init__(self) -> None:
        if not self.domain or len(set(self.domain)) != len(self.domain):
            raise UserError(
                f"expected parameter {self.name!r} to have a non-empty domain of distinct integers, got {self.domain}; "
                "leave a fixed value out of the space, or list each value once"
            )


@dataclass(frozen=True, eq=False)
class SketchSpace:
    """Named parameters, their legal combinations, and their features for a cost model.

    `valid` and `features` must be pure and treat rows independently.

    Attributes:
        valid: `(rows (R, P) int64) -> (R,) bool`, True for legal rows of parameter values; None: every row is legal.
        features: `(rows (R, P) int64, shapes (S, D) int64) -> (R, S, F) float32`, each row at each shape; None:
            `default_features`.
        feature_names: Names of the F columns of `features`; empty if they have none.
    """

    name: str
    parameters: tuple[Parameter, ...]
    valid: Constraint | None = None
    features: Features | None = None
    feature_names: tuple[str, ...] = ()

    @property
    def box(self) -> int:
        """The number of points in the product of the domains (1 without parameters)."""
        return math.prod(len(p.domain) for p in self.parameters)

    def values(self, positions: npt.NDArray[np.integer[Any]]) -> IntArray:
        """Return parameter values (R, P) int64 for domain positions (R, >= P)."""
        out = np.empty((len(positions), len(self.parameters)), dtype=np.int64)
        for j, parameter in enumerate(self.parameters):
            out[:, j] = np.asarray(parameter.domain, dtype=np.int64)[positions[:, j]]
        return out


def scaled(domain: Sequence[int], values: npt.ArrayLike) -> FloatArray:
    """Return values on a scale of equal steps: log2 if the domain is positive, else linear. Any shape; float64."""
    array = np.asarray(values, dtype=np.float64)
    return np.log2(array) if min(domain) > 0 else array


def trailing_zeros(values: npt.ArrayLike) -> FloatArray:
    """Return the exponent of the largest power of two that divides each value; 0 for zero. Any shape; float64."""
    array = np.asarray(values, dtype=np.int64)
    return np.asarray(np.log2(np.maximum(array & -array, 1)), dtype=np.float64)


def has_alignment(parameter: Parameter) -> bool:
    """Tell whether the powers of two that divide a parameter's values say more than the order of the values."""
    exponents = trailing_zeros(sorted(parameter.domain))
    return parameter.ordered and len(exponents) > 3 and bool((np.diff(exponents) < 0).any())


def default_features(parameters: Sequence[Parameter], rows: IntArray, shapes: IntArray) -> FeatureArray:
    """Return default features for a space without features: (R, S, F) float32.

    Each parameter of more than one value and each shape dim on its scale, then sums and differences of every pair of
    parameters (on a log scale: products and ratios of tile sizes). Last are the trailing zeros of parameters with an
    alignment. `rows: (R, P) int64`, `shapes: (S, D) int64`.
    """
    columns = [scaled(p.domain, rows[:, j]) for j, p in enumerate(parameters) if len(p.domain) > 1]
    pairs = [(a, b) for i, a in enumerate(columns) for b in columns[i + 1 :]]
    columns = columns + [a + b for a, b in pairs] + [a - b for a, b in pairs]
    columns += [trailing_zeros(rows[:, j]) for j, p in enumerate(parameters) if has_alignment(p)]
    own = np.stack(columns, axis=1) if columns else np.zeros((len(rows), 0))
    extent = np.log2(np.maximum(shapes, 1).astype(np.float64))
    out = np.empty((len(rows), len(shapes), own.shape[1] + extent.shape[1]), dtype=np.float32)
    out[:, :, : own.shape[1]] = own[:, None, :]
    out[:, :, own.shape[1] :] = extent[None, :, :]
    return out


class ParameterSpace:
    """A union of sketches.

    Immutable except for cached lists of points, so it must not be shared between threads while it is sampled.

    Raises:
        UserError: There is no sketch, or a name of a sketch or of a parameter of one sketch repeats.
    """

    def __init__(self, sketches: Iterable[SketchSpace]) -> None:
        self.sketches = tuple(sketches)
        names = [s.name for s in self.sketches]
        if not names or len(set(names)) != len(names):
            raise UserError(
                f"expected a search space of one or more sketches with distinct names, got {names}; name each sketch once"
            )
        for sketch in self.sketches:
            parameters = [p.name for p in sketch.parameters]
            if len(set(parameters)) != len(parameters):
                raise UserError(
                    f"expected distinct parameter names in sketch {sketch.name!r}, got {parameters}; rename the repeated one"
                )
        self.width = max(len(s.parameters) for s in self.sketches)
        sizes = np.ones((len(self.sketches), self.width), dtype=np.int64)
        for i, sketch in enumerate(self.sketches):
            sizes[i, : len(sketch.parameters)] = [len(p.domain) for p in sketch.parameters]
        self.domain_sizes = sizes
        ordered = np.zeros((len(self.sketches), self.width), dtype=np.bool_)
        for i, sketch in enumerate(self.sketches):
            ordered[i, : len(sketch.parameters)] = [p.ordered for p in sketch.parameters]
        self.ordered = ordered
        self._listed: dict[int, CodeArray | None] = {}
        self._radix = _radix(sizes)
        self._axes = _axes(self.sketches)

    # -- between candidates and codes ----------------------------------------------------------------------------------

    def encode(self, candidates: Sequence[Candidate]) -> CodeArray:
        """Return codes (R, 1 + P) int32 of candidates.

        Raises:
            UserError: A candidate that is no point of any sketch's box (constraints are not checked; `contains` does).
        """
        out = np.zeros((len(candidates), 1 + self.width), dtype=np.int32)
        for r, candidate in enumerate(candidates):
            position = self._position(candidate)
            if position is None:
                raise UserError(
                    f"expected a candidate of the search space {[s.name for s in self.sketches]}, got {candidate.key}, whose sketch or "
                    "values are not in it; it was recorded for another space: leave it out (ParameterSpace.contains tells)"
                )
            out[r, 0] = candidate.sketch
            out[r, 1 : 1 + len(position)] = position
        return out

    def _position(self, candidate: Candidate) -> tuple[int, ...] | None:
        if not 0 <= candidate.sketch < len(self.sketches):
            return None
        parameters = self.sketches[candidate.sketch].parameters
        if len(parameters) != len(candidate.values):
            return None
        try:
            return tuple(p.domain.index(v) for p, v in zip(parameters, candidate.values))
        except ValueError:
            return None

    def contains(self, candidate: Candidate) -> bool:
        """Return True if the candidate is a legal point of this space."""
        return self._position(candidate) is not None and bool(self.valid(self.encode([candidate]))[0])

    def candidates(self, codes: CodeArray) -> list[Candidate]:
        """Return the candidates of codes (R, 1 + P), in that order."""
        out: list[Candidate | None] = [None] * len(codes)
        for sketch, where in self._by_sketch(codes):
            rows = self.sketches[sketch].values(codes[where, 1:])
            for r, row in zip(where.tolist(), rows.tolist()):
                out[r] = Candidate(sketch, tuple(row))
        return [c for c in out if c is not None]

    def keys(self, codes: CodeArray) -> KeyArray:
        """Return one exact, sortable key per row (R,): int64 if the space is small enough, else raw bytes."""
        if self._radix is not None:
            return codes.astype(np.int64) @ self._radix
        # big-endian: the order of the bytes is then the order of the numbers
        packed = np.ascontiguousarray(codes.astype(">u4"))
        return packed.view(np.dtype((np.void, packed.dtype.itemsize * packed.shape[1]))).reshape(-1)

    def _by_sketch(self, codes: CodeArray) -> list[tuple[int, npt.NDArray[np.intp]]]:
        if len(self.sketches) == 1:
            return [(0, np.arange(len(codes)))] if len(codes) else []
        return [(int(s), np.flatnonzero(codes[:, 0] == s)) for s in np.unique(codes[:, 0])]

    # -- what a strategy asks about many points at once ----------------------------------------------------------------

    def valid(self, codes: CodeArray) -> BoolArray:
        """Return a mask (R,) bool of the rows that satisfy their sketch's constraint."""
        out = np.ones(len(codes), dtype=np.bool_)
        for sketch, where in self._by_sketch(codes):
            constraint = self.sketches[sketch].valid
            if constraint is not None:
                out[where] = constraint(self.sketches[sketch].values(codes[where, 1:]))
        return out

    def features(self, codes: CodeArray, shapes: IntArray) -> FeatureArray:
        """Return features (R, S, F) float32 of each row at each shape, `shapes: (S, D) int64`.

        Sketches that declare features share their columns; the others get separate columns. A column that a sketch does not
        fill is NaN. With more than one sketch the last column is the sketch.
        """
        if len(self.sketches) == 1:
            sketch = self.sketches[0]
            rows = sketch.values(codes[:, 1:])
            if sketch.features is not None:
                return np.asarray(sketch.features(rows, shapes), dtype=np.float32)
            return default_features(sketch.parameters, rows, shapes)
        offsets, width = self._feature_columns(shapes)
        # NaN and not 0 for columns that a sketch lacks: trees of xgboost learn a side for missing values.
        out = np.full((len(codes), len(shapes), width + 1), np.nan, dtype=np.float32)
        for index, where in self._by_sketch(codes):
            sketch = self.sketches[index]
            rows = sketch.values(codes[where, 1:])
            block = (
                sketch.features(rows, shapes) if sketch.features else default_features(sketch.parameters, rows, shapes)
            )
            out[where, :, offsets[index] : offsets[index] + block.shape[2]] = block
            out[where, :, width] = index
        return out

    def _feature_columns(self, shapes: IntArray) -> tuple[list[int], int]:
        first = [
            np.asarray([[p.domain[0] for p in s.parameters]], dtype=np.int64).reshape(1, -1) for s in self.sketches
        ]
        shared = [s.features(r, shapes).shape[2] if s.features is not None else 0 for s, r in zip(self.sketches, first)]
        end = max(shared)
        offsets = []
        for sketch, row in zip(self.sketches, first):
            offsets.append(0 if sketch.features is not None else end)
            if sketch.features is None:
                end += default_features(sketch.parameters, row, shapes).shape[2]
        return offsets, end

    def coordinates(self, codes: CodeArray) -> FloatArray:
        """Return points of the unit cube (R, A) float64, for distances.

        An axis is a parameter's position in its domain, so that neighbouring values such as 32, 48, 64 are equally
        distant. A parameter of one name is one axis in all sketches, over their united domains (0.5 where a sketch
        lacks it); an unordered parameter of k > 2 values is k axes; with more than one sketch each sketch adds an axis.
        Parameters of one value have none.
        """
        out = np.full((len(codes), self._axes.count), 0.5)
        for sketch, where in self._by_sketch(codes):
            for column, axis, table in self._axes.tables[sketch]:
                out[where, axis : axis + table.shape[1]] = table[codes[where, 1 + column]]
            if self._axes.first_sketch_axis is not None:
                out[where, self._axes.first_sketch_axis :] = 0.0
                out[where, self._axes.first_sketch_axis + sketch] = 1.0
        return out

    # -- points --------------------------------------------------------------------------------------------------------

    def listed(self) -> CodeArray | None:
        """Return every legal point (R, 1 + P) in canonical order, or None when some sketch's box is too large to list."""
        parts = [self._list(i) for i in range(len(self.sketches))]
        known = [p for p in parts if p is not None]
        return np.concatenate(known) if len(known) == len(parts) else None

    def _list(self, index: int) -> CodeArray | None:
        if index not in self._listed:
            sketch = self.sketches[index]
            if sketch.box > ENUMERATE_LIMIT:
                self._listed[index] = None
            else:
                sizes = tuple(self.domain_sizes[index].tolist())
                codes = np.empty((sketch.box, 1 + self.width), dtype=np.int32)
                codes[:, 0] = index
                codes[:, 1:] = np.stack(np.unravel_index(np.arange(sketch.box), sizes), axis=1) if self.width else 0
                self._listed[index] = codes[self.valid(codes)]
        return self._listed[index]

    def sample(self, rng: np.random.Generator, count: int) -> CodeArray:
        """Return up to `count` distinct legal points (R, 1 + P), the same share from every sketch with enough of them.

        There are fewer only if sampling yields no more. A small sketch is listed and drawn without replacement. In a large
        one, points are drawn and rejected, in doubling batches, until enough passed or `DRAW_LIMIT` were drawn.

        Raises:
            ScheduleError: No sketch yields a legal point.
        """
        # The first sketches get what an uneven division leaves, so their order is drawn.
        order = [int(i) for i in rng.permutation(len(self.sketches))]
        pools = {i: self.draw(rng, i, count) for i in order}
        if not any(len(p) for p in pools.values()):
            raise ScheduleError(self._nothing_valid())
        # Equal shares per sketch and not per point: a sketch with a small space may be the fastest one.
        taken = dict.fromkeys(order, 0)
        left = min(count, sum(len(p) for p in pools.values()))
        while left:
            open_ = [i for i in order if taken[i] < len(pools[i])]
            share = max(1, left // len(open_))
            for i in open_:
                step = min(share, len(pools[i]) - taken[i], left)
                taken[i] += step
                left -= step
        return np.concatenate([pools[i][: taken[i]] for i in order])

    def draw(self, rng: np.random.Generator, index: int, count: int) -> CodeArray:
        """Return up to `count` distinct legal points (R, 1 + P) of one sketch; see `sample`."""
        listed = self._list(index)
        if listed is not None:
            return listed[rng.permutation(len(listed))[:count]]
        points = np.zeros((0, 1 + self.width), dtype=np.int32)
        batch, drawn = max(1024, 2 * count), 0
        while len(points) < count and drawn < DRAW_LIMIT:
            codes = np.zeros((batch, 1 + self.width), dtype=np.int32)
            codes[:, 0] = index
            codes[:, 1:] = rng.integers(0, self.domain_sizes[index], size=(batch, self.width))
            points = self.distinct(np.concatenate([points, codes[self.valid(codes)]]))
            drawn += batch
            # bounds the memory of a batch
            batch = min(2 * batch, 1 << 18)
        return points[:count]

    def distinct(self, codes: CodeArray) -> CodeArray:
        """Return the distinct rows, in order of their first occurrence."""
        _, first = np.unique(self.keys(codes), return_index=True)
        return codes[np.sort(first)]

    def _nothing_valid(self) -> str:
        looked = ", ".join(
            f"{s.name!r} ({'all ' + str(s.box) if s.box <= ENUMERATE_LIMIT else str(DRAW_LIMIT) + ' random'} points tried)"
            for s in self.sketches
        )
        return (
            f"expected at least one candidate that satisfies the constraints, got none in the sketches {looked}; "
            "loosen the constraints or widen the parameters' domains"
        )


@dataclass(frozen=True)
class _SketchAxes:
    count: int
    first_sketch_axis: int | None
    tables: tuple[
        tuple[tuple[int, int, FloatArray], ...], ...
    ]  # a sketch: (parameter column, first axis, (domain, axes) table)


def _axes(sketches: Sequence[SketchSpace]) -> _SketchAxes:
    """Lay out the axes of `ParameterSpace.coordinates`: parameters of one name (and kind) share them."""
    domains: dict[tuple[str, bool], set[int]] = {}
    for sketch in sketches:
        for p in sketch.parameters:
            domains.setdefault((p.name, p.ordered), set()).update(p.domain)
    start: dict[tuple[str, bool], int] = {}
    count = 0
    for key, domain in domains.items():
        start[key] = count
        if len(domain) > 1:
            count += 1 if key[1] or len(domain) == 2 else len(domain)
    tables = []
    for sketch in sketches:
        sketch_tables = []
        for column, p in enumerate(sketch.parameters):
            union = sorted(domains[p.name, p.ordered])
            if len(union) == 1:
                continue
            if p.ordered or len(union) == 2:
                table = np.searchsorted(union, p.domain).reshape(-1, 1) / (len(union) - 1)
            else:
                table = (np.asarray(p.domain)[:, None] == np.asarray(union)[None, :]).astype(np.float64)
            sketch_tables.append((column, start[p.name, p.ordered], table))
        tables.append(tuple(sketch_tables))
    first = count if len(sketches) > 1 else None
    return _SketchAxes(count + (len(sketches) if first is not None else 0), first, tuple(tables))


def _radix(sizes: IntArray) -> IntArray | None:
    """Return mixed-radix weights (1 + P,) that turn a code into one integer, or None if it would not fit into int64."""
    bases = [len(sizes), *sizes.max(axis=0).tolist()]
    if math.prod(bases) >= 1 << 62:
        return None
    weights = [math.prod(bases[i + 1 :]) for i in range(len(bases))]
    return np.asarray(weights, dtype=np.int64)
