"""Times of a kernel: in the supervised process that measures candidates, or in this process with the caller's arrays.

Tests: `tests/tuner/kernels/test_kernel.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from relax_tune.errors import BuildError, RelaxTuneError, UserError
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.device_process.timing import Contestant, time_interleaved
from relax_tune.tuner.measure.messages import CheckCase, MeasureRequest, ShapeTiming, TimingPolicy

REPEATS = 20
BUDGET_SECS = 10.0


@dataclass(frozen=True)
class KernelTiming:
    """Measured times of a kernel. Its text shows the median and the quartiles.

    Attributes:
        sizes: Values of the function's symbols.
        samples: Seconds of single launches, without the time in which other processes had the processors.
        contention: Fraction of the time in which the kernel waited for processors, mean of the samples; None if unknown.
    """

    sizes: Mapping[str, int]
    samples: tuple[float, ...] = field(repr=False)
    contention: float | None = None

    @property
    def median(self) -> float:
        """The median of the samples in seconds."""
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of the samples in seconds."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        low, high = self.quartiles
        waited = f", waited for processors {self.contention:.0%} of the time" if (self.contention or 0) >= 0.01 else ""
        return f"{_text(self.median)} (quartiles {_text(low)} to {_text(high)}, {len(self.samples)} samples{waited})"


def _text(secs: float) -> str:
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if secs >= s), ("ns", 1e-9))
    return f"{secs / scale:.3g} {unit}"


def policy_of(repeats: object) -> TimingPolicy:
    """Return the policy that takes as many samples. Raises UserError for no such number."""
    if type(repeats) is not int or repeats < 1:
        raise UserError(f"expected repeats as a whole number of samples, at least 1, got {repeats!r:.80}")
    return TimingPolicy(repeats, repeats, budget_secs=BUDGET_SECS)


def measured(
    runner: Runner,
    program: Program,
    sizes: Sequence[Mapping[str, int]],
    policy: TimingPolicy,
    checks: Sequence[CheckCase] = (),
) -> tuple[ShapeTiming, ...]:
    """Check and time a program in the runner's process, with random inputs.

    Raises:
        BuildError: The kernel does not compile, hangs, crashes or computes wrong results; the message names the stage.
        MeasureError: The device cannot measure.
    """
    request = MeasureRequest("kernel", program.to_json(), tuple(checks), tuple(map(dict, sizes)), policy)
    (result,) = runner.submit([request]).result()
    if not result.ok:
        raise BuildError(f"the kernel failed at stage {result.stage}: {result.message}")
    return result.timings


def measured_here(
    executor: Executor, arrays: Sequence[NDArray[Any]], symbols: tuple[int, ...], policy: TimingPolicy
) -> ShapeTiming:
    """Time a program in this process with arrays of the caller.

    Raises:
        RelaxTuneError: The kernel fails.
    """
    program, device = executor.program, executor.device

    def enter() -> None:
        for index, array in zip(program.inputs, arrays, strict=True):
            device.upload(executor.buffer(program.buffers[index].name), array)

    with executor.call():
        bound = executor.bind(symbols)
        contestant = Contestant(bound, policy, {}, None, enter)
        time_interleaved(device, [contestant], (RelaxTuneError,))
    if contestant.error is not None:
        raise contestant.error
    return contestant.timing()
