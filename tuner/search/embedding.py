"""Further axes for a model of distances, in addition to one per parameter: alignments, and pairs tied by constraints.

Hardware prefers multiples of powers of two: 96 and 128 are neighbours, but 128 may behave more like 32. So the largest power of
two that divides a value is an axis, unless the order of the values implies it.

A constraint may tie parameters: a tile and its threads by their ratio, the two sides of a work-group by their product. Tied pairs
are detected by the mutual information of the two parameters among legal points, which needs no knowledge of the constraints.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relax_tune.tuner.search.space import CodeArray, FloatArray, ParameterSpace, has_alignment, scaled, trailing_zeros

SAMPLE = 4096
"""Most legal points of a sketch that are examined, a random sample if there are more."""
DEPENDENT = 0.006
"""Mutual information (nats) above which two parameters count as tied; several times the value of a sample of independent ones."""
MOST = 12
"""Most tied pairs that become axes, the most dependent first."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """The sum (sign 1) or the difference (-1) of two parameters on their scales, moved to 0..1."""

    columns: tuple[tuple[int, int] | None, ...]  # of each sketch, None where it lacks one of the two
    sign: int
    low: float
    span: float


@dataclass(frozen=True, slots=True)
class _Alignment:
    """The trailing zeros of a parameter's values, moved to 0..1."""

    columns: tuple[int | None, ...]  # of each sketch, None where it lacks the parameter
    low: float
    span: float


class Embedding:
    """Points of a space for a model of distances: coordinates, axes of tied pairs, axes of alignment.

    On a log scale a sum is a product and a difference a ratio. Parameters that grow together (one divides the other) get
    their difference. Parameters that limit one another get their sum.
    """

    def __init__(self, space: ParameterSpace) -> None:
        self._space = space
        self._axes = _axes(space)
        self._alignments = _alignments(space)

    def __call__(self, codes: CodeArray) -> FloatArray:
        """Return points (R, A) float64; 0.5 on the axes a sketch does not have."""
        out = np.full((len(codes), len(self._axes) + len(self._alignments)), 0.5)
        for sketch in np.unique(codes[:, 0]).tolist():
            where = np.flatnonzero(codes[:, 0] == sketch)
            rows = self._space.sketches[sketch].values(codes[where, 1:])
            parameters = self._space.sketches[sketch].parameters
            for number, axis in enumerate(self._axes):
                pair = axis.columns[sketch]
                if pair is not None:
                    a, b = (scaled(parameters[c].domain, rows[:, c]) for c in pair)
                    out[where, number] = (a + axis.sign * b - axis.low) / axis.span
            for number, alignment in enumerate(self._alignments, len(self._axes)):
                column = alignment.columns[sketch]
                if column is not None:
                    out[where, number] = (trailing_zeros(rows[:, column]) - alignment.low) / alignment.span
        return np.concatenate([self._space.coordinates(codes), out], axis=1)


def _axes(space: ParameterSpace) -> tuple[_Axis, ...]:
    # A fixed seed and not the search's generator: the axes describe the space, and must be equal in every search of
    # it.
    rng = np.random.default_rng(0)
    pairs: dict[tuple[str, str, int], tuple[float, float, float]] = {}
    for number, sketch in enumerate(space.sketches):
        codes = space.draw(rng, number, SAMPLE)
        rows = sketch.values(codes[:, 1:])
        # Two values have no scale on which a sum or a difference could say more than the values.
        wide = [c for c, p in enumerate(sketch.parameters) if p.ordered and len(p.domain) > 2]
        for i, a in enumerate(wide):
            for b in wide[:i]:
                shared, together = _dependence(codes[:, 1 + a], codes[:, 1 + b])
                if shared < DEPENDENT:
                    continue
                sign = -1 if together > 0 else 1
                one, other = (scaled(sketch.parameters[c].domain, rows[:, c]) for c in (a, b))
                values = one + sign * other
                key = (sketch.parameters[a].name, sketch.parameters[b].name, sign)
                before = pairs.get(key, (0.0, np.inf, -np.inf))
                pairs[key] = max(before[0], shared), min(before[1], values.min()), max(before[2], values.max())
    strongest = sorted(pairs, key=lambda k: (-pairs[k][0], k))[:MOST]
    axes = []
    for key in strongest:
        _, low, high = pairs[key]
        columns = []
        for sketch in space.sketches:
            names = [p.name for p in sketch.parameters]
            columns.append((names.index(key[0]), names.index(key[1])) if {key[0], key[1]} <= set(names) else None)
        if high > low:
            axes.append(_Axis(tuple(columns), key[2], float(low), float(high - low)))
    return tuple(axes)


def _alignments(space: ParameterSpace) -> tuple[_Alignment, ...]:
    """Return an axis for each name whose parameter has an alignment in some sketch."""
    names = dict.fromkeys(p.name for s in space.sketches for p in s.parameters if has_alignment(p))
    out = []
    for name in names:
        columns = tuple(
            next((c for c, p in enumerate(s.parameters) if p.name == name and p.ordered), None) for s in space.sketches
        )
        exponents = np.concatenate(
            [trailing_zeros(s.parameters[c].domain) for s, c in zip(space.sketches, columns) if c is not None]
        )
        out.append(_Alignment(columns, float(exponents.min()), float(np.ptp(exponents))))
    return tuple(out)


def _dependence(a: CodeArray, b: CodeArray) -> tuple[float, float]:
    """Return the mutual information in nats of two columns (R,) of positions, and the sign of their covariance."""
    if len(a) < 2:
        return 0.0, 0.0
    table = np.zeros((int(a.max()) + 1, int(b.max()) + 1))
    np.add.at(table, (a, b), 1.0 / len(a))
    independent = table.sum(axis=1, keepdims=True) * table.sum(axis=0, keepdims=True)
    some = table > 0
    shared = float((table[some] * np.log(table[some] / independent[some])).sum())
    return shared, float(np.mean((a - a.mean()) * (b - b.mean())))
