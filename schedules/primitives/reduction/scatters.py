"""The primitive for scatters: serial_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    and_,
    cast,
    const,
    le,
    load,
    loads,
    lt,
    maximum,
    minimum,
    mul,
    op,
    select,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Stmt, seq, statements
from relax_tune.ir.deduce.scatters import ScatterPattern, scatter
from relax_tune.schedules.independence import writers
from relax_tune.schedules.loop_tree import find_block, fresh, require_compute_block, trivial_loops, with_body
from relax_tune.schedules.primitives.loops.loops import require_serial
from relax_tune.schedules.primitives.reduction.scans import ACCUMULATORS


def total_dtype(pattern: ScatterPattern, stored: DType) -> DType:
    """Return the accumulator type of the results: sums and products of floats need a wider one."""
    return ACCUMULATORS.get(stored, stored) if pattern.operation in ("add", "mul") else stored


def serial_scatter(func: PrimFunc, block: str) -> PrimFunc:
    """Combine each update with the one result at its index, in the order of the updates.

    The work grows with the results plus the updates, not with their product. An update outside the results is dropped.

    Before: `for i: for m: Y[i] = Y[i] + select(index(m) == i, x(m), 0)`
    After: `for i: S[i] = 0`, then `for m: S[index(m)] = S[index(m)] + x(m)`, then `for i: Y[i] = S[i]`
    Checks: the block is such a reduction (`scatter`), is the only writer of its output, and has a nest of serial unsplit loops, under no
    condition. Sums and products of 16-bit floats accumulate in float32, of float32 in float64; without them `S` is `Y`. Results
    differ by rounding.
    """
    node = find_block(func, block)
    pattern = scatter(node)
    if pattern is None:
        raise ScheduleError(
            f"{func.name}: serial_scatter expects {block!r} to reduce `select(index(k) == i, x(k), neutral)` over k for its own "
            f"position i, got {node.body.value!r}"
        )
    require_compute_block(func, "serial_scatter", node)
    target = node.body.buffer
    read = {x.buffer for x in loads(pattern.term, *pattern.targets.values())}
    if len(writers(func, target)) != 1 or target in read:
        raise ScheduleError(f"{func.name}: serial_scatter expects {block!r} to be the only writer of {target.name!r}")
    nest = trivial_loops(func, node, any_order=True)
    for f in nest:
        require_serial(func, f, "serial_scatter")
    dtype = total_dtype(pattern, target.dtype)
    total = target if dtype is target.dtype else Buffer(fresh(func, f"{block}_total"), target.shape, dtype)
    rewrite = _Scatter(func, node, pattern, nest, total)
    parts = [p for s in statements(func.body) for p in (rewrite.parts() if s is nest[0] else (s,))]
    allocs = func.allocs if total is target else (*func.allocs, total)
    return with_body(replace(func, allocs=allocs), seq(*parts))


class _Scatter:
    """Builder of the nests that replace a scatter.

    Attributes:
        total: Buffer in which updates are combined.
    """

    def __init__(
        self, func: PrimFunc, node: Block, pattern: ScatterPattern, nest: Sequence[For], total: Buffer
    ) -> None:
        self.func, self.node, self.pattern, self.total = func, node, pattern, total
        loop_of = dict(zip((i.var for i in node.iters), node.bindings, strict=True))
        self.loops = {v: next(f for f in nest if f.var is b) for v, b in loop_of.items()}
        self.names: list[str] = []

    def parts(self) -> tuple[Stmt, ...]:
        """Make the nests: initial values, updates, and results where they have another type."""
        target, indices = self.node.body.buffer, self.node.body.indices
        start = cast(self.pattern.neutral, self.total.dtype)
        first = self.over_results("start", BufferStore(self.total, indices, start))
        if self.total is target:
            return first, self.updates()
        last = BufferStore(target, indices, cast(load(self.total, indices), target.dtype))
        return first, self.updates(), self.over_results("store", last)

    def over_results(self, name: str, body: BufferStore) -> Stmt:
        """Build a block over all results, with new loops."""
        spatial = [i for i in self.node.iters if i.kind == "spatial"]
        new_vars = {i.var: Var(i.var.name) for i in spatial}
        variables = [self.loop_name(f"{self.loops[i.var].var.name}_{name}") for i in spatial]
        store = BufferStore(
            body.buffer, tuple(substitute(e, new_vars) for e in body.indices), substitute(body.value, new_vars)
        )
        s: Stmt = Block(
            fresh(self.func, f"{self.node.name}_{name}"),
            tuple(replace(i, var=new_vars[i.var]) for i in spatial),
            tuple(variables),
            store,
        )
        for i, v in reversed(list(zip(spatial, variables, strict=True))):
            s = For(v, i.extent, s)
        return s

    def loop_name(self, name: str) -> Var:
        self.names.append(fresh(self.func, name, self.names))
        return Var(self.names[-1])

    def updates(self) -> Stmt:
        """Make the block over rows and updates, under the scatter's own loops of these."""
        pattern, dtype = self.pattern, self.total.dtype
        extents = {i.var: i.extent for i in self.node.iters}
        inside = [c for v, e in pattern.targets.items() for c in (le(const(0), e), lt(e, extents[v]))]
        # In the form before, which compares an index with every position, one outside of the results changes none.
        value = select(and_(*inside), pattern.term, pattern.neutral)
        # The clamp only keeps accesses inside the buffer: an update outside the results is neutral by now.
        where = tuple(
            maximum(minimum(pattern.targets[v], sub(extents[v], 1)), 0) if v in pattern.targets else v
            for v in self.node.body.indices
            if isinstance(v, Var)
        )
        body = BufferStore(
            self.total, where, op(pattern.operation, (load(self.total, where), cast(value, dtype)), dtype)
        )
        step = IterVar(pattern.step.var, self.steps(extents))  # it chooses the result, as no reduction iterator does
        iters: tuple[IterVar, ...] = (*pattern.rows, step)
        s: Stmt = Block(self.node.name, iters, tuple(self.loops[i.var].var for i in iters), body)
        for i in reversed(iters):
            s = replace(self.loops[i.var], extent=i.extent, body=s)
        return s

    def steps(self, extents: dict[Var, Expr]) -> Expr:
        """Return the number of updates, 0 where there is no result."""
        count = self.pattern.step.extent
        results: Expr = const(1)
        for v in self.pattern.targets:
            results = mul(results, extents[v])
        return count if prove(le(1, results)) is Proof.YES else minimum(count, mul(count, results))
