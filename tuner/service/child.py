"""The process that runs one job: `python -m relax_tune.tuner.service.child`, started by a service.

It reads a `WorkOrder` from standard input and ends when standard input closes, which means that the service has ended. It writes events
to standard output, one JSON object per line: `progress` while it tunes, finally `result` or `error`. Everything else goes to standard
error, the job's log.

Tests: `tests/tuner/service/test_service.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from relax_tune.database.store import open_store
from relax_tune.errors import RelaxTuneError, is_temporary
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.child_process import end_with_parent
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.measure.base import OtherUnit
from relax_tune.tuner.measure.scratch import JOB, ScratchFolder
from relax_tune.tuner.service.content import ContentStore
from relax_tune.tuner.service.work_order import (
    BROKEN,
    DONE,
    INTERRUPTED,
    NOTHING_MEASURED,
    OTHER_UNIT,
    TRY_LATER,
    USER_ERROR,
    WorkOrder,
)

Emit = Callable[[str, Any], None]


def run(order: WorkOrder, emit: Emit) -> int:
    """Fetch a job's model, tune it, build it, and store the artifact. Returns the exit code."""
    with ScratchFolder(JOB) as scratch:
        folder = scratch.path
        content = ContentStore(order.files)
        path = content.fetch_model(order.model, folder / "model")
        profile = None if order.profile is None else str(content.fetch_file(order.profile, folder / "profile.json"))
        chosen = order.settings(profile)
        module = load_model(path, order.bounds or None, **chosen.import_options)
        with (
            contextlib.closing(open_runner(chosen, _tell)) as runner,
            open_store(chosen.db, wait_secs=chosen.wait_secs, notice=_tell) as store,
        ):
            job = device_job(module, runner.device_info(), store, chosen)
            _tell(f"device: {job.device.kind}, {job.device.name}")
            _tell(f"tuning {len(job.tasks)} tasks of {order.name}")
            try:
                work = job.tune(runner, Progress(emit).report, _tell, order.id)
            except OtherUnit:
                emit("target", job.target.key)
                raise
            built = job.tested_build(runner)
            if not any(plan.times for plan in built.plans.values()):
                emit("error", "nothing usable was measured; the log has the failures")
                _tell_problems(work, built)
                return NOTHING_MEASURED
            job.store_plans(built)
            saved = job.artifact(built).save(folder / "artifact.rta")
        _tell_problems(work, built)
        result = {
            "artifact": content.put_file(saved),
            "bytes": saved.stat().st_size,
            "target": job.target.key,
            "trials": work.trials,
            "measurements": work.measurements,
            "failures": work.failures,
        }
        _tell(f"{work.measurements} new measurements of {work.trials} candidates, {work.failures} failed")
        emit("result", result)
    return DONE


class Progress:
    """Emits the counts of all tasks after each batch."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._latest: dict[int, TuningProgress] = {}

    def report(self, progress: TuningProgress) -> None:
        self._latest[progress.position] = progress
        trials = sum(p.trials for p in self._latest.values())
        counts = {
            "tasks": progress.tasks,
            "done": progress.done,
            "trials": trials,
            "of": trials + progress.left,
            "model_secs": progress.model_secs,
            "first_secs": progress.first_secs,
            "left_secs": progress.left_secs,
            "failures": sum(p.failures for p in self._latest.values()),
            "task": progress.task,
        }
        self._emit("progress", counts)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell_problems(work: TuningSummary, built: BuildResult) -> None:
    for name, problem in work.problems:
        _tell(f"note: tuning of {name} ended early: {problem}")
    for note in built.notes:
        _tell(f"note: {note}")


def main() -> int:
    """Run the job of standard input; return the exit code, one of `work_order`."""
    # A KeyboardInterrupt, so that a job that is stopped stores what it has measured, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; only the service ends its jobs
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to the log

    def emit(kind: str, value: Any) -> None:
        events.write(json.dumps({kind: value}) + "\n")

    try:
        order = WorkOrder.from_json(sys.stdin.buffer.readline().decode())
        end_with_parent()
        return run(order, emit)
    except (RelaxTuneError, OSError) as error:
        emit("error", str(error))
        if isinstance(error, OtherUnit):
            return OTHER_UNIT
        return TRY_LATER if is_temporary(error) else USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the log has the traceback
        traceback.print_exc()
        emit("error", f"{type(error).__name__}: {error}")
        return BROKEN


if __name__ == "__main__":
    sys.exit(main())
