"""Batches of programs on a device: built together, compiled in few units, and run in a process that may die."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from tests.cuda_emulation.driver import emulated
from tests.fuzz.traces import has_code, random_variants
from tests.runtime.whole_models import chosen
from tests.support.tuner_models import QUICK, job_dispatching

from relax_tune.database.store import MemoryStore
from relax_tune.errors import BuildError, DeduceError, RelaxTuneError, UserError, VerifyError
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.expr import Expr, le, lt, or_
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.device import c_compiler
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.library.registry import library_facts, open_libraries
from relax_tune.runtime.program.program import KernelSource
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.settings import Memory, Policy
from relax_tune.tuner.task import alternatives
from relax_tune.tuner.task.alternatives import all_alternatives

Array = np.ndarray[Any, Any]
T = TypeVar("T")
SECONDS = 300
LEVELS = {
    0: ("-O0",),
    # gcc 12 hoists remainders out of the wrong loop at this level, which builds do not use
    1: ("-O1", "-fno-move-loop-invariants"),
    2: ("-O2",),
    3: ("-O3",),
}
UNIT = 60
"""Kernels in a translation unit."""
INTERPRETED = 1000
"""Elements of arguments with which lowered programs are interpreted too."""


@dataclass(frozen=True)
class Way:
    """How a program is built. policy: generic, library, or variants dispatched by turns: `tuned`, of random sketches with random
    tunables, or `traces`, of random legal steps. level: of optimisation, in C."""

    target: str = "c"
    policy: str = "generic"
    level: int = 1
    seed: int = 0
    memory: Memory = "symbolic"


@dataclass(frozen=True)
class Trial:
    """A program and the arguments of each of its calls."""

    module: IRModule
    calls: tuple[Sequence[Array], ...]


@dataclass(frozen=True)
class Outcome:
    """Of one program. unbuilt: why it was refused; crash: an error that is nobody's refusal, or a signal.

    results: of each call, the outputs or the text of a refusal; tasks: names of its tensor functions; outside: what its lowered form
    reads or writes outside of a buffer in the smallest call, where that is not refused"""

    unbuilt: str = ""
    crash: str = ""
    results: tuple[Any, ...] = ()
    tasks: tuple[str, ...] = ()
    outside: str = ""


class Compiled:
    """A device that has compiled the kernels of a batch already."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.handles: dict[tuple[str, tuple[str, ...]], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def prepare(self, kernels: Sequence[KernelSource]) -> None:
        named = {(k.name, k.flags): k for k in kernels}
        result = self.device.compile(list(named.values()))
        self.handles.update({key: result[k.name] for key, k in named.items()})

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, Any]:
        rest = [k for k in kernels if (k.name, k.flags) not in self.handles]
        fresh = self.device.compile(rest) if rest else {}
        return {k.name: fresh.get(k.name) or self.handles[k.name, k.flags] for k in kernels}


class Bench:
    """Devices that stay open, with a folder for what they compile. One process uses a bench."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.devices = folder, dict[str, Any]()
        os.environ["RELAX_TUNE_CACHE"] = str(folder)
        os.environ |= {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}

    def device(self, target: str) -> Any:
        if target not in self.devices:
            device = emulated(self.folder) if target == "cuda" else open_device(target)
            self.devices[target] = device, replace(device.info, libraries=library_facts(open_libraries()))
        return self.devices[target]

    def run(
        self, way: Way, trials: Sequence[Trial], done_with: Callable[[str], None] = lambda _: None
    ) -> list[Outcome]:
        """Build and run every trial in this process. done_with: called with the results so far."""
        device, info = self.device(way.target)
        before = c_compiler.BASE_FLAGS, c_compiler.UNIT_KERNELS, alternatives.all_alternatives
        try:
            c_compiler.BASE_FLAGS = (*LEVELS[way.level], *before[0][1:])
            c_compiler.UNIT_KERNELS = UNIT
            alternatives.all_alternatives = _all_alternatives
            built = [_built(way, t, info) for t in trials]
            done_with("build")
            compiled = Compiled(device)
            done = [b[0] for b in built if not isinstance(b, Outcome)]
            with suppress(BuildError):  # then each is compiled for itself, and the one that is refused shows
                compiled.prepare([k for b in done for p in b.programs for k in p.kernels])
            done_with("compile")
            return [b if isinstance(b, Outcome) else _ran(*b, t, compiled) for b, t in zip(built, trials, strict=True)]
        finally:
            c_compiler.BASE_FLAGS, c_compiler.UNIT_KERNELS, alternatives.all_alternatives = before


@cache
def _all_alternatives() -> tuple[Any, ...]:
    """The alternatives, which no package changes while a process of the fuzzer runs."""
    return all_alternatives()


def execute(way: Way, trials: Sequence[Trial]) -> list[Outcome]:
    """Build and run every trial in a child; if the child dies, each in a separate child."""
    result = in_child(lambda bench: bench.run(way, trials))
    if result is not None:
        return result
    if len(trials) == 1:
        return [Outcome(crash="the process died")]
    return [execute(way, [t])[0] for t in trials]


def in_child(work: Callable[[Bench], T]) -> T | None:
    """The result of work in a child of this process; None where it died, or took too long."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        child = fork.Process(target=lambda: theirs.send(work(Bench(Path(folder)))))
        child.start()
        theirs.close()
        try:
            return ours.recv() if ours.poll(SECONDS) else None  # type: ignore[no-any-return]
        except EOFError:
            return None
        finally:
            child.kill()
            child.join()


def _built(way: Way, trial: Trial, info: Any) -> tuple[Artifact, Outcome] | Outcome:
    try:
        job = _job(way, trial.module, info)
        policy = way.policy if way.policy in get_args(Policy) else "measured"
        bounded = all(b.upper is not None for b in trial.module.bounds)
        memory: Any = way.memory if bounded else {"constant-inplace": "inplace"}.get(way.memory, "symbolic")
        built = Outcome(tasks=tuple(t.name for t in job.tasks), outside=_outside(job.lowered.module, trial))
        return job.artifact(job.build(policy, memory)), built  # type: ignore[arg-type]
    except (BuildError, DeduceError) as error:
        return Outcome(unbuilt=str(error))
    except Exception:
        return Outcome(crash=f"building: {traceback.format_exc()[-1500:]}")


def _outside(lowered: IRModule, trial: Trial) -> str:
    """Return what the lowered program stores or reads outside of a buffer: by proof, then in the smallest call."""
    for func in lowered.functions.values():
        for block in blocks(func.body) if isinstance(func, PrimFunc) else ():
            extents: dict[Any, Expr] = {i.var: i.extent for i in block.iters}
            for index, dim in zip(block.body.indices, block.body.buffer.shape):
                if index in extents and not _inside(le(extents[index], dim), func):
                    return f"{func.name}: {block.name!r} stores at 0..{extents[index]!r} of a dim of {dim!r}"
    args = min(trial.calls, key=lambda given: sum(a.size for a in given))
    if sum(a.size for a in args) > INTERPRETED:
        return ""
    try:
        with np.errstate(all="ignore"):
            run_function(lowered, "main", args)
    except VerifyError as error:
        return str(error)
    except RelaxTuneError:
        pass  # refused: results tell
    return ""


def _inside(condition: Expr, func: PrimFunc) -> bool:
    """Return whether a condition holds for all calls: none has an array with a dim below 0."""
    below = dict.fromkeys(lt(d, 0) for b in func.buffers for d in b.shape)
    return any(prove(c) is Proof.YES for c in (condition, *(or_(condition, b) for b in below)))


def _job(way: Way, module: IRModule, info: Any) -> DeviceJob:
    if way.policy == "tuned":
        return job_dispatching(
            info, module, lambda own, number: [v for v in chosen(own, 2, way.seed + number) if has_code(own, v)]
        )
    if way.policy == "traces":
        return job_dispatching(info, module, lambda own, number: random_variants(own, 2, way.seed + number))
    return device_job(module, info, MemoryStore(), QUICK)


def _ran(artifact: Artifact, built: Outcome, trial: Trial, device: Any) -> Outcome:
    try:
        with artifact.open(device) as model:
            return replace(built, results=tuple(_call(model, args) for args in trial.calls))
    except Exception:
        return Outcome(crash=f"running: {traceback.format_exc()[-1500:]}")


def _call(model: Any, args: Sequence[Array]) -> Any:
    try:
        return tuple(model.run(list(args)))
    except UserError as error:
        return str(error)
    except RelaxTuneError as error:
        return f"crash: {type(error).__name__}: {error}"
