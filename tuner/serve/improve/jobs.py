"""Tuning by a service: the model and the profile of a served model go into the database's queue, the artifact comes back.

Tests: `tests/tuner/serve/improve/test_jobs.py`.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.jobs.submitted import ENDED
from relax_tune.errors import UserError
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.job.replaced_weights import stored_import
from relax_tune.tuner.serve.improve.order import WAIT_SECS, ImproveOrder, settings_of
from relax_tune.tuner.service.content import ContentStore
from relax_tune.tuner.service.submission import SubmitOptions, files_of, submit_model

POLL_SECS = 2.0


def tuned_by_service(order: ImproveOrder, files: str | None, path: Path, stop: threading.Event) -> None:
    """Have a service tune a model, and write its artifact; waits for it.

    Args:
        order: The order, as for the child process.
        files: Files of submitted jobs.
        path: File of the artifact.
        stop: Cancels the job when it is set.

    Raises:
        UserError: The job failed or was cancelled, or stored its weights in other types than the model.
        RelaxTuneError: The database or the files are away.
    """
    served = load_artifact(order.artifact)
    settings, facts = settings_of(order, served)
    if facts["weight_types"]:
        raise UserError(
            f"{order.artifact}: expected weights of the model's types for --improve-via jobs, got some chosen by --quality; "
            "improve it here"
        )
    settings = replace(settings, files=files)
    note = f"served sizes of {order.artifact}"
    with open_queue(order.db, create=True, wait_secs=WAIT_SECS) as queue:
        bounds = stored_import(served)["bounds"]
        job = submit_model(queue, order.source, settings, bounds, SubmitOptions(note=note[:200]))
        while job.state not in ENDED:
            if stop.wait(POLL_SECS):
                queue.cancel(job.id)
                raise UserError(f"job {job.id} was cancelled, since the server ends")
            (job,) = queue.find(job.id)
    key = job.values("result").get("artifact")
    if job.state != "done" or not isinstance(key, str):
        raise UserError(
            f"job {job.id} {job.state}: {job.message or 'no artifact'}; `relax-tune jobs logs {job.id}` says more"
        )
    ContentStore(files_of(settings)).fetch_file(key, path)
