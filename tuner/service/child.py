"""The process that runs one job: `python -m relax_tune.tuner.service.child`, started by a service.

It reads a `WorkOrder` from standard input, and ends when that closes, since its service is lost then. It writes events to
standard output, one JSON object a line: `progress` while it tunes, at last `result` or `error`. All else goes to standard error,
the job's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_tune.database.store import open_store
from relax_tune.errors import RelaxTuneError, TryAgainLater
from relax_tune.ir.frontend.load import load_model
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.job.job import Job, open_runner
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.service.content import ContentStore
from relax_tune.tuner.service.work_order import (
    BROKEN,
    DONE,
    INTERRUPTED,
    NOTHING_MEASURED,
    TRY_LATER,
    USER_ERROR,
    WorkOrder,
)

_GRACE_SECS = 10.0

Emit = Callable[[str, Any], None]


def run(order: WorkOrder, emit: Emit) -> int:
    """Fetch a job's model, tune it, build it, and store the artifact. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="relax-tune-job-") as folder:
        content = ContentStore(order.files)
        path = content.fetch_model(order.model, Path(folder, "model"))
        profile = (
            None if order.profile is None else str(content.fetch_file(order.profile, Path(folder, "profile.json")))
        )
        chosen = order.settings(profile)
        module = load_model(path, order.bounds or None, chosen.cache_dtype, trust=chosen.trust_model)
        with (
            contextlib.closing(open_runner(chosen, _tell)) as runner,
            open_store(chosen.db, wait_secs=chosen.wait_secs, notice=_tell) as store,
        ):
            job = Job(module, runner.device_info(), store, chosen, notice=_tell, submitted=order.id)
            job.report = Progress(chosen.candidates, emit).report
            _tell(f"device: {job.device.kind}, {job.device.name}")
            _tell(f"tuning {len(job.tasks)} tasks of {order.name}")
            work = job.tune(runner)
            built = job.tested_build(runner)
            if not any(plan.times for plan in built.plans.values()):
                emit("error", "nothing usable was measured; the log names what failed")
                _tell_problems(work, built)
                return NOTHING_MEASURED
            job.store_plans(built)
            saved = job.artifact(built).save(Path(folder, "artifact.rta"))
        _tell_problems(work, built)
        result = {
            "artifact": content.put_file(saved),
            "bytes": saved.stat().st_size,
            "name": f"{artifact_stem(order.name)}-{artifact_stem(chosen.target)}.rta",
            "target": job.target.key,
            "trials": work.trials,
            "measurements": work.measurements,
            "failures": work.failures,
        }
        _tell(f"{work.measurements} new measurements of {work.trials} candidates, {work.failures} failed")
        emit("result", result)
    return DONE


class Progress:
    """The counts of all tasks, told after each batch."""

    def __init__(self, candidates: int, emit: Emit) -> None:
        self._candidates, self._emit = candidates, emit
        self._latest: dict[int, TuningProgress] = {}

    def report(self, progress: TuningProgress) -> None:
        self._latest[progress.position] = progress
        told = {
            "tasks": progress.tasks,
            "trials": sum(p.trials for p in self._latest.values()),
            "of": progress.tasks * self._candidates,
            "failures": sum(p.failures for p in self._latest.values()),
            "task": progress.task,
        }
        self._emit("progress", told)


def artifact_stem(name: str) -> str:
    """Return a name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "model"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell_problems(work: TuningSummary, built: BuildResult) -> None:
    for name, problem in work.problems:
        _tell(f"note: {name} could not be tuned to the end: {problem}")
    for note in built.notes:
        _tell(f"note: {note}")


def _end_with_service() -> None:
    """Wait for the end of the service, then end this process."""
    while os.read(0, 4096):  # no buffer, whose lock would be held at the end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECS)
    os._exit(INTERRUPTED)


def main() -> int:
    """Run the job that standard input names. Returns the exit code, as commands have them."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the service's terminal; the service says when to end
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print belongs to the log

    def emit(kind: str, value: Any) -> None:
        events.write(json.dumps({kind: value}) + "\n")

    try:
        order = WorkOrder.from_json(sys.stdin.buffer.readline().decode())
        threading.Thread(target=_end_with_service, daemon=True).start()
        return run(order, emit)
    except TryAgainLater as error:
        emit("error", str(error))
        return TRY_LATER
    except RelaxTuneError as error:
        emit("error", str(error))
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the log has where it came from
        traceback.print_exc()
        emit("error", f"{type(error).__name__}: {error}")
        return BROKEN


if __name__ == "__main__":
    sys.exit(main())
