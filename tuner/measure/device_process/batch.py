"""Measurement of one batch on an open device: compile all, check each, time the survivors in interleaved rounds.

Tests: `tests/tuner/measure/test_local.py`, `tests/tuner/measure/test_racing.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, cast

import numpy as np

from relax_tune.errors import ArtifactError, BuildError, MeasureError, RelaxTuneError, UserError
from relax_tune.runtime.bound_program import BoundProgram
from relax_tune.runtime.device.base import Device, DeviceBuffer
from relax_tune.runtime.device.confinement import limit_memory
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.library.base import Library
from relax_tune.runtime.program.program import Program, program_from_json
from relax_tune.tuner.measure.device_process.compare import difference
from relax_tune.tuner.measure.device_process.compiling import CompiledKernels, Handles, RecentKernels, compile_programs
from relax_tune.tuner.measure.device_process.flush import CacheFlush, Eviction, flush_for
from relax_tune.tuner.measure.device_process.inputs import buffer_shapes
from relax_tune.tuner.measure.device_process.pool import SharedBuffers, buffer_bytes
from relax_tune.tuner.measure.device_process.precompiling import Precompiler
from relax_tune.tuner.measure.device_process.timing import Clock, Contestant, time_interleaved
from relax_tune.tuner.measure.messages import CheckCase, MeasureRequest, MeasureResult, Stage, Symbols, failed

_WAVE_BYTES = 2 << 30  # packed weights and temporaries of candidates that are timed against each other
_MORE_BYTES = 8 << 30  # private memory for compilers, libraries and copies, beyond what programs declare
_LEAST_AHEAD = 2  # new candidates for which starting another process pays
_TIMING_SEED = 0
_Clock = Literal["build_secs", "run_secs"]


class Progress(Protocol):
    """A listener to the steps of a batch, for the supervisor that limits their time."""

    def tell(self, first: int, count: int, phase: str) -> None:
        """Record that a step of `count` requests begins, the first of them with index `first`."""
        ...


class DeviceLostError(MeasureError):
    """The device failed a candidate and then its probe: this process cannot go on."""


class _Refused(Exception):
    """A candidate's failure: its stage and message."""

    def __init__(self, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.stage = stage


@dataclass(slots=True)
class _Candidate:
    index: int
    request: MeasureRequest
    program: Program
    own_bytes: int
    handles: Handles = field(default_factory=dict)
    executor: Executor | None = None
    build_secs: float = 0.0
    run_secs: float = 0.0


class BatchMeasurement:
    """Measures batches on one device, from one thread.

    Args:
        answer: receives results as soon as they are final.
        probe: raises MeasureError when the device is unusable.
        limited: the kernels run in this process, whose memory is limited to the needs of their programs.
        clock: timer of launches; None times them in this process.
        precompiler: a process that fills the driver's cache of compiled kernels; None if this one compiles all.
    """

    def __init__(
        self,
        device: Device,
        libraries: Mapping[str, Library],
        progress: Progress,
        answer: Callable[..., None],
        probe: Callable[[], None],
        limited: bool,
        clock: Clock | None = None,
        precompiler: Precompiler | None = None,
    ) -> None:
        self._device, self._libraries, self._progress, self._limited = device, libraries, progress, limited
        self._answer, self._probe, self._clock, self._precompiler = answer, probe, clock, precompiler
        self._shared, self._recent = SharedBuffers(device), RecentKernels()
        self._flush: CacheFlush | Eviction | None = None

    def run(self, requests: Sequence[MeasureRequest], isolated: frozenset[int]) -> None:
        """Answer every request once.

        Args:
            isolated: indices of the requests to compile one by one.

        Raises:
            DeviceLostError: a request lost the device. It is answered, the requests after it are not.
        """
        if self._limited:
            limit_memory(None)
        candidates = self._read(requests)
        waves = _waves(candidates)
        if self._limited:
            limit_memory(_MORE_BYTES + 2 * max((sum(c.own_bytes for c in wave) for wave in waves), default=0))
        for wave in waves:
            survivors: list[_Candidate] = []
            for part in self._parts(wave, isolated):
                survivors += self._checked(self._compile(part, isolated))
            self._time(survivors)
            for candidate in wave:
                self._release(candidate)

    def _parts(self, candidates: list[_Candidate], isolated: frozenset[int]) -> Iterator[list[_Candidate]]:
        """Yield the candidates in parts to compile and check, the second one after it was compiled ahead."""
        new = [c for c in candidates if len(self._recent.of(c.program.kernels)) < len(c.program.kernels)]
        ahead = new[(len(new) + 1) // 2 :]
        if self._precompiler is None or self._precompiler.ended or len(ahead) < _LEAST_AHEAD or isolated:
            yield candidates
            return
        later = {candidate.index for candidate in ahead}
        first = [candidate for candidate in candidates if candidate.index not in later]
        kernels = {kernel.name for candidate in first for kernel in candidate.program.kernels}
        kernels |= {name for candidate in ahead for name in self._recent.of(candidate.program.kernels)}
        self._precompiler.begin([candidate.request for candidate in ahead], sorted(kernels))
        yield first
        self._progress.tell(ahead[0].index, ahead[-1].index - ahead[0].index + 1, "compile")
        self._precompiler.wait()
        yield ahead

    def _checked(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Open candidates and check them. Returns the ones that are right."""
        survivors = [candidate for candidate in candidates if self._run_step(candidate, self._open, "build_secs")]
        # one case after the other: all candidates get the same inputs, which are created and loaded once
        for number in range(max((len(c.request.checks) for c in candidates), default=0)):
            check = partial(self._check, number)
            survivors = [candidate for candidate in survivors if self._run_step(candidate, check, "run_secs")]
        return survivors

    def _read(self, requests: Sequence[MeasureRequest]) -> list[_Candidate]:
        """Parse programs and lay out the memory they share."""
        candidates = []
        needs: list[tuple[Program, list[Symbols], int]] = []
        for index, request in enumerate(requests):
            self._progress.tell(index, 1, "prepare")
            bindings = [*(case.symbols for case in request.checks), *request.timings]
            try:
                program = program_from_json(request.program_json)
                own = max((_own_bytes(program, symbols) for symbols in bindings), default=0)
            except ArtifactError as error:
                self._answer(failed(request.id, "compile", str(error)))
            except UserError as error:
                self._answer(failed(request.id, "constraint", str(error)))
            else:
                candidates.append(_Candidate(index, request, program, own))
                needs.append((program, bindings, request.constant_seed))
        self._progress.tell(0, 0, "prepare")
        self._shared.reserve(needs)
        return candidates

    def _compile(self, candidates: Sequence[_Candidate], isolated: frozenset[int]) -> list[_Candidate]:
        new = []
        for candidate in candidates:
            candidate.handles = self._recent.of(candidate.program.kernels)
            if len(candidate.handles) < len(candidate.program.kernels):
                new.append(candidate)

        def tell(unit: range) -> None:
            first, last = new[unit.start].index, new[unit[-1]].index
            self._progress.tell(first, last - first + 1, "compile")

        positions = frozenset(at for at, candidate in enumerate(new) if candidate.index in isolated)
        programs = [candidate.program for candidate in new]
        refused = set()
        for candidate, compiled in zip(new, compile_programs(self._device, programs, positions, tell, self._recent)):
            if isinstance(compiled, BuildError):
                refused.add(candidate.index)
                self._answer(failed(candidate.request.id, "compile", str(compiled)))
            else:
                candidate.handles, candidate.build_secs = compiled
        return [candidate for candidate in candidates if candidate.index not in refused]

    def _run_step(self, candidate: _Candidate, step: Callable[[_Candidate], None], clock: _Clock) -> bool:
        """Run a step of a candidate, and answer its failure. Returns True if the step succeeded.

        Args:
            clock: field of the result to which the step's time is added.
        """
        began = time.perf_counter()
        refused: _Refused | None = None
        try:
            step(candidate)
        except _Refused as refusal:
            refused = refusal
        setattr(candidate, clock, getattr(candidate, clock) + time.perf_counter() - began)
        if refused is not None:
            self._refuse(candidate, refused)
        return refused is None

    def _open(self, candidate: _Candidate) -> None:
        self._progress.tell(candidate.index, 1, "prepare")
        device = cast(Device, CompiledKernels(self._device, candidate.handles))
        try:
            shared = self._shared.of(candidate.program, candidate.request.constant_seed)
            candidate.executor = Executor(candidate.program, device, {}, libraries=self._libraries, shared=shared)
        except UserError as error:
            raise _Refused("constraint", str(error)) from error
        except (ArtifactError, BuildError, MeasureError) as error:
            raise _Refused("launch", str(error)) from error

    def _bind(self, candidate: _Candidate, symbols: Symbols) -> BoundProgram:
        assert candidate.executor is not None
        try:
            bound = candidate.executor.bind(symbols)
            bound.prepare()
        except UserError as error:
            raise _Refused("constraint", str(error)) from error
        except RelaxTuneError as error:
            raise _Refused("launch", f"at {symbols}: {error}") from error
        return bound

    def _check(self, number: int, candidate: _Candidate) -> None:
        if number >= len(candidate.request.checks):
            return
        case = candidate.request.checks[number]
        self._progress.tell(candidate.index, 1, "prepare")  # a library may compile here
        bound = self._bind(candidate, case.symbols)
        self._progress.tell(candidate.index, 1, "check")
        wrong = self._wrong(candidate, bound, case)
        if wrong is None:
            return
        # An earlier candidate may have overwritten shared buffers: only a second failure counts.
        self._progress.tell(candidate.index, 1, "check")
        self._shared.refresh()
        wrong = self._wrong(candidate, bound, case)
        if wrong is not None:
            self._shared.refresh()
            raise _Refused("wrong-result", f"at {case.symbols}, seed {case.seed}: {wrong}")

    def _wrong(self, candidate: _Candidate, bound: BoundProgram, case: CheckCase) -> str | None:
        executor, program = candidate.executor, candidate.program
        assert executor is not None
        if len(case.expected) != len(program.outputs):
            return f"expected the reference's {len(case.expected)} outputs, got a program of {len(program.outputs)}"
        self._shared.load_inputs(program, bound, case.seed)
        self._shared.poison(program, executor)
        try:
            bound.launch()
        except RelaxTuneError as error:
            raise _Refused("launch", f"at {case.symbols}: {error}") from error
        try:
            self._device.synchronize()
        except MeasureError as error:
            raise _Refused("runtime", f"at {case.symbols}: {error}") from error
        for position, index in enumerate(program.outputs):
            spec = program.buffers[index]
            dtype, shape = np.dtype(spec.dtype), bound.shapes[spec.name]
            actual = self._device.download(executor.buffer(spec.name), dtype, shape)
            slack = case.slack[position] if case.slack else None
            limits = case.rtol[position], case.atol[position], slack
            text = difference(spec.name, actual, case.expected[position], *limits)
            if text is not None:
                return text
        return self._shared.overrun(program, bound)

    def _time(self, candidates: Sequence[_Candidate]) -> None:
        """Time every shape of the survivors and answer them. Candidates that share a shape are timed interleaved."""
        contests: dict[tuple[tuple[str, int], ...], list[tuple[_Candidate, int]]] = {}
        for candidate in candidates:
            for position, symbols in enumerate(candidate.request.timings):
                contests.setdefault(tuple(sorted(symbols.items())), []).append((candidate, position))
        timings: dict[tuple[str, int], Contestant] = {}
        refused: set[str] = set()
        for members in contests.values():
            contestants: list[tuple[_Candidate, Contestant]] = []
            for candidate, position in members:
                if candidate.request.id in refused:
                    continue
                try:
                    contestant = self._contestant(candidate, position)
                except _Refused as refusal:
                    refused.add(candidate.request.id)
                    self._refuse(candidate, refusal)
                    continue
                contestants.append((candidate, contestant))
                timings[candidate.request.id, position] = contestant
            racing = [contestant for _, contestant in contestants]
            time_interleaved(self._device, racing, (RelaxTuneError,), self._clock)
            for candidate, contestant in contestants:
                candidate.run_secs += contestant.wall_secs
                if contestant.error is not None and candidate.request.id not in refused:
                    refused.add(candidate.request.id)
                    self._refuse(candidate, _Refused("runtime", f"at {contestant.symbols}: {contestant.error}"))
        for candidate in candidates:
            request = candidate.request
            if request.id not in refused:
                self._answer(
                    MeasureResult(
                        request.id,
                        "ok",
                        timings=tuple(timings[request.id, at].timing() for at in range(len(request.timings))),
                        checked=bool(request.checks),
                        build_secs=candidate.build_secs,
                        run_secs=candidate.run_secs,
                    )
                )

    def _contestant(self, candidate: _Candidate, position: int) -> Contestant:
        request = candidate.request
        symbols = request.timings[position]
        self._progress.tell(candidate.index, 1, "time")
        bound = self._bind(candidate, symbols)

        def enter() -> None:
            self._progress.tell(candidate.index, 1, "time")
            self._shared.load_inputs(candidate.program, bound, _TIMING_SEED)

        flush = None
        if request.policy.regime == "flushed":
            self._flush = self._flush or flush_for(self._device)
            flush = self._flush.of(self._weights(candidate, bound))
        stops = request.policy.stop_above
        return Contestant(bound, request.policy, symbols, stops[position] if stops else None, enter, flush)

    def _weights(self, candidate: _Candidate, bound: BoundProgram) -> list[DeviceBuffer]:
        """Return the buffers of the constants, packed or original, that a bound program reads."""
        assert candidate.executor is not None
        used = {
            candidate.program.buffers[b].name: candidate.program.buffers[b].role for s in bound.steps for b in s.buffers
        }
        return [candidate.executor.buffer(name) for name, role in used.items() if role in ("const", "packed")]

    def _refuse(self, candidate: _Candidate, refusal: _Refused) -> None:
        """Answer a failure. If the device itself is lost, answer with stage `device-lost` and raise DeviceLostError."""
        request = candidate.request
        stage, message, lost = refusal.stage, str(refusal), False
        # Only these stages have run code of the candidate on the device.
        if stage in ("launch", "runtime"):
            try:
                self._probe()
            except MeasureError as error:
                stage, message, lost = "device-lost", f"{message} Then its probe failed: {error}", True
        self._answer(failed(request.id, stage, message, candidate.build_secs, candidate.run_secs))
        if lost:
            raise DeviceLostError(message)  # the memory of a lost device cannot be released
        self._release(candidate)

    def _release(self, candidate: _Candidate) -> None:
        executor, candidate.executor = candidate.executor, None
        if executor is not None:
            executor.close()


def _own_bytes(program: Program, symbols: Symbols) -> int:
    """Return the device memory that only this candidate uses at this binding: packed constants and temporaries."""
    shapes = buffer_shapes(program, symbols)
    return sum(
        buffer_bytes(spec, shape) for spec, shape in zip(program.buffers, shapes) if spec.role in ("packed", "temp")
    )


def _waves(candidates: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Split candidates, in order, into waves whose own memory stays within the limit."""
    waves: list[list[_Candidate]] = []
    room = 0
    for candidate in candidates:
        # A candidate beyond the limit gets a separate wave: whether it fits, the device decides.
        if not waves or candidate.own_bytes > room:
            waves.append([])
            room = _WAVE_BYTES
        waves[-1].append(candidate)
        room -= candidate.own_bytes
    return waves
