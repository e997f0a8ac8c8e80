"""Nests that are calls of intrinsics: the operands as places in memory, and their strides."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from relax_tune.ir.buffer import Buffer
from relax_tune.ir.codegen.affine import Algebra, Poly, plus
from relax_tune.ir.codegen.lowered import Loop, Node
from relax_tune.ir.expr import Expr, Var
from relax_tune.ir.intrinsics import INTRINSICS, Intrinsic, match
from relax_tune.ir.stmt import Store


@dataclass(frozen=True, slots=True)
class Call:
    """operands: the buffers with the offsets of their first elements, in the order of the meaning's parameters."""

    intrinsic: Intrinsic
    operands: tuple[tuple[Buffer, Poly], ...]
    strides: tuple[Poly, ...]


def call_of(f: Loop, algebra: Algebra) -> Call | None:
    """The call a marked nest is, or None when it does not match."""
    intrinsic = INTRINSICS.get(f.intrinsic)
    loops: list[tuple[Var, Expr]] = []
    body: Node = f
    while isinstance(body, Loop) and body.intrinsic == f.intrinsic and body.kind == "serial":
        loops.append((body.var, body.extent))
        body = body.body
    found = match(intrinsic, loops, body) if intrinsic is not None and isinstance(body, Store) else None
    if intrinsic is None or found is None:
        return None
    own = [v for v, _ in loops]
    # the meaning's loops, in the order of these
    names = [g.var.name for g in intrinsic.loops]
    operands: list[tuple[Buffer, Poly]] = []
    steps: dict[tuple[str, str], Poly] = {}
    for b in intrinsic.meaning.buffers:
        buffer, indices = found[b.name]
        flat: Poly = {}
        for d, i in enumerate(indices):
            wide = algebra.times(flat, algebra.static(buffer.shape[d])) if d else flat
            flat = plus(wide, algebra.static(i))
        for v, name in zip(own, names, strict=True):
            step = _stride(flat, v, own, algebra)
            if step is None:
                return None
            steps[b.name, name] = step
        operands.append((buffer, {m: c for m, c in flat.items() if not algebra.depends({m: c}, own)}))
    return Call(intrinsic, tuple(operands), tuple(steps[key] for key in intrinsic.strides()))


def _stride(p: Poly, var: Var, own: Collection[Var], algebra: Algebra) -> Poly | None:
    """What one step of `var` adds to an offset; None when that is not the same everywhere."""
    step: Poly = {}
    for m, c in p.items():
        if var not in m:
            if any(var in algebra.free(a) for a in m):
                return None
            continue
        rest = list(m)
        rest.remove(var)
        if any(v in algebra.free(a) for a in rest for v in own):
            return None
        step = plus(step, {tuple(rest): c})
    return step
