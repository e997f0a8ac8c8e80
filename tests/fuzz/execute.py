"""Batches of programs on a device: built together, compiled in few units, and run in a child process that may die."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.cuda_emulation.driver import emulated
from tests.runtime.whole_models import chosen
from tests.support.tuner_models import QUICK, job_dispatching

from relax_tune.database.store import MemoryStore
from relax_tune.errors import BuildError, DeduceError, RelaxTuneError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.device import c as c_device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program.program import KernelSource
from relax_tune.tuner.job.job import Job

Array = np.ndarray[Any, Any]
SECONDS = 300
UNIT = 60
"""Kernels in a translation unit."""


@dataclass(frozen=True)
class Way:
    """How a program is built. policy: generic, library, or tuned: random sketches with random tunables.

    level: of optimisation, in C"""

    target: str = "c"
    policy: str = "generic"
    level: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Trial:
    """A program and the arguments of each of its calls."""

    module: IRModule
    calls: tuple[Sequence[Array], ...]


@dataclass(frozen=True)
class Outcome:
    """Of one program. unbuilt: why it was refused; crash: an error that is nobody's refusal, or a signal.

    results: of each call, the outputs or the text of a refusal"""

    unbuilt: str = ""
    crash: str = ""
    results: tuple[Any, ...] = ()


class Compiled:
    """A device that has compiled the kernels of a batch already."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.handles: dict[tuple[str, tuple[str, ...]], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def prepare(self, kernels: Sequence[KernelSource]) -> None:
        named = {(k.name, k.flags): k for k in kernels}
        found = self.device.compile(list(named.values()))
        self.handles.update({key: found[k.name] for key, k in named.items()})

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, Any]:
        rest = [k for k in kernels if (k.name, k.flags) not in self.handles]
        fresh = self.device.compile(rest) if rest else {}
        return {k.name: fresh.get(k.name) or self.handles[k.name, k.flags] for k in kernels}


def execute(way: Way, trials: Sequence[Trial]) -> list[Outcome]:
    """Build and run every trial in a child; where the child dies, each in a child of its own."""
    found = _in_child(way, trials)
    if found is not None:
        return found
    if len(trials) == 1:
        return [Outcome(crash="the process died")]
    return [execute(way, [t])[0] for t in trials]


def _in_child(way: Way, trials: Sequence[Trial]) -> list[Outcome] | None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_child, args=(theirs, way, trials))
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else None  # type: ignore[no-any-return]
    except EOFError:
        return None
    finally:
        child.kill()
        child.join()


def _child(pipe: Any, way: Way, trials: Sequence[Trial]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RELAX_TUNE_CACHE"] = folder
        pipe.send(run_here(way, trials, Path(folder)))


def run_here(way: Way, trials: Sequence[Trial], folder: Path) -> list[Outcome]:
    """Build and run every trial in this process."""
    flags, unit = c_device.BASE_FLAGS, c_device._UNIT_KERNELS
    device = emulated(folder) if way.target == "cuda" else open_device(way.target)
    try:
        c_device.BASE_FLAGS = (f"-O{way.level}", *flags[1:])
        c_device._UNIT_KERNELS = UNIT
        built = [_built(way, t, device.info) for t in trials]
        compiled = Compiled(device)
        with suppress(BuildError):  # then each is compiled for itself, and the one that is refused shows
            compiled.prepare([k for b in built if isinstance(b, Artifact) for p in b.programs for k in p.kernels])
        return [b if isinstance(b, Outcome) else _ran(b, t, compiled) for b, t in zip(built, trials, strict=True)]
    finally:
        c_device.BASE_FLAGS, c_device._UNIT_KERNELS = flags, unit


def _built(way: Way, trial: Trial, info: Any) -> Artifact | Outcome:
    try:
        if way.policy == "tuned":
            job = job_dispatching(info, trial.module, lambda choices, number: chosen(choices, 3, way.seed + number))
            return job.artifact(job.build())
        job = Job(trial.module, info, MemoryStore(), QUICK)
        return job.artifact(job.build(way.policy))  # type: ignore[arg-type]
    except (BuildError, DeduceError) as error:
        return Outcome(unbuilt=str(error))
    except Exception:
        return Outcome(crash=f"building: {traceback.format_exc()[-1500:]}")


def _ran(artifact: Artifact, trial: Trial, device: Any) -> Outcome:
    try:
        with artifact.open(device) as model:
            return Outcome(results=tuple(_call(model, args) for args in trial.calls))
    except Exception:
        return Outcome(crash=f"running: {traceback.format_exc()[-1500:]}")


def _call(model: Any, args: Sequence[Array]) -> Any:
    try:
        return tuple(model.run(list(args)))
    except UserError as error:
        return str(error)
    except RelaxTuneError as error:
        return f"crash: {type(error).__name__}: {error}"
