"""Match loop nests to intrinsic calls: operands as addresses with strides.

Tests: `tests/schedules/rules/test_mma_intrinsics.py`, `tests/ir/codegen/test_text.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Algebra, Poly, constant, plus
from relax_tune.ir.codegen.lower.guards import slack_below
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, as_int, conjuncts
from relax_tune.ir.core.stmt import BufferStore, For, IfThenElse, Stmt, accesses
from relax_tune.ir.hardware.intrinsic import Intrinsic, match
from relax_tune.ir.hardware.intrinsics import INTRINSICS
from relax_tune.ir.hardware.mma import ROW
from relax_tune.ir.hardware.swizzle import LINE_BYTES, period


@dataclass(frozen=True, slots=True)
class IntrinsicCall:
    """A loop nest as the call of an intrinsic. Offsets and strides are in elements, before swizzling.

    Attributes:
        operands: (buffer, offset of the first element), in the order of the semantics' parameters.
        strides: Strides in the order of `Intrinsic.strides`.
        sizes: Extents that the semantics leave open.
        slacks: Values that are positive if the nest's condition holds in all iterations.
    """

    intrinsic: Intrinsic
    operands: tuple[tuple[Buffer, Poly], ...]
    strides: tuple[Poly, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    slacks: tuple[Poly, ...] = ()

    def extent(self, dim: Expr) -> int:
        """Return a dim of an operand."""
        size = as_int(dim)
        return dict(self.sizes)[dim.name] if isinstance(dim, Var) else size or 0


def match_call(f: For, algebra: Algebra) -> IntrinsicCall | None:
    """Return a marked loop nest as a call; None if it does not match its intrinsic."""
    intrinsic = INTRINSICS.get(f.marks.intrinsic)
    loops: list[For] = []
    body: Stmt = f
    while isinstance(body, For) and body.marks.intrinsic == f.marks.intrinsic and body.kind in ("serial", "item"):
        loops.append(body)
        body = body.body
    slacks: list[Poly] = []
    if isinstance(body, IfThenElse) and body.orelse is None:
        least = [_least_slack(c, loops, algebra) for c in conjuncts(body.cond)]
        slacks = [r for r in least if r is not None]
        if len(slacks) != len(least):
            return None
        body = body.then
    nest = match(intrinsic, loops, body) if intrinsic is not None and isinstance(body, BufferStore) else None
    if intrinsic is None or nest is None:
        return None
    nest_vars = [m.var for m in loops]
    operands: list[tuple[Buffer, Poly]] = []
    steps: dict[tuple[str, str], Poly] = {}
    for b in intrinsic.semantics.buffers:
        buffer, indices = nest.accesses[b.name]
        flat: Poly = {}
        for d, i in enumerate(indices):
            wide = algebra.times(flat, algebra.static(buffer.shape[d])) if d else flat
            flat = plus(wide, algebra.static(i))
        for g in intrinsic.loops:
            step = _stride(flat, nest.loops[g.var], nest_vars, algebra) if g.var in nest.loops else {}
            if step is None:
                return None
            steps[b.name, g.var.name] = step
        operands.append((buffer, {m: c for m, c in flat.items() if not algebra.depends({m: c}, nest_vars)}))
    if any(b.swizzle for b, _ in operands) and not intrinsic.of_warp:
        return None
    strides = tuple(steps[key] for key in intrinsic.strides())
    sizes = tuple((name, as_int(e) or 0) for name, e in sorted(nest.sizes.items()))
    call = IntrinsicCall(intrinsic, tuple(operands), strides, sizes, tuple(slacks))
    fits = _has_fixed_strides(call) and all(0 < size <= intrinsic.max_extent.get(name, size) for name, size in sizes)
    return call if fits and (not intrinsic.of_warp or (not slacks and _fits_warp(call))) else None


def _fits_warp(call: IntrinsicCall) -> bool:
    """Return whether a warp can fetch the operands.

    They must be in shared memory, in aligned rows, with the swizzle of eight elements or none.
    """
    for (buffer, start), b in zip(call.operands, call.intrinsic.semantics.buffers, strict=True):
        if b in call.intrinsic.semantics.output_buffers:
            if buffer.scope != "local":
                return False
            continue
        if b.name in call.intrinsic.warp_operands:
            if buffer.scope != "local":
                return False
            continue
        steps = [p for p, (name, _) in zip(call.strides, call.intrinsic.strides(), strict=True) if name == b.name]
        if (
            buffer.scope != "shared"
            or buffer.swizzle not in (0, ROW)
            or any(c % ROW for p in (start, *steps) for c in p.values())
        ):
            return False
    return True


def _has_fixed_strides(call: IntrinsicCall) -> bool:
    """Return whether operands have the strides that the intrinsic requires. The stride of a loop of one iteration is 0."""
    if call.intrinsic.fixed_strides and any(buffer.swizzle for buffer, _ in call.operands):
        return False
    steps = dict(zip(call.intrinsic.strides(), call.strides, strict=True))
    for name, var, factor, other in call.intrinsic.fixed_strides:
        required = {m: factor * c for m, c in steps[name, other].items()} if other else constant(factor)
        if steps[name, var] not in ({}, required):
            return False
    return True


def require_shared(f: For) -> None:
    """Check that a nest can be printed as plain loops: every work-item must be able to read the other items' elements.

    Raises:
        BuildError: An operand is in the registers of other work-items.
    """
    in_registers = INTRINSICS[f.marks.intrinsic].warp_operands if f.marks.intrinsic in INTRINSICS else {}
    written = {b for b, _i, is_store in accesses(f) if is_store}
    mine = [b.name for b, _i, _w in accesses(f) if b.scope == "local" and b not in written]
    if in_registers and mine:
        raise BuildError(
            f"{f.marks.intrinsic} needs tiles of its shape in code that whole warps execute; otherwise {mine[0]} must be in shared "
            "memory, not in registers"
        )


def split_swizzle(buffer: Buffer, start: Poly) -> tuple[int, Poly]:
    """Return the length of a buffer's swizzled rows (0 for others) and the offset modulo whole swizzle periods."""
    row = (as_int(buffer.shape[-1]) or 0) if buffer.swizzle and len(buffer.shape) > 1 else 0
    if not row:
        return 0, {}
    elements = row * (as_int(period(row // buffer.swizzle, LINE_BYTES // (buffer.swizzle * buffer.dtype.bytes))) or 1)
    return row, {m: c for m, c in start.items() if c % elements}


def _least_slack(c: Expr, loops: Sequence[For], algebra: Algebra) -> Poly | None:
    """Return the least value of `b - a` of `a < b` (`b - a + 1` of `a <= b`) over the loops; None if it is not linear."""
    slack = slack_below(c, algebra.static)
    if slack is None:
        return None
    for f in loops:
        step, size = slack.get((f.var,), 0), as_int(f.extent)
        if size is None:
            return None
        slack = plus({m: k for m, k in slack.items() if m != (f.var,)}, constant(min(step, 0) * (size - 1)))
    return None if algebra.depends(slack, [f.var for f in loops]) else slack


def _stride(p: Poly, var: Var, nest_vars: Collection[Var], algebra: Algebra) -> Poly | None:
    """Return the stride of `var` in an offset; None if it is not the same everywhere."""
    step: Poly = {}
    for m, c in p.items():
        if var not in m:
            if any(var in algebra.free(a) for a in m):
                return None
            continue
        rest = list(m)
        rest.remove(var)
        if any(v in algebra.free(a) for a in rest for v in nest_vars):
            return None
        step = plus(step, {tuple(rest): c})
    return step
