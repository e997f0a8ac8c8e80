"""Variants that a device would compute wrongly because it ends loops after a number of passes, without an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.errors import BuildError
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.codegen.loop_passes import LEAST, most_passes
from relax_tune.ir.core.expr import Var
from relax_tune.ir.core.intervals import Interval
from relax_tune.tuner.program.program_builder import KernelStage, Stage


def check_loop_passes(
    stages: Sequence[Stage], symbols: Sequence[Var], ranges: Sequence[Interval], target: CodeTarget
) -> None:
    """Raise BuildError for a kernel whose work-items may loop more often than `CodeTarget.loop_passes` at some shape.

    symbols: of the task; ranges: of their values, empty if they are not known, and nothing is checked
    """
    if target.loop_passes is None or len(ranges) < len(symbols):
        return
    env = _within(dict(zip(symbols, ranges, strict=True)))
    for stage in stages:
        if not isinstance(stage, KernelStage):
            continue
        inner = _within({v: interval(e, env) for v, e in stage.meaning.items()}) if stage.meaning else env
        found = most_passes(stage.func, target, inner)
        if found is None or found > target.loop_passes:
            named = "no bound" if found is None else f"up to {found}"
            raise BuildError(
                f"{stage.func.name}: wanted at most {target.loop_passes} passes of a work-item through its loops, after which this "
                f"device ends them without an error, found {named}; give the model's symbols lower upper bounds, or use another device"
            )


def _within(ranges: Mapping[Var, Interval]) -> Env:
    return Env({v: (LEAST if low is None else low, high) for v, (low, high) in ranges.items()})
