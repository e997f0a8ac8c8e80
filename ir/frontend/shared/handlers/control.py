"""Branches and loops of both formats: branches and tail recursion of graph functions (Relax, section 3.1).

Tests: `tests/ir/frontend/onnx/test_control.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from relax_tune.errors import ParseError
from relax_tune.ir.arith.bounds import interval
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.dtype import DType, bool_, i64
from relax_tune.ir.core.expr import Expr, Var, const, free_vars, lt, maximum, minimum, substitute
from relax_tune.ir.core.graph import CallFunction, Constant, FunctionRef, GVar, PrimValue, TupleValue, Value
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.struct_info import CallableInfo, PrimInfo, ShapeInfo, TensorInfo, TupleInfo
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.indexing.movement import Slice
from relax_tune.ir.op.shapes import TensorToShape

Values = Sequence[ImportedValue]


ATTEMPTS = 6
TRIED = 2048
"""Sizes at which a condition is tried, for an example of a bound."""


ENDLESS = "expected a number of iterations or a condition, got neither: the loop never ends"


def branch(w: Writer, cond: ImportedValue, then: Callable[[], Values], orelse: Callable[[], Values]) -> Values:
    """Return the results of the side that `cond`, a truth value, chooses. A side that is never chosen is not written.

    Raises ParseError for sides with results of different types or ranks."""
    known = w.scalars(cond)
    test = None if known is None else known.reshape(-1)[0]
    if test is not None and test.value is not None:
        return (then if test.value else orelse)()
    annotations: list[list[TensorInfo]] = []

    def side(write: Callable[[], Values]) -> Callable[[], Value]:
        def run() -> Value:
            with w.scope():
                items = write()
                values = [w.tensor(item) for item in items]
            annotations.append([item.info for item in items])
            return TupleValue(tuple(values))

        return run

    chosen = w.g.branch(w.reshape(w.tensor(cond), ()) if test is None else test, side(then), side(orelse))
    left, right = annotations
    if len(left) != len(right):
        raise ParseError(f"expected as many results of both sides, got {len(left)} and {len(right)}")
    try:
        common = [_common(w, a, b) for a, b in zip(left, right, strict=True)]
    except ParseError as error:
        raise ParseError(f"{error}{_deciding_bound(w, cond)}") from None
    return [_field(w, chosen, k, info) for k, info in enumerate(common)]


def _deciding_bound(w: Writer, cond: ImportedValue) -> str:
    """Return what decides a condition, as the end of an error: a bound of its symbol, for each side if there is one."""
    test = w.condition(cond)
    symbols = [] if test is None else free_vars(test)
    if test is None or not symbols:
        return "; data decide between them"
    if len(symbols) > 1:
        return f"; bounds of {', '.join(v.name for v in symbols)} that decide {test!r} leave one side"
    (v,) = symbols
    least, most = interval(v, w.g.deduction.env)
    low = max(int(least or 0), 0)
    sizes = range(low, min(low + TRIED, low + TRIED if most is None else int(most)) + 1)
    values = [simplify(substitute(test, {v: const(n)})).value is True for n in sizes]
    parts = []
    for side in (True, False):
        if side in values:
            first = values.index(side)
            last = next((k for k in range(first, len(values)) if values[k] is not side), len(values)) - 1
            parts.append((sizes[first], sizes[last]))
    python, flags = (
        " or ".join(form.format(v.name, *ends) for ends in parts) for form in ("{{{0!r}: ({1}, {2})}}", "{0}={1}:{2}")
    )
    return f"; a bound that decides {test!r} leaves one side, such as bounds={python}, or --bound {flags}"


def _common(w: Writer, a: TensorInfo, b: TensorInfo) -> TensorInfo:
    """Return the annotation of a value that is like one or the other; dims that differ are new symbols."""
    if a.ndim != b.ndim or a.dtype is not b.dtype:
        raise ParseError(f"expected results of one type and rank, got {a!r} and {b!r}")
    assert a.shape is not None and b.shape is not None
    outside = set(w.g.in_scope())
    pairs = zip(a.shape, b.shape, strict=True)
    dims = tuple(x if _same(w, x, y) and outside.issuperset(free_vars(x)) else _new(w, "chosen") for x, y in pairs)
    return TensorInfo(dims, a.dtype)


@dataclass(slots=True, eq=False)
class LoopBody:
    """The body of a loop while it is written, a separate function.

    Attributes:
        index: Number of the iteration, from 0.
        state: Values that an iteration takes from the one before.
        going: Whether to go on, by the previous iteration.
    """

    w: Writer
    index: Var
    state: list[ImportedValue] = field(default_factory=list)
    going: ImportedValue | None = None
    captured: dict[ImportedValue, ImportedValue] = field(default_factory=dict)

    def outside(self, item: ImportedValue) -> ImportedValue:
        """Return a value from outside the loop as the body sees it."""
        if item.value is None or isinstance(item.value, Constant):
            return item
        if item not in self.captured:
            name = f"outer_{len(self.captured)}"
            self.captured[item] = replace(item, value=self.w.g.parameter(name, item.info))
        return self.captured[item]


def row(body: LoopBody, item: ImportedValue, axis: int, at: Expr) -> Value:
    """Return row `at` of a value from outside, without its axis; the nearest row where `at` is out of range, which no iteration reads."""
    w = body.w
    near = w.simplify(maximum(minimum(at, item.shape[axis] - 1), 0))
    value = w.emit(Slice(axis, near, w.simplify(near + 1)), w.tensor(body.outside(item)))
    return w.reshape(value, [d for k, d in enumerate(item.shape) if k != axis])


Step = Callable[[LoopBody], tuple[ImportedValue | None, Values, Values]]
"""Writes an iteration. Returns whether to go on (None: always), the new state, and a row for each stacked result."""


def loop(
    w: Writer, state: Values, step: Step, count: ImportedValue | None = None, going: ImportedValue | None = None
) -> tuple[Values, Values]:
    """Write a loop. Return its last state, and the rows of its iterations, stacked along a new first dim.

    A dim of the state that an iteration changes is a symbol of the iteration.

    Args:
        count: Largest number of iterations; None without a limit.
        going: Whether to begin; `step` returns whether to go on.

    Raises:
        ParseError: The state changes its type or rank, rows have different dims, or the loop never ends.
    """
    limit = None if count is None else _limit(w, count)
    plan = _Plan(w.function_name("loop"), tuple(state), limit, going)
    if going is not None and _is_true(going) and count is not None:
        plan.going = None
    for _ in range(ATTEMPTS):
        try:
            with w.g.attempt():
                return plan.write(w, step)
        except _Again:
            continue
    raise ParseError("expected a state whose dims settle after a few iterations, got ones that do not")


def _limit(w: Writer, count: ImportedValue) -> Expr:
    """Return a number of iterations. One that data decide is read once, before the loop."""
    known = w.scalars(count)
    if known is not None:
        limit: Expr = known.reshape(-1)[0]
        return limit
    return size_from_data(w, w.maximum(w.cast(w.tensor(count), i64), 0), "trips")


def size_from_data(w: Writer, count: Value, hint: str = "count") -> Var:
    """Return a symbol for the one element of an int64 tensor, read at run time and at least 0."""
    shape = w.g.call(TensorToShape(), w.reshape(count, [const(1)]))
    symbol = Var(w.g.fresh(hint))
    w.g.match_cast(shape, ShapeInfo((symbol,)))
    return symbol


class _Again(Exception):
    """The loop's function needs other parameters than those it was written with."""


@dataclass(slots=True, eq=False)
class _Plan:
    """What is known of a loop's function. Each attempt to write it learns more, until an attempt finds all of it known.

    Attributes:
        limit: Largest number of iterations.
        going: Whether to begin; None while every iteration goes on.
        rows: Annotations of the rows; None before they are known.
        free: (place, axis) of the dims of the state that are symbols of an iteration.
        broadcasts: Whether the body may broadcast dims that only a run can compare.
    """

    name: str
    initial: tuple[ImportedValue, ...]
    limit: Expr | None
    going: ImportedValue | None
    rows: list[TensorInfo] | None = None
    free: set[tuple[int, int]] = field(default_factory=set)
    broadcasts: bool = True

    def write(self, outer: Writer, step: Step) -> tuple[Values, Values]:
        """Write the function and its call. Raises _Again if the body shows that the function needs other parameters."""
        w = outer.inner(self.name)
        w.broadcasts &= self.broadcasts
        g, symbols = w.g, outer.g.in_scope()
        # a function sees no symbols of its caller: all in scope are passed, and unused ones are removed by later passes
        for v in symbols:
            g.parameter(f"size_{v.name}", PrimInfo(i64, v))
        # The symbols of a program have distinct names, and a loop in a loop sees the index of both.
        index = Var(fresh("index", {v.name for v in symbols}))
        g.parameter("index", PrimInfo(i64, index))
        body = LoopBody(w, index)
        body.state = [w.of(g.parameter(f"state_{k}", self.state_info(k, item))) for k, item in enumerate(self.initial)]
        stacks = [
            g.parameter(f"rows_{k}", TensorInfo((index, *(r.shape or ())), r.dtype))
            for k, r in enumerate(self.rows or ())
        ]
        going = None if self.going is None else w.of(g.parameter("going", TensorInfo((), bool_)))
        body.going = going or w.constant(np.asarray(True), "always")
        first_captured = len(g.parameters)
        test = self.test(body, going)
        last = [*(w.tensor(i) for i in body.state), *stacks]
        known = [len(self.initial) > k and all(at != k for at, _ in self.free) for k in range(len(last))]
        ret = TupleInfo(tuple(v.info if sure else _unknown(v) for v, sure in zip(last, known, strict=True)))

        def then() -> Value:
            with w.scope():
                go, new, rows = step(body)
                self.learn(body, go, new, rows, outer)
                args = [*(w.tensor(i) for i in new), *(_stacked(w, s, r) for s, r in zip(stacks, rows, strict=True))]
                args += [] if going is None or go is None else [w.reshape(w.tensor(go), ())]
            params = g.parameters
            same = [PrimValue(v) for v in symbols]
            ref = FunctionRef(
                self.name, CallableInfo(tuple(p.info for p in params), ret, True, tuple(p.name for p in params))
            )
            return g.emit(CallFunction(ref, (*same, PrimValue(index + 1), *args, *params[first_captured:])), "again")

        # the condition is not assumed inside the branch: kernels are tuned and tested without their loop
        done = g.branch(test, then, lambda: TupleValue(tuple(last)), "done", assume=False)
        ref = outer.g.put(g.define(done, ret))
        begin = [outer.tensor(i) for i in self.initial]
        begin += [outer.full((const(0), *(r.shape or ())), 0, _element(r)) for r in self.rows or ()]
        begin += [] if self.going is None else [outer.reshape(outer.tensor(self.going), ())]
        prims = [PrimValue(v) for v in (*symbols, const(0))]
        call = outer.g.emit(CallFunction(ref, (*prims, *begin, *(outer.tensor(i) for i in body.captured))), "loop")
        return self.results(outer, call)

    def state_info(self, place: int, item: ImportedValue) -> TensorInfo:
        """Return the annotation of a value of the state at any iteration."""
        dims = (
            Var(f"state_{place}_{axis}") if (place, axis) in self.free else d
            for axis, d in enumerate(item.info.shape or ())
        )
        return TensorInfo(tuple(dims), item.dtype)

    def test(self, body: LoopBody, going: ImportedValue | None) -> Expr | Value:
        """Write the condition of an iteration."""
        w = body.w
        if self.limit is not None and going is None:
            return lt(body.index, self.limit)
        below = None if self.limit is None else w.less(w.size(body.index), w.size(self.limit))
        if going is None:
            if below is None:
                raise ParseError(ENDLESS)
            return below
        return w.tensor(going) if below is None else w.logical_and(below, w.tensor(going))

    def learn(self, body: LoopBody, go: ImportedValue | None, new: Values, rows: Values, outer: Writer) -> None:
        """Compare an iteration with the parameters of the function. Raises _Again, ParseError."""
        again = False
        if self.limit is None and (go is None or _is_true(go)):
            raise ParseError(ENDLESS)
        if len(new) != len(body.state):
            raise ParseError(f"expected a new value for each of {len(body.state)} of the state, got {len(new)}")
        for k, (old, item) in enumerate(zip(body.state, new, strict=True)):
            if old.dtype is not item.dtype or old.ndim != item.ndim:
                raise ParseError(f"expected state {k} of one type and rank, got {old.info!r} and {item.info!r}")
            changed = {(k, a) for a, (x, y) in enumerate(zip(old.shape, item.shape)) if not _same(body.w, x, y)}
            again |= not changed <= self.free
            self.free |= changed
        if self.rows is None:
            first: dict[Var, Expr] = {body.index: const(0)}
            for old, begin in zip(body.state, self.initial, strict=True):
                first.update({d: x for d, x in zip(old.shape, begin.shape, strict=True) if isinstance(d, Var)})
            try:
                self.rows = [self.row_info(i.info, first, outer) for i in rows]
            except ParseError:
                if not body.w.broadcasts:
                    raise
                # a state that the first iteration widens has rows of two sizes: without broadcasts, its dims stay
                self.broadcasts, self.free = False, set()
                raise _Again from None
            again |= bool(rows)
        if self.going is None and go is not None and not _is_true(go):
            self.going, again = outer.constant(np.asarray(True), "always"), True
        if again:
            raise _Again

    def row_info(self, info: TensorInfo, first: Mapping[Var, Expr], outer: Writer) -> TensorInfo:
        """Return the annotation of a row of the first iteration, whose dims all rows must have. Raises ParseError."""
        dims = tuple(outer.simplify(substitute(d, first)) for d in info.shape or ())
        if not set(outer.g.in_scope()).issuperset(free_vars(*dims)):
            raise ParseError(
                f"expected rows of one size to stack, got {info!r}, which the values of an iteration decide"
            )
        return TensorInfo(dims, info.dtype)

    def results(self, outer: Writer, call: GVar) -> tuple[Values, Values]:
        """Return the last state and the stacked rows of a call."""
        info = call.info
        assert isinstance(info, TupleInfo)
        state = []
        for k, item in enumerate(self.initial):
            dims = tuple(_new(outer, "last") if (k, a) in self.free else d for a, d in enumerate(item.shape))
            state.append(_field(outer, call, k, TensorInfo(dims, item.dtype)))
        trips = self.limit if self.going is None else None
        if trips is None or not outer.natural(trips):
            trips = _new(outer, "trips") if trips is None else outer.simplify(maximum(trips, 0))
        rows = [TensorInfo((trips, *(r.shape or ())), r.dtype) for r in self.rows or ()]
        return state, [_field(outer, call, len(state) + k, r) for k, r in enumerate(rows)]


def _field(w: Writer, whole: Value, place: int, info: TensorInfo) -> ImportedValue:
    """Return a field of a tuple under dims that are checked at run time where deduction does not know them."""
    item = w.g.item(whole, place)
    assert isinstance(item.info, TensorInfo) and info.shape is not None
    dims = item.info.shape
    exact = dims is not None and all(_same(w, x, y) for x, y in zip(dims, info.shape, strict=True))
    return w.of(item if exact else w.g.match_cast(item, info, item.name))


def _stacked(w: Writer, rows: GVar, row: ImportedValue) -> Value:
    assert isinstance(rows.info, TensorInfo) and rows.info.shape is not None
    return w.concat(0, rows, w.reshape(w.tensor(row), (const(1), *rows.info.shape[1:])))


def _unknown(value: Value) -> TensorInfo:
    """Return the annotation without the dims."""
    assert isinstance(value.info, TensorInfo)
    return TensorInfo(None, value.info.dtype, value.info.ndim)


def _new(w: Writer, hint: str) -> Var:
    """Return a symbol that has no value yet. The printer distinguishes symbols of one name."""
    return Var(w.g.fresh(hint))


def _same(w: Writer, a: Expr, b: Expr) -> bool:
    return w.g.deduction.same(a, b)


def _is_true(item: ImportedValue) -> bool:
    return item.array is not None and bool(item.array.all())


def _element(info: TensorInfo) -> DType:
    assert info.dtype is not None
    return info.dtype
