"""The process that improves one artifact: `python -m relax_tune.tuner.serve.improve.child`, started by a server.

It reads an `ImproveOrder` from standard input, ends when standard input closes, and writes events to standard output as the process of a
job (`tuner/service/child`): `progress`, finally `result` or `error`. It runs with the lowest priority, so the server goes first.

Tests: `tests/tuner/serve/improve/test_child.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relax_tune.database.store import open_store
from relax_tune.errors import RelaxTuneError, UserError, is_temporary
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.runtime.child_process import end_with_parent
from relax_tune.runtime.opened import check_swap
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.job.lowered_model import lowered_digest
from relax_tune.tuner.job.replaced_weights import stored_import
from relax_tune.tuner.serve.improve.check import compare
from relax_tune.tuner.serve.improve.order import IMPROVES, WAIT_SECS, ImproveOrder, settings_of
from relax_tune.tuner.service import child as service_child
from relax_tune.tuner.service.work_order import BROKEN, DONE, INTERRUPTED, TRY_LATER, USER_ERROR

Emit = Callable[[str, Any], None]
CHECK_SECS = 5.0
"""Seconds for which both artifacts are timed."""


def lowest_priority() -> None:
    """Run this process, and those it starts, only when no other process of the machine uses the processor."""
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):  # Linux: it gets less than nice 19 gives, and is preempted at once
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def run(order: ImproveOrder, emit: Emit) -> int:
    """Tune, build, compare and write an artifact. Returns the exit code."""
    served, start = load_artifact(order.artifact), time.monotonic()
    artifact = _tuned(order, served, emit) if order.built is None else load_artifact(order.built)
    tuning_secs = time.monotonic() - start
    if artifact.programs == served.programs:
        emit("result", {"refused": "the same kernels as before are the fastest on record", "secs": tuning_secs})
        return DONE
    check_swap(served, artifact, order.artifact)
    sizes = [((function, values), share) for function, values, share in order.sizes]
    with (
        served.open(order.device, threads=order.threads) as old,
        artifact.open(order.device, threads=order.threads) as new,
    ):
        comparison = compare(old, new, sizes, CHECK_SECS)
    result = {
        "refused": comparison.refusal(order.tolerance),
        "gain": comparison.gain,
        "p99": comparison.p99,
        "difference": comparison.difference,
        "sizes": comparison.sizes,
        "secs": tuning_secs,
    }
    if not result["refused"]:
        extra = {**artifact.manifest["extra"], IMPROVES: order.base}
        replace(artifact, manifest={**artifact.manifest, "extra": extra}).save(order.out)
    emit("result", result)
    return DONE


def _tuned(order: ImproveOrder, served: Artifact, emit: Emit) -> Artifact:
    """Return the artifact of the model with the kernels that are fastest at served sizes.

    Raises:
        RelaxTuneError: The model is another one, or the database or the device is away.
    """
    settings, facts = settings_of(order, served)
    try:
        module = load_model(order.source, **{**stored_import(served), "trust": False})
    except RelaxTuneError as error:
        raise UserError(
            f"{order.source}: expected the model that {order.artifact} was built from, or another one with --improve-from; {error}"
        ) from None
    with (
        contextlib.closing(open_runner(settings, _tell)) as runner,
        open_store(settings.db, wait_secs=WAIT_SECS, notice=_tell, create=True) as store,
    ):
        job = device_job(module, runner.device_info(), store, settings).storing(facts["weight_types"])
        if lowered_digest(job.lowered) != facts["digest"] or job.key != served.manifest["extra"].get("model"):
            raise UserError(
                f"{order.source}: expected the model that {order.artifact} was built from, got another one; name it with --improve-from"
            )
        work = job.tune(runner, service_child.Progress(emit).report, _tell)
        built = job.tested_build(runner)
        job.store_plans(built)
        artifact = job.artifact(built)
    _tell(f"{work.measurements} new measurements of {work.trials} candidates, {work.failures} failed")
    return artifact.compiled_for([o.name for o in served.objects]) if served.objects else artifact


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Follow the order of standard input; return an exit code of `tuner/service/work_order`."""
    # A KeyboardInterrupt, so that measured times are stored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; only the server ends its process
    lowest_priority()
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to the log

    def emit(kind: str, value: Any) -> None:
        events.write(json.dumps({kind: value}) + "\n")

    try:
        order = ImproveOrder.from_json(sys.stdin.buffer.readline().decode())
        end_with_parent()
        return run(order, emit)
    except (RelaxTuneError, OSError) as error:
        emit("error", str(error))
        return TRY_LATER if is_temporary(error) else USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the log has the traceback
        traceback.print_exc()
        emit("error", f"{type(error).__name__}: {error}")
        return BROKEN


if __name__ == "__main__":
    sys.exit(main())
