"""Variants of random legal traces: schedule steps whose names exist, as many as the primitives and the language allow."""

from __future__ import annotations

import json
import random
from contextlib import suppress

from tests.schedules.traces.random_steps import random_step

from relax_tune.database.records import VariantRecord
from relax_tune.errors import BuildError, ScheduleError
from relax_tune.ir.codegen.generate import generate, split_kernels
from relax_tune.schedules.schedule import Schedule
from relax_tune.tuner.program.program_builder import KernelStage
from relax_tune.tuner.task.variants import TaskVariants

ATTEMPTS = 3


def random_variants(task_variants: TaskVariants, count: int, seed: int) -> list[VariantRecord]:
    """The generic variant and up to `count` others: of the rules' traces with more steps, or of random steps alone."""
    rng, result = random.Random(seed), [task_variants.sketch_set.generic()]
    for _ in range(count * ATTEMPTS):
        if len(result) <= count and (variant := _variant(task_variants, rng)) is not None:
            result.append(variant)
    return result


def _variant(task_variants: TaskVariants, rng: random.Random) -> VariantRecord | None:
    func = task_variants.task.func
    s = Schedule(func)
    for _ in range(rng.choice((2, 4, 8))):
        with suppress(ScheduleError):
            primitive, args = random_step(s.func, rng)
            s.apply(primitive, **args)
    if not s.steps:
        return None
    values = {t.name: rng.choice(t.domain) for t in s.trace.tunables}
    variant = VariantRecord("tuned", "random", s.trace.to_json(), json.dumps(values))
    return variant if has_code(task_variants, variant) else None


def has_code(task_variants: TaskVariants, variant: VariantRecord) -> bool:
    """Tell whether a variant can be built: not every schedule of local buffers, work-items and their like has code."""
    try:
        for stage in task_variants.stages(variant):
            if isinstance(stage, KernelStage):
                for part in split_kernels(stage.func):
                    generate(part, task_variants.target)
    except BuildError:
        return False
    return True
