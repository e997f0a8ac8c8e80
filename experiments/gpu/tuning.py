"""Tuning for the parts of `suite.py`: models within a share of the time, built in several ways."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from experiments.gpu.context import Context, OutOfTimeError, Row
from experiments.gpu.models import memory_bound
from relax_tune.database.store import open_store
from relax_tune.errors import RelaxTuneError
from relax_tune.ir.core.function import IRModule
from relax_tune.runtime.executor import Executor
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.job.progress import TuningProgress
from relax_tune.tuner.settings import Policy, Settings


def tuned(
    context: Context,
    modules: Mapping[str, Callable[[], IRModule]],
    reserve: float,
    trials: int,
    policies: Sequence[str],
    **settings: Any,
) -> Iterator[tuple[str, str]]:
    """Tune models one after the other, each in its share of the remaining time; yield the name of WORK/NAME-POLICY.rta and figures.

    reserve: seconds that each needs after tuning. policies: those of builds, and `kernels`, which has no library. Progress and the reasons
    of failed candidates are printed.
    """
    chosen = Settings(target=context.target, effort="quick", trials=trials, **settings)
    with open_store(f"sqlite:///{context.work / 'records.db'}") as store, closing(open_runner(chosen)) as runner:
        for number, (name, make) in enumerate(modules.items()):
            until = time.monotonic() + context.left() / (len(modules) - number) - reserve

            def watch(progress: TuningProgress, until: float = until) -> None:
                print(f"{context.left():.0f} s left: {progress}", flush=True)
                if time.monotonic() > until:
                    raise OutOfTimeError

            job = device_job(make(), runner.device_info(), store, chosen)
            said = ""
            try:
                said = "".join(f"; {task}: {why}"[:80] for task, why in job.tune(runner, watch).problems)
            except OutOfTimeError:
                said = "; cut short"
            except RelaxTuneError as error:  # what is on record by now is built all the same
                said = f"; {' '.join(str(error).split())[:200]}"
            for policy in policies:
                of = job
                if policy == "kernels":
                    of = device_job(job.module, replace(job.device, libraries=()), store, chosen)
                how: Policy = "library" if policy == "library" else "measured"
                of.artifact(of.build(how)).save(context.work / f"{name}-{policy}.rta")
            yield name, measured(name, job) + said


def measured(name: str, job: DeviceJob) -> str:
    """How many candidates are on record, and how many of them failed, which is printed with the reasons."""
    tried, failed = set[str](), Counter[str]()
    for choice in job.task_variants.values():
        for r in job.records(choice.task.key, choice.task.regime):
            tried.add(f"{choice.task.key} {r.variant.key}")
            if r.status == "failed":
                failed[f"{choice.task.name} {r.variant.sketch or r.variant.kind}: {r.stage}: {r.message[:400]}"] += 1
    for reason, count in failed.items():
        print(f"{name}: {count} x {reason}", flush=True)
    return f"{len(tried)} candidates, {failed.total()} failed"


def dispatched(executor: Executor, symbols: Mapping[str, int]) -> str:
    """Return what is dispatched at these sizes: kernels by the labels of their variants, routines by name."""
    values = executor.bind(symbols).values
    chosen = [call.variants[values[call.choice]] for call in executor.program.calls]
    found = [s.target if s.kind == "library" else v.label for v in chosen for s in v.steps]
    return ", ".join(dict.fromkeys(found))


def one_kernel(context: Context, target: str, **settings: Any) -> Row:
    """A softmax tuned on a target by a few candidates: checked and timed, as every record is."""
    rows, columns = (8, 40) if context.tiny else (4096, 1024)
    chosen = Settings(target=target, effort="quick", trials=1 if context.tiny else 4, **settings)
    runner = open_runner(chosen)
    with open_store("memory://") as store, closing(runner):
        job = device_job(memory_bound("f32", rows, columns)["softmax"], runner.device_info(), store, chosen)
        work = job.tune(runner)
        (found,) = (job.records(c.task.key, c.task.regime) for c in job.task_variants.values())
        right = [r for r in found if r.status == "ok" and r.checked]
        least = min((min(r.samples_secs) for r in right), default=float("nan"))
        return {"device": job.device.name, "candidates": work.trials, "right": len(right), "least us": least * 1e6}
