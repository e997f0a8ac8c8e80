"""The primitive that maps a nest to a hardware instruction: tensorize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import TRUE, Expr, as_int
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, Stmt, blocks, rewrite
from relax_tune.ir.hardware.intrinsic import match, nest_of
from relax_tune.ir.hardware.intrinsics import INTRINSICS
from relax_tune.ir.text.printer import print_text
from relax_tune.schedules.loop_tree import find_loop, replace_node, require_compute_block, with_body
from relax_tune.schedules.symbols import only_tunables


def tensorize(func: PrimFunc, loop: str, intrinsic: str) -> PrimFunc:
    """Mark a nest that computes the meaning of an intrinsic of `relax_tune.ir.hardware.intrinsics`.

    Code generation calls the intrinsic where the whole tile is within the block's predicate.

    Before: `for i in range(4): for j in range(16): C[y + i, x + j] = C[y + i, x + j] + A[y + i, k] * B[k, x + j]`
    After: `for i in serial(4, intrinsic="outer_f32_4x16"): for j in serial(16, intrinsic=...): ...` with the same meaning
    Checks: the nest at `loop` is perfect, with the loops of the intrinsic's meaning: of the same extents (for a symbol,
    of any without shape symbols), serial or over the work-items of the same axes. Its one block has no initial value.
    Its value is the intrinsic's, of buffers of the same types; the written one is read only as the accumulator. Each
    operand moves with the loops of the meaning, the dense ones along adjacent elements.
    """
    instruction = INTRINSICS.get(intrinsic)
    if instruction is None:
        raise ScheduleError(
            f"{func.name}: expected an intrinsic, one of {', '.join(sorted(INTRINSICS))}; got {intrinsic!r}"
        )
    node = find_loop(func, loop)
    nest: list[For] = []
    body: Stmt = node
    kinds = {"serial"} | {f.kind for f in instruction.loops}
    while isinstance(body, For):
        if body.kind not in kinds or body.marks.intrinsic:
            raise ScheduleError(f"{func.name}: tensorize expects serial loops, got {body.var.name!r} marked")
        nest.append(body)
        body = body.body
    if not isinstance(body, Block) or not any(_alike(meant, nest) for meant in instruction.nests()):
        shown = " around ".join(f"{f.var.name!r} of extent {f.extent!r}" for f in nest)
        more = "" if isinstance(body, Block) else ", which holds several statements"
        raise ScheduleError(
            f"{func.name}: {intrinsic} expects a nest of loops of extents {', '.join(repr(f.extent) for f in instruction.loops)} around "
            f"one block, got {shown}{more}"
        )
    require_compute_block(func, "tensorize", *blocks(node))
    if body.init is not None:
        raise ScheduleError(
            f"{func.name}: {intrinsic} adds to its output, and {body.name!r} stores an initial value; use "
            "decompose_reduction first"
        )
    # Compared without the predicate: code generation calls the instruction only where it holds for the whole tile,
    # and otherwise runs the loops.
    candidate = nest_of(replace_node(node, body, replace(body, predicate=TRUE)))
    if candidate is None or match(instruction, nest, candidate[1]) is None:
        raise ScheduleError(
            f"{func.name}: block {body.name!r} does not compute what {intrinsic} means:\n{print_text(instruction.semantics)}"
        )
    marked = rewrite(node, lambda n: n.marked(intrinsic=intrinsic) if isinstance(n, For) else n)
    return with_body(func, replace_node(func.body, node, marked))


def _alike(expected: Sequence[For], nest: Sequence[For]) -> bool:
    """Return whether the loops have the expected kinds and extents; a symbolic extent matches any number or tunable."""
    return len(expected) == len(nest) and all(
        (f.kind, f.axis) == (g.kind, g.axis)
        and (as_int(f.extent) == as_int(g.extent) if as_int(f.extent) else _is_known(g.extent))
        for f, g in zip(expected, nest)
    )


def _is_known(extent: Expr) -> bool:
    return only_tunables(extent)
