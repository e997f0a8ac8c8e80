"""What is tried for a task on a GPU, and on a device that ends loops after a number of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
from tests.support.tuner_models import (
    PAPER_DEVICE,
    QUICK,
    attention,
    feed_forward,
    narrowed,
    row_scale,
    task_variants_of,
)

from relax_tune.database.store import MemoryStore
from relax_tune.errors import BuildError
from relax_tune.ir.codegen.generate import CodeTarget, generate, split_kernels
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.stmt import loops
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.program.program_builder import KernelStage
from relax_tune.tuner.task.allowed_sizes import Range
from relax_tune.tuner.task.domain import Domain
from relax_tune.tuner.task.variants import TaskVariants

GPU = HardwareInfo.from_limits(
    "opencl",
    {"workers": 8, "warp": 32, "max_group_size": 64, "max_local_bytes": 32 << 10, "registers_per_sm": 64 << 10},
)


def choices_on_gpu(make: Callable[[], IRModule]) -> list[TaskVariants]:
    """The choices for each function of a model on a GPU that has a library."""
    job = device_job(make(), PAPER_DEVICE, MemoryStore(), QUICK)
    points = Domain((), ())
    return [task_variants_of(t.func, points, GPU, ("clblast",)) for t in job.tasks]


@pytest.mark.parametrize("make", [feed_forward, attention, row_scale])
def test_every_kernel_beside_a_library_has_work_items_on_a_gpu(make: Callable[[], IRModule]) -> None:
    beside = 0
    for task_variants in choices_on_gpu(make):
        for record in (
            task_variants.sketch_set.generic(),
            *task_variants.library.variants,
            *task_variants.unfused.variants,
        ):
            for stage in task_variants.stages(record):
                if not isinstance(stage, KernelStage):
                    continue
                for part in split_kernels(stage.func):
                    made = generate(part, CodeTarget("opencl", GPU.lanes, GPU.local_bytes))
                    assert loops(part.body, "item"), (record, part)
                    assert 1 < prod(made.local) <= GPU.group_size, (record, made.local)
                    beside += record.kind == "library"
    assert beside or make is row_scale


def softmax_of_rows(upper: int | None) -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n", 1, upper)
    return g.finish(g.call(Softmax(), g.input("x", (16, n))))


def job_with_limit(upper: int | None, passes: int, **more: Range) -> DeviceJob:
    device = replace(PAPER_DEVICE, limits=tuple(sorted((*PAPER_DEVICE.limits, ("loop_passes", passes)))))
    return narrowed(device_job(softmax_of_rows(upper), device, MemoryStore(), QUICK), more)


def test_kernels_beyond_the_limit_of_loops_are_refused() -> None:
    job = job_with_limit(1 << 16, 1 << 16)
    (task_variants,) = job.task_variants.values()
    with pytest.raises(BuildError, match=r"65536 passes.*up to"):
        task_variants.stages(task_variants.sketch_set.generic())
    with pytest.raises(BuildError, match=r"no form.*generic fallback"):
        job.build("generic")
    job_with_limit(64, 1 << 16).build("generic")


def test_narrower_tuned_range_does_not_loosen_the_limit_of_loops() -> None:
    with pytest.raises(BuildError, match="passes of a work-item"):
        job_with_limit(1 << 16, 1 << 16, n=Range(1, 64)).build("generic")


def test_symbol_without_upper_bound_has_no_bound_of_passes() -> None:
    with pytest.raises(BuildError, match="got no bound"):
        job_with_limit(None, 1 << 16).build("generic")
