"""The sizes that a model's symbols may have together: within their bounds, and where conditions over them hold.

Anchors, checks and random inputs use no other sizes, since kernels may rely on every condition that the model states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, Load, Var, as_int, const, free_vars, le, postorder
from relax_tune.schedules.cost.vectorized import compile_numpy

Symbol = TypeVar("Symbol")
Mask = NDArray[np.bool_]

# All values of a symbol are searched if there are at most WHOLE, else the NEAR nearest ones and SPACED log-spaced ones.
WHOLE, NEAR, SPACED = 8192, 2048, 2048
# Changes of one symbol after which a search gives up.
CHANGES = 24
# Values of one symbol that are combined with a change of another.
PAIRS = 32
# Starting points of one call that are searched from.
SEARCHES = 128


@dataclass(frozen=True, slots=True)
class Range:
    """Declared bounds of one symbol of the model, both inclusive."""

    lower: int
    upper: int

    @property
    def middle(self) -> int:
        """The value in the middle on a log scale."""
        return round(math.sqrt(max(self.lower, 1) * max(self.upper, 1)))

    def levels(self, count: int) -> tuple[int, ...]:
        """Return up to `count` log-spaced values including both ends."""
        low, high = max(self.lower, 1), max(self.upper, 1)
        if high <= low or count < 2:
            return (high,)
        ratio = math.log(high / low)
        return tuple(sorted({round(low * math.exp(ratio * a / (count - 1))) for a in range(count)}))


@dataclass(frozen=True, eq=False)
class Condition(Generic[Symbol]):
    """A condition over sizes. `holds` takes an int64 array per symbol, all of one length, and returns a mask."""

    symbols: frozenset[Symbol]
    holds: Callable[[Mapping[Symbol, NDArray[np.int64]]], Mask]


@dataclass(frozen=True, eq=False)
class AllowedSizes(Generic[Symbol]):
    """Ranges of symbols, and conditions over them.

    The results of searches are stored: the tasks of a model ask for the same sizes.
    """

    ranges: Mapping[Symbol, Range]
    conditions: Sequence[Condition[Symbol]]
    _values: dict[Symbol, NDArray[np.int64] | None] = field(default_factory=dict, init=False, repr=False)
    _completions: dict[tuple[tuple[Symbol, int], ...], dict[Symbol, int] | None] = field(
        default_factory=dict, init=False, repr=False
    )
    _tightened: dict[Symbol, Range] = field(default_factory=dict, init=False, repr=False)

    def where(self: AllowedSizes[Var], facts: Sequence[Expr]) -> AllowedSizes[Var]:
        """Return the sizes at which further facts hold.

        Facts over symbols without ranges, and facts that need data, are ignored.
        """
        more = []
        for fact in dict.fromkeys(simplify(f) for f in facts):
            symbols = frozenset(free_vars(fact))
            plain = not any(isinstance(e, Load) for e in postorder((fact,)))
            if symbols and plain and symbols <= self.ranges.keys() and len({v.name for v in symbols}) == len(symbols):
                more.append(_condition(fact, symbols))
        return AllowedSizes(self.ranges, (*self.conditions, *(c for c in more if c is not None)))

    def holds(self, values: Mapping[Symbol, int]) -> bool:
        """Return whether sizes are within the ranges and satisfy each condition over no other symbols."""
        inside = all(self.ranges[s].lower <= x <= self.ranges[s].upper for s, x in values.items())
        return inside and not self._failing(values)

    def nearest(self, start: Mapping[Symbol, int], free: Sequence[Symbol] | None = None) -> dict[Symbol, int] | None:
        """Search for allowed sizes near `start` by changing one symbol at a time. Returns None if the search fails.

        Args:
            free: Symbols that may change; None: all.
        """
        # Conditions are arbitrary expressions (divisibility, products), so no closed form applies: a local search
        # over one or two symbols suffices for the conditions that models state.
        others = list(start) if free is None else free
        values = {s: min(max(x, self.ranges[s].lower), self.ranges[s].upper) for s, x in start.items()}
        values |= {s: int(self._snapped(s, np.asarray([values[s]]))[0]) for s in others}
        for _ in range(CHANGES):
            failing = self._failing(values)
            if not failing:
                return values
            change = self._best_change(values, failing, others)
            better = self._two_changes(values, failing, others) if change is None else {**values, change[0]: change[1]}
            if better is None:
                return None
            values = better
        return None

    def all_nearest(self, starts: Sequence[Mapping[Symbol, int]]) -> list[dict[Symbol, int]]:
        """Return the allowed sizes near each of `starts`, in that order, without repetition.

        Symbols that only the conditions mention get values, too. At most SEARCHES starts are searched from.
        """
        if not starts:
            return []
        symbols = list(starts[0])
        more = [s for s in connected(symbols, self.conditions) if s not in starts[0]]
        columns = {s: self._snapped(s, np.asarray([v[s] for v in starts], np.int64)) for s in symbols}
        starts = [dict(zip(symbols, row)) for row in zip(*(columns[s].tolist() for s in symbols))]
        allowed = np.ones(len(starts), np.bool_)
        for c in self.conditions:
            if c.symbols <= columns.keys():
                allowed &= c.holds(columns)
        if more:  # only a search can tell whether the further symbols have fitting values
            allowed[:] = False
        searched = np.flatnonzero(~allowed)
        chosen = set(
            searched[np.linspace(0, len(searched) - 1, min(len(searched), SEARCHES)).round().astype(int)].tolist()
        )
        by_point: dict[tuple[int, ...], dict[Symbol, int]] = {}
        for number, start in enumerate(starts):
            if allowed[number]:
                by_point.setdefault(tuple(start.values()), dict(start))
            elif number in chosen:
                near = self._completed(start, more)
                if near is not None:
                    by_point.setdefault(tuple(near[s] for s in symbols), near)
        return list(by_point.values())

    def _completed(self, start: Mapping[Symbol, int], more: Sequence[Symbol]) -> dict[Symbol, int] | None:
        """Return allowed sizes near `start` with values of the `more` symbols. `start` stays unchanged where that is possible."""
        key = tuple(start.items())
        if key not in self._completions:
            self._completions[key] = self._search(start, more)
        return self._completions[key]

    def _search(self, start: Mapping[Symbol, int], more: Sequence[Symbol]) -> dict[Symbol, int] | None:
        fills = [{s: getattr(self.ranges[s], end) for s in more} for end in ("middle", "lower", "upper")]
        for fill in fills if more else ():
            near = self.nearest({**start, **fill}, more)
            if near is not None:
                return near
        return self.nearest({**start, **fills[0]}, [*start, *more])

    def tightened(self, symbol: Symbol) -> Range:
        """Return the range of a symbol between the least and the largest value that conditions over no other symbol allow."""
        if symbol not in self._tightened:
            over = [c for c in self.conditions if c.symbols == {symbol}]
            span = self.ranges[symbol]
            ends = [self.nearest({symbol: x}) for x in (span.lower, span.upper)] if over else []
            if ends and ends[0] is not None and ends[1] is not None:
                span = Range(ends[0][symbol], ends[1][symbol])
            self._tightened[symbol] = span
        return self._tightened[symbol]

    def _snapped(self, symbol: Symbol, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the nearest values that the conditions over no other symbol allow.

        Image models state divisibility for each side by itself: no search is needed for these conditions. A value outside of
        the range, or of a range too large for a table, stays as it is.
        """
        if symbol not in self._values:
            span, own = self.ranges[symbol], [c for c in self.conditions if c.symbols == {symbol}]
            table = None
            if own and span.upper - span.lower < WHOLE:
                table = np.arange(span.lower, span.upper + 1, dtype=np.int64)
                table = table[np.all([c.holds({symbol: table}) for c in own], axis=0)]
            self._values[symbol] = table if table is not None and len(table) else None
        table = self._values[symbol]
        if table is None:
            return values
        after = np.clip(np.searchsorted(table, values), 0, len(table) - 1)
        before = np.maximum(after - 1, 0)
        return np.where(values - table[before] <= table[after] - values, table[before], table[after])

    def _failing(self, values: Mapping[Symbol, int]) -> list[Condition[Symbol]]:
        columns = {s: np.asarray([x], np.int64) for s, x in values.items()}
        settled = [s for s, x in values.items() if self._snapped(s, columns[s])[0] == x and self._values[s] is not None]
        over = (c for c in self.conditions if c.symbols <= values.keys() and not any(c.symbols == {s} for s in settled))
        return [c for c in over if not c.holds(columns)[0]]

    def _two_changes(
        self, values: Mapping[Symbol, int], failing: Sequence[Condition[Symbol]], free: Sequence[Symbol]
    ) -> dict[Symbol, int] | None:
        """Return sizes after two changes, where the first one satisfies a failing condition; None if no pair improves."""
        for symbol in (s for s in free if s in failing[0].symbols):
            options = _options(values[symbol], self.ranges[symbol])
            columns = {s: options if s == symbol else np.full(len(options), x) for s, x in values.items()}
            fitting = options[failing[0].holds(columns)]
            for option in fitting[np.argsort(np.abs(fitting - values[symbol]), kind="stable")][:PAIRS].tolist():
                moved = {**values, symbol: option}
                left = self._failing(moved)
                change = self._best_change(moved, left, [s for s in free if s != symbol]) if left else None
                if change is not None and len(self._failing(after := {**moved, change[0]: change[1]})) < len(failing):
                    return after
        return None

    def _best_change(
        self, values: Mapping[Symbol, int], failing: Sequence[Condition[Symbol]], free: Sequence[Symbol]
    ) -> tuple[Symbol, int] | None:
        """Return the change of one symbol after which the fewest conditions fail; None if no change improves."""
        best: tuple[tuple[int, float], Symbol, int] | None = None
        for symbol in (s for s in free if s in failing[0].symbols):
            value = values[symbol]
            options = _options(value, self.ranges[symbol])
            for _ in range(2):  # the second pass refines between the best option and its predecessor
                columns = {s: options if s == symbol else np.full(len(options), x) for s, x in values.items()}
                over = [c for c in self.conditions if symbol in c.symbols and c.symbols <= values.keys()]
                lost = np.sum([~c.holds(columns) for c in over], axis=0)
                at = int(np.lexsort((np.abs(options - value), lost))[0])
                chosen, least = int(options[at]), int(lost[at])
                toward = options[(options - value) * (chosen - value) > 0]
                before = toward[np.abs(toward - value) < abs(chosen - value)]
                edge = int(before[np.argmax(np.abs(before - value))]) if len(before) else value
                options = np.unique(
                    np.linspace(edge, chosen, min(abs(chosen - edge) + 1, WHOLE)).round().astype(np.int64)
                )
            distance = abs(np.log((chosen + 1) / (value + 1)))
            rank = (least, float(distance))
            if least < len([c for c in failing if symbol in c.symbols]) and (best is None or rank < best[0]):
                best = rank, symbol, chosen
        return None if best is None else best[1:]


def _options(value: int, span: Range) -> NDArray[np.int64]:
    low, high = span.lower, span.upper
    if high - low < WHOLE:
        return np.arange(low, high + 1, dtype=np.int64)
    near = np.arange(max(low, value - NEAR), min(high, value + NEAR) + 1)
    spaced = low - 1 + np.geomspace(1, high - low + 1, SPACED).round()
    return np.unique(np.concatenate([near, spaced])).astype(np.int64)


def allowed_sizes(
    ranges: Mapping[Var, Range], conditions: Sequence[Expr], dims: Iterable[Expr], least: int
) -> AllowedSizes[Var]:
    """Return the sizes at which conditions hold and dims are at least `least`."""
    return AllowedSizes(ranges, ()).where([*conditions, *(le(const(least), d) for d in dims if as_int(d) is None)])


def _condition(fact: Expr, symbols: frozenset[Var]) -> Condition[Var] | None:
    try:
        run, _ = compile_numpy([fact])
    except ValueError:  # an operation that sizes do not use
        return None

    def holds(columns: Mapping[Var, NDArray[np.int64]]) -> Mask:
        length = len(next(iter(columns.values())))
        (result,) = run({v.name: columns[v].astype(np.float64) for v in symbols})
        return np.broadcast_to(result != 0, (length,))

    return Condition(symbols, holds)


def connected(symbols: Sequence[Symbol], conditions: Sequence[Condition[Symbol]]) -> list[Symbol]:
    """Return the given symbols, then the symbols that conditions relate to them."""
    related = dict.fromkeys(symbols)
    while more := [v for c in conditions if c.symbols & related.keys() for v in c.symbols if v not in related]:
        related |= dict.fromkeys(sorted(more, key=str))
    return list(related)
