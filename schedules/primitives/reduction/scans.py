"""The primitive for prefix scans: serial_scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bf16, f16, f32, f64
from relax_tune.ir.core.expr import Expr, Load, Var, cast, const, eq, free_vars, load, loads, op, sub, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Stmt, seq
from relax_tune.ir.deduce.pattern_kinds import ScanPattern, prefix_scan
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
from relax_tune.schedules.primitives.loops.loops import require_serial

ACCUMULATORS: Mapping[DType, DType] = {f16: f32, bf16: f32, f32: f64}
"""What long sums and products of a type are kept in; other types keep their own."""


_Store = Callable[[Mapping[Var, Expr], Load], BufferStore]


def scan_of(block: Block) -> ScanPattern:
    """Match a prefix scan. Raises ScheduleError for any other block."""
    found = prefix_scan(block)
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
    condition is on neither. Afterwards the order of the loop is part of the meaning. Sums of 16-bit floats are kept in float32,
    those of float32 in float64. Results differ by rounding.
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
        return BufferStore(total, old.indices, cast(node.init.value, dtype))

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
        s: Stmt = Block(made, tuple(i for i, _ in pairs), tuple(b for _, b in pairs), body, None, self.node.predicate)
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
    if {target.var, steps.var} & set(free_vars(node.predicate)):
        raise ScheduleError(f"{func.name}: serial_scan wants a block that runs at every step, found {node.predicate!r}")
    return inside[1:-1]
