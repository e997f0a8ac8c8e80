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
"""What long sums and products of a type are kept in; other types keep their own."""


_Store = Callable[[Mapping[Var, Expr], Load], BufferStore]


def scan_of(block: Block) -> ScanPattern:
    """Match a prefix scan. Raises ScheduleError for any other block."""
    found = prefix_scan(block, resumed=True) or prefix_scan(block)
    if found is None:
        raise ScheduleError(
            f"wanted {block.name!r} to reduce `select(k <= i, x(k), neutral)` over k up to its own position i, found {block.body.value!r}"
        )
    return found


def serial_scan(func: PrimFunc, block: str, loop: str) -> PrimFunc:
    """Compute a prefix scan in the order of its results, each from the one before.

    The work grows with the length of the axis, not with its square (Blelloch 1990). An exclusive scan stores `S` before it adds
    `x(i)`. A scan from the end takes `n - 1 - i` for `i`.

    Before: `for i: for k: Y[i] = Y[i] + select(k <= i, x(k), 0)`
    After: `S = 0`, then `for i: S = S + x(i); Y[i] = S`
    Checks: the block is a scan (`scan_of`) that alone makes its output. `loop` is the one loop of its positions, and the innermost
    one that of its steps. Both are unsplit, serial and of one extent, with nothing but loops between, which get copies. The block's
    condition is not on the steps, and an upper bound of the positions at most. Afterwards the order of the loop is part of the
    meaning. Sums of 16-bit floats are kept in float32, those of float32 in float64. Results differ by rounding.
    """
    node, target = find_block(func, block), find_loop(func, loop)
    found = scan_of(node)
    require_compute_block(func, "serial_scan", node)
    inner = _loops_between(func, node, target, found)
    if len(writers(func, node.body.buffer)) != 1 or any(x.buffer is node.body.buffer for x in loads(found.term)):
        raise ScheduleError(f"{func.name}: serial_scan wants {block!r} alone to make {node.body.buffer.name!r}")
    others = [(i, b) for i, b in zip(node.iters, node.bindings) if i not in (found.position, found.step)]
    dtype = ACCUMULATORS.get(node.body.buffer.dtype, node.body.buffer.dtype)
    total = Buffer(fresh(func, f"{block}_total"), tuple(i.extent for i, _ in others), dtype)
    nests = _Nests(func, node, target, inner, others, found.reverse)

    def start(at: Mapping[Var, Expr], old: Load) -> BufferStore:
        assert node.init is not None
        first = substitute(node.init.value, at)
        kept = first.args[0] if first.op == "cast" and first.args[0].dtype is dtype else cast(first, dtype)
        return BufferStore(total, old.indices, kept)

    def update(at: Mapping[Var, Expr], old: Load) -> BufferStore:
        return BufferStore(
            total, old.indices, op(found.operation, (old, cast(substitute(found.term, at), dtype)), dtype)
        )

    def result(at: Mapping[Var, Expr], old: Load) -> BufferStore:
        where = tuple(substitute(e, at) for e in node.body.indices)
        return BufferStore(node.body.buffer, where, cast(old, node.body.buffer.dtype))

    parts = [nests.nest(block, total, found.step, update), nests.nest(f"{block}_store", total, found.position, result)]
    scanned = replace(target, body=seq(*(parts[::-1] if found.exclusive else parts)))
    first = nests.nest(f"{block}_start", total, None, start)
    return with_body(replace(func, allocs=(*func.allocs, total)), replace_node(func.body, target, seq(first, scanned)))


class _Nests:
    """Maker of blocks in place of `node`, each under copies of the loops between its positions and its steps."""

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
        """Make a block over the rows, and over `step` along the scan. store: from iterators and the row's total to its store"""
        own = {i.var: Var(i.var.name) for i, _ in self.others}
        pairs = [(replace(i, var=own[i.var]), b) for i, b in self.others]
        values: dict[Var, Expr] = dict(own)
        if step is not None:
            v = Var(step.var.name)
            pairs.append((replace(step, var=v), self.target.var))
            values[step.var] = sub(sub(step.extent, const(1)), v) if self.reverse else v
        body = store(values, load(total, tuple(own.values())))
        made = name if name == self.node.name else fresh(self.func, name)
        position, steps = self.target.var, enclosing(self.func, self.node)[-1].var
        gone = {steps} if step is not None else {steps, position}
        inside = and_(*(e for e in conjuncts(self.node.predicate) if not gone & set(free_vars(e))))
        s: Stmt = Block(made, tuple(i for i, _ in pairs), tuple(b for _, b in pairs), body, None, inside)
        for f in reversed(self.inner):
            suffix = name.removeprefix(self.node.name).strip("_") or "sum"
            self.names.append(fresh(self.func, f"{f.var.name}_{suffix}", self.names))
            var = Var(self.names[-1])
            s = replace(f, var=var, body=rebind(s, {f.var: var}))
        return s


def _loops_between(func: PrimFunc, node: Block, target: For, found: ScanPattern) -> tuple[For, ...]:
    """Return the loops inside the one of the positions, without that of the steps. Raises ScheduleError."""
    path = enclosing(func, node)
    at = dict(zip((i.var for i in node.iters), node.bindings))
    steps = path[-1] if path else target
    if target not in path or at[found.position.var] is not target.var or at[found.step.var] is not steps.var:
        raise ScheduleError(
            f"{func.name}: serial_scan wants {target.var.name!r} as the loop of the positions of {node.name!r}, and the innermost "
            f"loop as that of its steps, both unsplit; found {at[found.position.var]!r} and {at[found.step.var]!r}"
        )
    inside = path[path.index(target) :]
    for f in inside:
        require_serial(func, f, "serial_scan")
        if not isinstance(f.body, (For, Block)):
            raise ScheduleError(
                f"{func.name}: serial_scan wants the nest of {node.name!r} alone inside {target.var.name!r}"
            )
    require_rectangular(func, inside, "serial_scan")
    extents = (target.extent, steps.extent, found.position.extent, found.step.extent)
    if any(prove(eq(extents[0], e)) is not Proof.YES for e in extents[1:]):
        raise ScheduleError(f"{func.name}: serial_scan wants as many steps as positions, found {extents!r}")
    if not all(
        _holds_up_to(e, target.var, steps.var, node.predicate, found.reverse) for e in conjuncts(node.predicate)
    ):
        raise ScheduleError(
            f"{func.name}: serial_scan wants a block that runs at every step, or from the first one on, found {node.predicate!r}"
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
    """Scan chunks of an axis apart: sum each, scan the sums, and scan every chunk from what lies before it.

    Two additions an element instead of one, but chunks are independent (Blelloch 1990, section 1.3). The last block is a scan again,
    for `serial_scan`.

    Before: `for i: for k: Y[i] = Y[i] + select(k <= i, x(k), 0)`
    After: `for c: for l: T[c] = T[c] + x(factor * c + l)`, then `for c: for k: B[c] = B[c] + select(k < c, T[k], 0)`, then, from
    `B[c]` on, `for c: for l: for k: Y[factor * c + l] = Y[factor * c + l] + select(k <= l, x(factor * c + k), 0)`
    Checks: as of `serial_scan`; also, every loop is that of one iterator, the block runs everywhere, and the scan is of sums or
    products from the start of the axis. Of floats, it is of sums that are kept in a wider type: a total that overflows in a chunk
    of its own would spoil finite results behind it. Chunks have `factor` elements, one or more. Results differ by rounding.
    """
    node, target = find_block(func, block), find_loop(func, loop)
    found = prefix_scan(node)
    require_compute_block(func, "chunk_scan", node)
    nest = enclosing(func, node)
    require_rectangular(func, nest, "chunk_scan")
    for p in nest:
        require_serial(func, p, "chunk_scan")
    dtype = node.body.buffer.dtype
    if found is None or found.reverse or found.operation not in NEUTRAL:
        raise ScheduleError(f"{func.name}: chunk_scan wants sums or products from the start of an axis in {block!r}")
    if not dtype.is_int and (found.operation == "mul" or dtype not in ACCUMULATORS):
        raise ScheduleError(
            f"{func.name}: chunk_scan wants totals that overflow in no chunk of their own, found {found.operation} of {dtype} in {block!r}"
        )
    bound = dict(zip((i.var for i in node.iters), node.bindings))
    alone = len(nest) == len(node.iters) and all(any(b is p.var for b in node.bindings) for p in nest)
    if not alone or node.predicate is not TRUE or any(not isinstance(p.body, (For, Block)) for p in nest):
        raise ScheduleError(
            f"{func.name}: chunk_scan wants {block!r} alone in one loop for each iterator, without a condition"
        )
    if (
        bound[found.position.var] is not target.var
        or prove(eq(found.position.extent, found.step.extent)) is not Proof.YES
    ):
        raise ScheduleError(
            f"{func.name}: chunk_scan wants {loop!r} as the loop of the positions of {block!r}, of as many steps"
        )
    if len(writers(func, node.body.buffer)) != 1 or any(x.buffer is node.body.buffer for x in loads(found.term)):
        raise ScheduleError(f"{func.name}: chunk_scan wants {block!r} alone to make {node.body.buffer.name!r}")
    length = positive(func, f"chunk_scan({block!r})", factor, node)
    return _Chunks(func, node, found, nest, length).scanned()


class _Chunks:
    """The parts of a scan by chunks, each in a nest of its own in place of the block's."""

    def __init__(self, func: PrimFunc, node: Block, found: ScanPattern, nest: Sequence[For], length: Expr) -> None:
        self.func, self.node, self.found, self.nest, self.length = func, node, found, nest, length
        self.rows = [i for i in node.iters if i not in (found.position, found.step)]
        self.dtype = ACCUMULATORS.get(node.body.buffer.dtype, node.body.buffer.dtype)
        self.count = ceildiv(found.step.extent, length)
        self.neutral = const(NEUTRAL[found.operation], self.dtype)
        self.names: list[str] = []

    def scanned(self) -> PrimFunc:
        """Return the function with the three parts."""
        shape = (*(i.extent for i in self.rows), self.count)
        sums, before = (
            Buffer(fresh(self.func, f"{self.node.name}_{n}"), shape, self.dtype) for n in ("sums", "before")
        )
        made = seq(self._sums(sums), self._before(sums, before), self._scan(before))
        func = replace(self.func, allocs=(*self.func.allocs, sums, before))
        return with_body(func, replace_node(func.body, self.nest[0], made))

    def _sums(self, sums: Buffer) -> Stmt:
        own, c, k = self._own(), Var("c"), Var(self.found.step.var.name)
        at, place = (*own.values(), c), add(mul(c, self.length), k)
        term = cast(substitute(self.found.term, {**own, self.found.step.var: place}), self.dtype)
        iters = [*self._iters(own), IterVar(c, self.count), IterVar(k, self.length, "reduce")]
        body = BufferStore(sums, at, op(self.found.operation, (load(sums, at), term), self.dtype))
        inside = lt(place, self.found.step.extent)
        return self._nest(f"{self.node.name}_sums", iters, body, BufferStore(sums, at, self.neutral), inside)

    def _before(self, sums: Buffer, before: Buffer) -> Stmt:
        own, c, k = self._own(), Var("c"), Var("k")
        at, row = (*own.values(), c), tuple(own.values())
        term = select(lt(k, c), load(sums, (*row, k)), self.neutral)
        iters = [*self._iters(own), IterVar(c, self.count), IterVar(k, self.count, "reduce")]
        body = BufferStore(before, at, op(self.found.operation, (load(before, at), term), self.dtype))
        return self._nest(f"{self.node.name}_before", iters, body, BufferStore(before, at, self.neutral), TRUE)

    def _scan(self, before: Buffer) -> Stmt:
        own, c = self._own(), Var("c")
        i, k = Var(self.found.position.var.name), Var(self.found.step.var.name)
        target = self.node.body.buffer
        places = {**own, self.found.position.var: add(mul(c, self.length), i)}
        at = tuple(substitute(e, places) for e in self.node.body.indices)
        term = substitute(self.found.term, {**own, self.found.step.var: add(mul(c, self.length), k)})
        counted = lt(k, i) if self.found.exclusive else le(k, i)
        value = op(self.found.operation, (load(target, at), select(counted, term, self.found.neutral)), target.dtype)
        iters = [*self._iters(own), IterVar(c, self.count), IterVar(i, self.length), IterVar(k, self.length, "reduce")]
        first = BufferStore(target, at, cast(load(before, (*own.values(), c)), target.dtype))
        inside = and_(*(lt(add(mul(c, self.length), v), self.found.position.extent) for v in (i, k)))
        return self._nest(self.node.name, iters, BufferStore(target, at, value), first, inside)

    def _own(self) -> dict[Var, Var]:
        return {i.var: Var(i.var.name) for i in self.rows}

    def _iters(self, own: Mapping[Var, Var]) -> list[IterVar]:
        return [replace(i, var=own[i.var]) for i in self.rows]

    def _nest(self, name: str, iters: Sequence[IterVar], body: BufferStore, init: BufferStore, inside: Expr) -> Stmt:
        """Make a block in one loop for each iterator. inside: its condition, over the iterators"""
        made = name if name == self.node.name else fresh(self.func, name)
        bound = []
        for i in iters:
            self.names.append(fresh(self.func, f"{name}_{i.var.name.removeprefix('v')}", self.names))
            bound.append(Var(self.names[-1]))
        predicate = substitute(inside, {i.var: b for i, b in zip(iters, bound)})
        s: Stmt = Block(made, tuple(iters), tuple(bound), body, init, predicate)
        for i, var in reversed(list(zip(iters, bound))):
            s = For(var, i.extent, s)
        return s
