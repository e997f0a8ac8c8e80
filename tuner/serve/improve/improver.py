"""The improvement of served models: a round tunes for the served sizes, checks, swaps, and watches the times of the calls that follow.

Tests: `tests/tuner/serve/improve/test_improver.py`, `tests/tuner/serve/improve/test_improve_command.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from relax_tune.errors import RelaxTuneError, UserError
from relax_tune.printable import printable
from relax_tune.runtime.artifact import SUFFIX, Artifact, load_artifact
from relax_tune.runtime.hashed_zip import digest_at_end
from relax_tune.tuner.serve.improve.check import SIZES
from relax_tune.tuner.serve.improve.jobs import tuned_by_service
from relax_tune.tuner.serve.improve.order import ImproveOptions, ImproveOrder
from relax_tune.tuner.serve.improve.sizes import Size, Times, drift, sample_sizes
from relax_tune.tuner.serve.improve.watch import TimesComparison, compare
from relax_tune.tuner.serve.metrics import Metrics
from relax_tune.tuner.serve.models import ModelVersion
from relax_tune.tuner.service.job_process import JobProcess, command_of
from relax_tune.tuner.service.work_order import DONE

_LOG = logging.getLogger("relax_tune.serve")
COMMAND = command_of("relax_tune.tuner.serve.improve.child")
CHECK_SECS = 1.0
"""Seconds between looks at the counts, and at the times after a swap."""
LEAST_CALLS = 200
"""Calls before the first round, and between rounds."""
LEAST_DRIFT = 0.2
"""Change of the mix of sizes since the last round from which another one is due."""
WATCH_SECS = 600.0
"""Longest time to wait for calls to compare after a swap; then it stays, as checked before."""
RETRY_SECS, MOST_RETRY_SECS = 30.0, 600.0
"""Seconds until a failed round is tried again; doubled by each further failure."""
LIMIT_SHARE = 0.9
"""Share of `--improve-secs` from which a tuning was ended by its limit, so that another round goes on with it."""

Phase = Literal["recording", "tuning", "swapping", "watching"]


@dataclass(eq=False)
class Improvement:
    """The improvement of one served model.

    Attributes:
        given: The file that was given to the server.
        base: Its hash.
        serving: The file whose programs run, once a swap is confirmed: `given` or `improved`.
        source: Path of the model.
        lock: The open given file, locked against other servers.
        phase: What it does now.
        message: What the last round came to.
        rounds, swaps, returns: Rounds, artifacts that were swapped in, and swaps that were undone.
        gain: Share of the time of the served mix that the last swap saved, as measured before it.
        progress: Counts of the tuning that runs.
        watched: Times before and after the last swap.
    """

    served: ModelVersion
    given: Path
    base: str
    serving: Path
    source: str
    lock: BinaryIO = field(repr=False)
    phase: Phase = "recording"
    message: str = ""
    rounds: int = 0
    swaps: int = 0
    returns: int = 0
    gain: float | None = None
    progress: Any = None
    watched: TimesComparison | None = None
    counts: dict[Size, int] | None = field(default=None, repr=False)
    tried_at: int = 0
    due_at: float = 0.0
    retry_secs: float = field(default_factory=lambda: RETRY_SECS)
    unfinished: bool = False
    refused: set[str] = field(default_factory=set)

    @property
    def improved(self) -> Path:
        """The file of the confirmed improvement, which a restarted server opens."""
        return improved_path(self.given)

    @property
    def candidate(self) -> Path:
        """The file of an artifact that is checked or watched; a restarted server ignores it."""
        return self.given.with_name(f"{_stem(self.given)}.candidate{SUFFIX}")

    def is_due(self) -> bool:
        """Whether to begin a round: enough calls, and other sizes than at the last one or a tuning that was not finished."""
        if time.monotonic() < self.due_at or self.served.sizes.calls - self.tried_at < LEAST_CALLS:
            return False
        return self.counts is None or self.unfinished or drift(self.counts, self.served.sizes.counts()) >= LEAST_DRIFT

    def to_json(self) -> dict[str, Any]:
        """Return the state for people and programs."""
        watched = self.watched
        return {
            "model": self.served.name,
            "version": str(self.served.version),
            "phase": self.phase,
            "message": self.message,
            "artifact": str(self.serving),
            "calls": self.served.sizes.calls,
            "sizes": len(self.served.sizes.counts()),
            "rounds": self.rounds,
            "swaps": self.swaps,
            "returns": self.returns,
            "gain": self.gain,
            "tuning": self.progress,
            "watched": None
            if watched is None
            else {
                "calls": watched.calls,
                "median": watched.median,
                "p99": watched.p99,
                "p99_before": watched.p99_before,
            },
        }


def improved_path(given: Path) -> Path:
    """Return the file of the improvement of a file that is given to a server."""
    return given.with_name(f"{_stem(given)}.improved{SUFFIX}")


def _stem(path: Path) -> str:
    return path.name.removesuffix(SUFFIX)


class Improver:
    """Improves models one after another, with one child process at a time.

    Args:
        models: The models.
        options: How they are improved.
        metrics: Receives counts of rounds and the gain.
        tell: Receives a sentence for each swap, return and failure.
    """

    def __init__(
        self,
        models: Sequence[Improvement],
        options: ImproveOptions,
        metrics: Metrics,
        tell: Callable[[str], None],
    ) -> None:
        self.models, self._options, self._metrics, self._tell = tuple(models), options, metrics, tell

    async def work(self) -> None:
        """Begin rounds when they are due, until cancelled."""
        while True:
            for model in self.models:
                if model.is_due():
                    await self._round(model)
            await asyncio.sleep(CHECK_SECS)

    async def _round(self, model: Improvement) -> None:
        """Run a round; a failure is reported, and leaves the served programs as they are."""
        model.rounds += 1
        model.tried_at = model.served.sizes.calls
        outcome = "failed"
        try:
            outcome = await self._improve(model)
            model.retry_secs = RETRY_SECS
        except (RelaxTuneError, OSError) as error:
            model.message = printable(f"{error}")
            model.due_at = time.monotonic() + model.retry_secs
            model.counts = None
            self._say(model, f"could not be improved: {error}; tried again in {model.retry_secs:.0f} s")
            model.retry_secs = min(2 * model.retry_secs, MOST_RETRY_SECS)
        except Exception as error:  # a defect here must not end the server
            model.message, model.due_at = printable(f"{type(error).__name__}: {error}"), time.monotonic() + WATCH_SECS
            _LOG.error("%s could not be improved", model.served.name, exc_info=error)
        finally:
            model.phase, model.progress = "recording", None
            model.served.sizes.forget_times()  # the process that tunes slows calls down
            self._metrics.round(model.served.labels, outcome, model.gain)
            with contextlib.suppress(OSError):
                model.candidate.unlink(missing_ok=True)

    async def _improve(self, model: Improvement) -> str:
        """Return the outcome of a round: `refused`, `swapped` or `returned`."""
        sizes = model.served.sizes
        before, counts = sizes.times(), sizes.counts()
        result = await self._checked(model, counts)
        model.counts = counts
        model.unfinished = result.get("secs", 0.0) > LIMIT_SHARE * self._options.secs
        if result["refused"]:
            model.message = result["refused"]
            self._say(model, f"stays as it is: {model.message}")
            return "refused"
        digest = digest_at_end(model.candidate)
        if digest in model.refused:
            model.message = "the same artifact was slower when it was served"
            return "refused"
        model.phase = "swapping"
        present = model.served.artifact
        await model.served.swap(await asyncio.to_thread(load_artifact, model.candidate))
        sizes.forget_times()
        model.swaps += 1
        model.gain = result["gain"]
        self._say(
            model,
            f"runs another artifact: it saves {result['gain']:.1%} of the time of {result['sizes']} served sizes, results differ by at "
            f"most {result['difference']:.1g} of their largest element",
        )
        model.phase = "watching"
        watched = model.watched = await self._watch(model, before)
        if watched is not None and watched.rises:
            model.refused.add(digest)
            await self._go_back(model, present, watched)
            return "returned"
        os.replace(model.candidate, model.improved)
        _sync_folder(model.improved.parent)
        model.serving = model.improved
        model.message = "swapped" if watched is None else f"swapped; {watched}"
        self._say(model, f"confirms the artifact{'' if watched is None else f': {watched}'}; it is {model.improved}")
        return "swapped"

    async def _checked(self, model: Improvement, counts: dict[Size, int]) -> dict[str, Any]:
        """Have a child process tune and compare; return its result. Raises UserError for its error."""
        model.phase = "tuning"
        profile, built = (
            model.given.with_name(f".{_stem(model.given)}.{name}") for name in ("profile.json", "built.rta")
        )
        options = self._options
        order = ImproveOrder(
            artifact=str(model.serving),
            base=model.base,
            source=model.source,
            out=str(model.candidate),
            profile=str(profile),
            sizes=tuple((f, values, share) for (f, values), share in sample_sizes(counts, SIZES)),
            secs=options.secs,
            tolerance=options.tolerance,
            db=options.db,
            built=str(built) if options.via == "jobs" else None,
            device=options.device,
            threads=options.threads,
        )
        try:
            model.served.sizes.profile().save(profile)
            if options.via == "jobs":
                await _in_service(order, options.files, built)
            return await self._follow(model, order)
        finally:
            for path in (profile, built):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    async def _follow(self, model: Improvement, order: ImproveOrder) -> dict[str, Any]:
        """Run the child process to its end."""
        process = JobProcess(order, COMMAND)
        try:
            while (code := await asyncio.to_thread(process.wait, CHECK_SECS)) is None:
                model.progress = process.progress
                for part in process.log():
                    _LOG.debug("%s: %s", model.served.name, printable(part.rstrip()))
        finally:
            process.close()
        if code != DONE or not isinstance(process.result.get("refused"), str):
            log = "".join(process.log())[-400:].strip()
            raise UserError(process.error or f"the process that tunes ended with code {code}: {log}")
        return process.result

    async def _watch(self, model: Improvement, before: Times) -> TimesComparison | None:
        """Return the comparison of the calls after a swap; None if there are too few to compare."""
        end = time.monotonic() + WATCH_SECS
        while time.monotonic() < end:
            await asyncio.sleep(CHECK_SECS)
            comparison = compare(before, model.served.sizes.times())
            if comparison is not None:
                return comparison
        return None

    async def _go_back(self, model: Improvement, artifact: Artifact, watched: TimesComparison) -> None:
        await model.served.swap(artifact)
        model.served.sizes.forget_times()
        model.returns += 1
        model.gain = None
        model.message = f"went back, since calls became slower; {watched}"
        self._say(model, f"runs the artifact from before again, since calls became slower: {watched}")

    def _say(self, model: Improvement, text: str) -> None:
        self._tell(f"{model.served.name} version {model.served.version} {text}")


async def _in_service(order: ImproveOrder, files: str | None, built: Path) -> None:
    """Wait for a service in a thread, which ends when this is cancelled."""
    stop = threading.Event()
    try:
        await asyncio.to_thread(tuned_by_service, order, files, built, stop)
    finally:
        stop.set()


def _sync_folder(folder: Path) -> None:
    """Have the names of a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
