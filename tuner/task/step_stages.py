"""The stages of a step of a fused function, in terms of the fused function's buffers and symbols.

Tests: `tests/tuner/task/test_unfused_variants.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.passes.fusion.symbol_interface import bind_symbols
from relax_tune.ir.passes.fusion.unfuse import FunctionStep
from relax_tune.tuner.program.program_builder import KernelStage, LibraryStage, Stage


def stage_of(step: FunctionStep, scheduled: PrimFunc) -> KernelStage:
    """Return a scheduled step of a library form, in terms of the fused function's buffers and symbols."""
    return KernelStage(scheduled, dict(zip(step.func.buffers, step.args, strict=True)), _meaning(step))


def stages_outside(step: FunctionStep, stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages of a part's variant in terms of the whole task's buffers and symbols."""
    meaning = _meaning(step)
    buffers = dict(zip(step.func.buffers, step.args, strict=True))

    def place(b: Buffer) -> Buffer:
        if b not in buffers:
            buffers[b] = replace(b, shape=tuple(substitute(d, meaning) for d in b.shape))
        return buffers[b]

    outside: list[Stage] = []
    for stage in stages:
        if isinstance(stage, LibraryStage):
            scalars = tuple(substitute(e, meaning) for e in stage.scalars)
            outside.append(replace(stage, buffers=tuple(map(place, stage.buffers)), scalars=scalars))
        else:
            arguments = {p: place(stage.arguments.get(p, p)) for p in stage.func.buffers}
            expressions = {v: substitute(e, meaning) for v, e in stage.meaning.items()} or meaning
            outside.append(KernelStage(stage.func, arguments, expressions))
    return outside


def _meaning(step: FunctionStep) -> dict[Var, Expr]:
    """Map a step's symbols to expressions over the fused function's."""
    infos = [TensorInfo(b.shape, b.dtype) for b in step.args]
    inputs = len(infos) - step.func.outputs
    return bind_symbols(step.func, infos[:inputs], infos[inputs:], step.scalars)
