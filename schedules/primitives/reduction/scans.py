"""The primitives for prefix scans: serial_scan and chunk_scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bf16, f16, f32, f64
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    ExprLike,
    Load,
    Var,
    add,
    and_,
    cast,
    ceildiv,
    conjuncts,
    const,
    eq,
    free_vars,
    le,
    load,
    loads,
    lt,
    mul,
    op,
    select,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Stmt, seq
from relax_tune.ir.deduce.pattern_kinds import NEUTRAL, ScanPattern, prefix_scan
from relax_tune.schedules.independence import writers
from relax_tune.schedules.loop_tree import (
    enclosing,
    find_block,
    find_loop,
    fresh,
    rebind,
    replace_node,
    require_compute_block,
    require_rectangular,
    with_body,
)
from relax_tune.schedules.primitives.arguments import positive
from relax_tune.schedules.primitives.loops.loops import require_serial

ACCUMULATORS: Mapping[DType, DType] = {f16: f32, bf16: f32, f32: f64}
"""Accumulator types of long sums and products; other types accumulate in their own type."""


_Store = Callable[[Mapping[Var, Expr], Load], BufferStore]


def scan_of(block: Block) -> ScanPattern:
    """Match a prefix scan. Raises ScheduleError for any other block."""
    pattern = prefix_scan(block, resumed=True) or prefix_scan(block)
    if pattern is None:
        raise ScheduleError(
            f"expected {block.name!r} to reduce `select(k <= i, x(k), neutral)` over k up to its own position i, got {block.body.value!r}"
        )
    return pattern


def serial_scan(func: PrimFunc, block: str, loop: str) -> PrimFunc:
    """Compute a prefix scan in the order of its results, each from the one before.

    The work grows with the length of the axis, not with its square (Blelloch 1990). An exclusive scan stores `S` before it adds
    `x(i)`. A scan from the end takes `n - 1 - i` for `i`.

    Before: `for i: for k: Y[i] = Y[i] + select(k <= i, x(k), 0)`
    After: `S = 0`, then `for i: S = S + x(i); Y[i] = S`
    Checks: the block is a scan (`scan_of`) and the only writer of its output. `loop` is the one loop over its positions, and the innermost
    loop is over its steps. Both are unsplit, serial and of one extent, with nothing but loops between, which get copies. The block's
    condition is not on the steps, and an upper bound of the positions at most. Afterwards the order of the loop is part of the
    meaning. Sums of 16-bit floats accumulate in float32, sums of float32 in float64. Results differ by rounding.
    """
    node, target = find_block(func, block), find_loop(func, loop)
    pattern = scan_of(node)
    require_compute_block(func, "serial_scan", node)
    inner = _loops_between(func, node, target, pattern)
    if len(writers(func, node.body.buffer)) != 1 or any(x.buffer is node.body.buffer for x in loads(pattern.term)):
        raise ScheduleError(
            f"{func.name}: serial_scan expects {block!r} to be the only writer of {node.body.buffer.name!r}"
        )
    others = [(i, b) for i, b in zip(node.iters, node.bindings) if i not in (pattern.position, pattern.step)]
    dtype = ACCUMULATORS.get(node.body.buffer.dtype, node.body.buffer.dtype)
    total = Buffer(fresh(func, f"{block}_total"), tuple(i.extent for i, _ in others), dtype)
    nests = _Nests(func, node, target, inner, others, pattern.reverse)

    def start(at: Mapping[Var, Expr], old: Load) -> BufferStore:
        assert node.init is not None
        first = substitute(node.init.value, at)
        # After `chunk_scan` the initial value is the sum of the chunks before, cast down from the accumulator's type.
        # Taken before that cast, it is not rounded to 16 bits once per chunk.
        initial = first.args[0] if first.op == "cast" and first.args[0].dtype is dtype else cast(first, dtype)
        return BufferStore(total, old.indices, initial)

    def update(at: Mapping[Var, Expr], old: Load) -> BufferStore:
        return BufferStore(
            total, old.indices, op(pattern.operation, (old, cast(substitute(pattern.term, at), dtype)), dtype)
        )

    def result(at: Mapping[Var, Expr], old: Load) -> BufferStore:
        where = tuple(substitute(e, at) for e in node.body.indices)
        return BufferStore(node.body.buffer, where, cast(old, node.body.buffer.dtype))

    parts = [
        nests.nest(block, total, pattern.step, update),
        nests.nest(f"{block}_store", total, pattern.position, result),
    ]
    # An exclusive scan stores the total before it adds the term of the position.
    scanned = replace(target, body=seq(*(parts[::-1] if pattern.exclusive else parts)))
    first = nests.nest(f"{block}_start", total, None, start)
    return with_body(replace(func, allocs=(*func.allocs, total)), replace_node(func.body, target, seq(first, scanned)))


class _Nests:
    """Builder of blocks in place of `node`, each under copies of the loops between its positions and its steps."""

    def __init__(
        self,
        func: PrimFunc,
        node: Block,
        target: For,
        inner: Sequence[For],
        others: Sequence[tuple[IterVar, Expr]],
        reverse: bool,
    ) -> None:
        self.func, self.node, self.target = func, node, target
        self.inner, self.others, self.reverse = inner, others, reverse
        self.names: list[str] = []

    def nest(self, name: str, total: Buffer, step: IterVar | None, store: _Store) -> Stmt:
        """Make a block over the rows, and over `step` along the scan.

        Args:
            store: Builds the store from the iterators and the row's total.
        """
        variables = {i.var: Var(i.var.name) for i, _ in self.others}
        pairs = [(replace(i, var=variables[i.var]), b) for i, b in self.others]
        values: dict[Var, Expr] = dict(variables)
        if step is not None:
            v = Var(step.var.name)
            pairs.append((replace(step, var=v), self.target.var))
            values[step.var] = sub(sub(step.extent, const(1)), v) if self.reverse else v
        body = store(values, load(total, tuple(variables.values())))
        new_name = name if name == self.node.name else fresh(self.func, name)
        position, steps = self.target.var, enclosing(self.func, self.node)[-1].var
        removed = {steps} if step is not None else {steps, position}
        inside = and_(*(e for e in conjuncts(self.node.predicate) if not removed & set(free_vars(e))))
        s: Stmt = Block(new_name, tuple(i for i, _ in pairs), tuple(b for _, b in pairs), body, None, inside)
        for f in reversed(self.inner):
            suffix = name.removeprefix(self.node.name).strip("_") or "sum"
            self.names.append(fresh(self.func, f"{f.var.name}_{suffix}", self.names))
            var = Var(self.names[-1])
            s = replace(f, var=var, body=rebind(s, {f.var: var}))
        return s


def _loops_between(func: PrimFunc, node: Block, target: For, pattern: ScanPattern) -> tuple[For, ...]:
    """Return the loops inside the loop over positions, without the loop over steps. Raises ScheduleError."""
    path = enclosing(func, node)
    at = dict(zip((i.var for i in node.iters), node.bindings))
    steps = path[-1] if path else target
    if target not in path or at[pattern.position.var] is not target.var or at[pattern.step.var] is not steps.var:
        raise ScheduleError(
            f"{func.name}: serial_scan expects {target.var.name!r} as the loop of the positions of {node.name!r}, and the innermost "
            f"loop as the loop over its steps, both unsplit; got {at[pattern.position.var]!r} and {at[pattern.step.var]!r}"
        )
    inside = path[path.index(target) :]
    for f in inside:
        require_serial(func, f, "serial_scan")
        if not isinstance(f.body, (For, Block)):
            raise ScheduleError(
                f"{func.name}: serial_scan expects only the nest of {node.name!r} inside {target.var.name!r}"
            )
    require_rectangular(func, inside, "serial_scan")
    extents = (target.extent, steps.extent, pattern.position.extent, pattern.step.extent)
    if any(prove(eq(extents[0], e)) is not Proof.YES for e in extents[1:]):
        raise ScheduleError(f"{func.name}: serial_scan expects as many steps as positions, got {extents!r}")
    if not all(
        _holds_up_to(e, target.var, steps.var, node.predicate, pattern.reverse) for e in conjuncts(node.predicate)
    ):
        raise ScheduleError(
            f"{func.name}: serial_scan expects a block that runs at every step, or from the first one on, got {node.predicate!r}"
        )
    return inside[1:-1]


def _holds_up_to(part: Expr, position: Var, step: Var, predicate: Expr, reverse: bool) -> bool:
    """Return True if a part of a condition holds before every position where it holds, steps included.

    It is on neither, or an upper bound `c + position < bound`, or the same of the step.
    """
    if not {position, step} & set(free_vars(part)):
        return True
    if step in free_vars(part):
        part = substitute(part, {step: position})
        if part not in conjuncts(predicate):
            return False
    if reverse or part.op != "lt" or position in free_vars(part.args[1]):
        return False
    parts = linear(part.args[0], (position,))
    return parts is not None and parts[0].get(position) is const(1)


def chunk_scan(func: PrimFunc, block: str, loop: str, factor: ExprLike) -> PrimFunc:
    """Scan an axis by chunks: sum each, scan the sums, and scan every chunk from the sum of the chunks before it.

    Two additions an element instead of one, but chunks are independent (Blelloch 1990, section 1.3). The last block is a scan again,
    for `serial_scan`.

    Before: `for i: for k: Y[i] = Y[i] + select(k <= i, x(k), 0)`
    After: `for c: for l: T[c] = T[c] + x(factor * c + l)`, then `for c: for k: B[c] = B[c] + select(k < c, T[k], 0)`, then, from
    `B[c]` on, `for c: for l: for k: Y[factor * c + l] = Y[factor * c + l] + select(k <= l, x(factor * c + k), 0)`
    Checks: as of `serial_scan`; also, every loop feeds one iterator, the block runs everywhere, and the scan is of sums or
    products from the start of the axis. For floats, only sums with a wider accumulator: the total of one chunk
    could overflow, and would spoil finite results behind it. Chunks have `factor` elements, one or more. Results differ by rounding.
    """
    node, target = find_block(func, block), find_loop(func, loop)
    pattern = prefix_scan(node)
    require_compute_block(func, "chunk_scan", node)
    nest = enclosing(func, node)
    require_rectangular(func, nest, "chunk_scan")
    for p in nest:
        require_serial(func, p, "chunk_scan")
    dtype = node.body.buffer.dtype
    if pattern is None or pattern.reverse or pattern.operation not in NEUTRAL:
        raise ScheduleError(f"{func.name}: chunk_scan expects sums or products from the start of an axis in {block!r}")
    if not dtype.is_int and (pattern.operation == "mul" or dtype not in ACCUMULATORS):
        raise ScheduleError(
            f"{func.name}: chunk_scan expects totals that no single chunk overflows, got {pattern.operation} of {dtype} in {block!r}"
        )
    bound = dict(zip((i.var for i in node.iters), node.bindings))
    one_loop_each = len(nest) == len(node.iters) and all(any(b is p.var for b in node.bindings) for p in nest)
    if not one_loop_each or node.predicate is not TRUE or any(not isinstance(p.body, (For, Block)) for p in nest):
        raise ScheduleError(
            f"{func.name}: chunk_scan expects only {block!r} in one loop for each iterator, without a condition"
        )
    if (
        bound[pattern.position.var] is not target.var
        or prove(eq(pattern.position.extent, pattern.step.extent)) is not Proof.YES
    ):
        raise ScheduleError(
            f"{func.name}: chunk_scan expects {loop!r} as the loop of the positions of {block!r}, of as many steps"
        )
    if len(writers(func, node.body.buffer)) != 1 or any(x.buffer is node.body.buffer for x in loads(pattern.term)):
        raise ScheduleError(
            f"{func.name}: chunk_scan expects {block!r} to be the only writer of {node.body.buffer.name!r}"
        )
    length = positive(func, f"chunk_scan({block!r})", factor, node)
    return _Chunks(func, node, pattern, nest, length).scanned()


class _Chunks:
    """The parts of a scan by chunks, each with its own nest, in place of the block's nest."""

    def __init__(self, func: PrimFunc, node: Block, pattern: ScanPattern, nest: Sequence[For], length: Expr) -> None:
        self.func, self.node, self.pattern, self.nest, self.length = func, node, pattern, nest, length
        self.rows = [i for i in node.iters if i not in (pattern.position, pattern.step)]
        self.dtype = ACCUMULATORS.get(node.body.buffer.dtype, node.body.buffer.dtype)
        self.count = ceildiv(pattern.step.extent, length)
        self.neutral = const(NEUTRAL[pattern.operation], self.dtype)
        self.names: list[str] = []

    def scanned(self) -> PrimFunc:
        """Return the function with the three parts."""
        shape = (*(i.extent for i in self.rows), self.count)
        sums, before = (
            Buffer(fresh(self.func, f"{self.node.name}_{n}"), shape, self.dtype) for n in ("sums", "before")
        )
        chunks = seq(self._sums(sums), self._before(sums, before), self._scan(before))
        func = replace(self.func, allocs=(*self.func.allocs, sums, before))
        return with_body(func, replace_node(func.body, self.nest[0], chunks))

    def _sums(self, sums: Buffer) -> Stmt:
        rows, c, k = self._own(), Var("c"), Var(self.pattern.step.var.name)
        at, place = (*rows.values(), c), add(mul(c, self.length), k)
        term = cast(substitute(self.pattern.term, {**rows, self.pattern.step.var: place}), self.dtype)
        iters = [*self._iters(rows), IterVar(c, self.count), IterVar(k, self.length, "reduce")]
        body = BufferStore(sums, at, op(self.pattern.operation, (load(sums, at), term), self.dtype))
        inside = lt(place, self.pattern.step.extent)
        return self._nest(f"{self.node.name}_sums", iters, body, BufferStore(sums, at, self.neutral), inside)

    def _before(self, sums: Buffer, before: Buffer) -> Stmt:
        rows, c, k = self._own(), Var("c"), Var("k")
        at, row = (*rows.values(), c), tuple(rows.values())
        term = select(lt(k, c), load(sums, (*row, k)), self.neutral)
        iters = [*self._iters(rows), IterVar(c, self.count), IterVar(k, self.count, "reduce")]
        body = BufferStore(before, at, op(self.pattern.operation, (load(before, at), term), self.dtype))
        return self._nest(f"{self.node.name}_before", iters, body, BufferStore(before, at, self.neutral), TRUE)

    def _scan(self, before: Buffer) -> Stmt:
        rows, c = self._own(), Var("c")
        i, k = Var(self.pattern.position.var.name), Var(self.pattern.step.var.name)
        target = self.node.body.buffer
        places = {**rows, self.pattern.position.var: add(mul(c, self.length), i)}
        at = tuple(substitute(e, places) for e in self.node.body.indices)
        term = substitute(self.pattern.term, {**rows, self.pattern.step.var: add(mul(c, self.length), k)})
        counted = lt(k, i) if self.pattern.exclusive else le(k, i)
        value = op(
            self.pattern.operation, (load(target, at), select(counted, term, self.pattern.neutral)), target.dtype
        )
        iters = [*self._iters(rows), IterVar(c, self.count), IterVar(i, self.length), IterVar(k, self.length, "reduce")]
        first = BufferStore(target, at, cast(load(before, (*rows.values(), c)), target.dtype))
        inside = and_(*(lt(add(mul(c, self.length), v), self.pattern.position.extent) for v in (i, k)))
        return self._nest(self.node.name, iters, BufferStore(target, at, value), first, inside)

    def _own(self) -> dict[Var, Var]:
        return {i.var: Var(i.var.name) for i in self.rows}

    def _iters(self, rows: Mapping[Var, Var]) -> list[IterVar]:
        return [replace(i, var=rows[i.var]) for i in self.rows]

    def _nest(self, name: str, iters: Sequence[IterVar], body: BufferStore, init: BufferStore, inside: Expr) -> Stmt:
        """Make a block in one loop for each iterator.

        Args:
            inside: Condition of the block, over its iterators.
        """
        new_name = name if name == self.node.name else fresh(self.func, name)
        bound = []
        for i in iters:
            self.names.append(fresh(self.func, f"{name}_{i.var.name.removeprefix('v')}", self.names))
            bound.append(Var(self.names[-1]))
        predicate = substitute(inside, {i.var: b for i, b in zip(iters, bound)})
        s: Stmt = Block(new_name, tuple(iters), tuple(bound), body, init, predicate)
        for i, var in reversed(list(zip(iters, bound))):
            s = For(var, i.extent, s)
        return s
