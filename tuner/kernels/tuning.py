"""The search for the schedule of a single function, by the tuning loop of models and with the same records.

Tests: `tests/tuner/kernels/test_tuning.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relax_tune.database.records import VariantRecord
from relax_tune.database.store import Store
from relax_tune.errors import BuildError, UserError
from relax_tune.ir.core.expr import Expr, Var, substitute
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.schedules.schedule import Schedule, replay
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.progress import TuningProgress
from relax_tune.tuner.kernels.target import KernelTarget
from relax_tune.tuner.plan.plans import times_of
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.variants import TaskVariants

Bounds = Mapping[str, tuple[int, int]]


def bounds_by_symbol(function: str, names: Mapping[Var, str], bounds: Bounds) -> Mapping[Var, tuple[int, int]]:
    """Return the bounds of each symbol.

    Raises:
        UserError: Bounds are missing, unknown or no pairs of whole numbers.
    """
    if set(bounds) != set(names.values()):
        raise UserError(
            f"{function}: expected bounds for {', '.join(names.values()) or 'no symbols, since it has none'}, got "
            f"{', '.join(map(str, bounds)) or 'none'}; give bounds={{name: (least, largest)}}"
        )
    for name, given in bounds.items():
        if not (isinstance(given, (tuple, list)) and len(given) == 2 and all(type(x) is int for x in given)):
            raise UserError(f"{function}: expected the bounds of {name} as (least, largest), got {given!r:.80}")
    return {v: bounds[n] for v, n in names.items()}


def module_of(func: PrimFunc, bounds: Mapping[Var, tuple[int, int]]) -> IRModule:
    """Return a model that calls a function once, with its inputs.

    Raises:
        UserError: Bounds are negative or empty.
    """
    graph = GraphBuilder()
    meaning: dict[Var, Expr] = {v: graph.symbol(v.name, *bounds[v]) for v in func.symbols}
    info = [TensorInfo(tuple(substitute(d, meaning) for d in b.shape), b.dtype) for b in func.buffers]
    inputs, outputs = info[: -func.outputs], info[-func.outputs :]
    arguments = [graph.parameter(b.name, i) for b, i in zip(func.input_buffers, inputs, strict=True)]
    callee = graph.add(func)
    scalars = [meaning[v] for v in func.scalar_params]
    result = graph.call_tir(callee, arguments, outputs[0] if len(outputs) == 1 else outputs, scalars)
    return graph.finish(result)


def tuned_schedule(
    func: PrimFunc,
    target: KernelTarget,
    store: Store,
    settings: Settings,
    bounds: Mapping[Var, tuple[int, int]],
    report: Callable[[TuningProgress], None],
) -> tuple[PrimFunc, Schedule]:
    """Search for the schedule of a function that is fastest over some sizes.

    Returns:
        The function under the names of its records, and the schedule of the fastest generated kernel on record.

    Raises:
        BuildError: No kernel has times at all measured sizes.
        MeasureError: The device cannot measure.
    """
    job = device_job(module_of(func, bounds), target.info, store, settings)
    work = job.tune(target.runner, report)
    (variants,) = job.task_variants.values()
    variant = _fastest(job, variants)
    if variant is None:
        why = "; ".join(sentence for _, sentence in work.problems) or f"{work.failures} candidates failed"
        raise BuildError(f"{func.name} on {target.name}: expected a kernel with times at all sizes, got none: {why}")
    return variants.task.func, _schedule_of(variants, variant)


def _fastest(job: DeviceJob, variants: TaskVariants) -> VariantRecord | None:
    """Return the generated variant with the least weighted time over the anchors; None if none has times at all of them."""
    task = variants.task
    times, known = times_of(variants, job.records(task.key, task.regime))
    totals: dict[str, float] = {}
    for key, row in times.items():
        if known[key].kind in ("tuned", "generic") and None not in row:
            totals[key] = sum(w * t for w, t in zip(task.domain.weights, row) if t is not None)
    # Records of another version's rules may be faster, but cannot be built.
    for key in sorted(totals, key=lambda k: (totals[k], k)):
        if known[key].kind == "generic" or variants.sketch_set.scheduled(known[key]) is not None:
            return known[key]
    return None


def _schedule_of(variants: TaskVariants, variant: VariantRecord) -> Schedule:
    if variant.kind == "generic":
        return variants.sketch_set.generic_schedule
    trace: Any = Trace.from_json(variant.trace)
    return replay(trace.with_values(variant.values), variants.task.func)
