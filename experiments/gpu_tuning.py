"""Tuning for the parts of `gpu_suite.py`: models within a share of the time, built in several ways."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from gpu_context import Context, OutOfTimeError, Row
from gpu_models import memory_bound

from relax_tune.database.store import open_store
from relax_tune.errors import RelaxTuneError
from relax_tune.ir.core.function import IRModule
from relax_tune.runtime.executor import Executor
from relax_tune.tuner.job.job import Job, open_runner
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
    """Tune one after the other, each in its part of the time that is left, then write WORK/NAME-POLICY.rta and give its name and what
    was measured of it. reserve: seconds that each needs for the rest. policies: those of builds, and `kernels`, which has no library.

    How far it is, and why candidates failed, is printed."""
    chosen = Settings(target=context.target, effort="quick", trials=trials, **settings)
    with open_store(f"sqlite:///{context.work / 'records.db'}") as store, closing(open_runner(chosen)) as runner:
        for number, (name, make) in enumerate(modules.items()):
            until = time.monotonic() + context.left() / (len(modules) - number) - reserve

            def watch(progress: TuningProgress, until: float = until) -> None:
                print(f"{context.left():.0f} s left: {progress}", flush=True)
                if time.monotonic() > until:
                    raise OutOfTimeError

            job = Job(make(), runner.device_info(), store, chosen, watch)
            said = ""
            try:
                said = "".join(f"; {task}: {why}"[:80] for task, why in job.tune(runner).problems)
            except OutOfTimeError:
                said = "; cut short"
            except RelaxTuneError as error:  # what is on record by now is built all the same
                said = f"; {' '.join(str(error).split())[:200]}"
            for policy in policies:
                of = job
                if policy == "kernels":
                    of = Job(job.module, replace(job.device, libraries=()), store, chosen)
                how: Policy = "library" if policy == "library" else "measured"
                of.artifact(of.build(how)).save(context.work / f"{name}-{policy}.rta")
            yield name, measured(name, job) + said


def measured(name: str, job: Job) -> str:
    """How many candidates are on record, and how many of them failed, which is printed with the reasons."""
    tried, failed = set[str](), Counter[str]()
    for choice in job.choices.values():
        for r in job.records(choice.task.key, choice.task.regime):
            tried.add(f"{choice.task.key} {r.variant.key}")
            if r.status == "failed":
                failed[f"{choice.task.name} {r.variant.sketch or r.variant.kind}: {r.stage}: {r.message[:400]}"] += 1
    for reason, count in failed.items():
        print(f"{name}: {count} x {reason}", flush=True)
    return f"{len(tried)} candidates, {failed.total()} failed"


def dispatched(executor: Executor, symbols: Mapping[str, int]) -> str:
    """What runs at these sizes: kernels by the labels of their variants, routines by name."""
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
        job = Job(memory_bound("f32", rows, columns)["softmax"], runner.device_info(), store, chosen)
        work = job.tune(runner)
        (found,) = (job.records(c.task.key, c.task.regime) for c in job.choices.values())
        right = [r for r in found if r.status == "ok" and r.checked]
        least = min((min(r.samples_secs) for r in right), default=float("nan"))
        return {"device": job.device.name, "candidates": work.trials, "right": len(right), "least us": least * 1e6}
