"""What a batch does once where batches before it did the same."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any, cast

import pytest
from tests.tuner.measure.measure_programs import program, request

from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.program.program import KernelSource
from relax_tune.tuner.measure.device_process.batch import BatchMeasurement
from relax_tune.tuner.measure.device_process.compiling import RecentKernels
from relax_tune.tuner.measure.device_process.precompiling import Precompiler
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult


class Counting(CDevice):
    """The device of this processor; counts the kernels that it compiles."""

    def compile(self, kernels: Sequence[KernelSource]) -> dict[str, Any]:
        self.__dict__.setdefault("compiled", []).extend(k.name for k in kernels)
        return super().compile(kernels)


class Silent:
    def tell(self, first: int, count: int, phase: str) -> None:
        """Ignore progress."""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_a_kernel_measured_before_is_not_compiled_again() -> None:
    device, results = Counting(), []

    def answer(*answers: MeasureResult) -> None:
        results.extend(answers)

    compiled = device.__dict__["compiled"]
    measurement = BatchMeasurement(device, {}, Silent(), answer, lambda: None, False)
    compiled.clear()
    measurement.run([request("good", "c"), request("wrong", "c"), request("syntax", "c")], frozenset())
    assert {"kernel_good", "kernel_wrong", "kernel_syntax"} == set(compiled)
    compiled.clear()
    measurement.run([request("good", "c"), request("also-good", "c"), request("syntax", "c")], frozenset())
    assert set(compiled) == {"kernel_also_good", "kernel_syntax"}
    assert [r.ok for r in sorted(results, key=lambda r: r.id) if r.id == "good"] == [True, True]
    assert {(r.id, r.stage) for r in results if not r.ok} == {("wrong", "wrong-result"), ("syntax", "compile")}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_second_half_is_compiled_ahead_while_the_first_one_is_compiled() -> None:
    device, results = Counting(), list[MeasureResult]()
    events = device.__dict__["compiled"]

    class Ahead:
        ended = False

        def begin(self, requests: Sequence[MeasureRequest], known: Sequence[str]) -> None:
            events.append(("begin", [r.id for r in requests], known))

        def wait(self) -> None:
            events.append("wait")

    precompiler = cast(Precompiler, Ahead())
    answer = lambda *answers: results.extend(answers)
    measurement = BatchMeasurement(device, {}, Silent(), answer, lambda: None, False, precompiler=precompiler)
    events.clear()
    measurement.run([request(kind, "c") for kind in ("good", "also-good", "wrong", "overrun")], frozenset())
    begin, *rest = events
    assert begin == ("begin", ["wrong", "overrun"], ["kernel_also_good", "kernel_good"])
    at = rest.index("wait")
    assert set(rest[:at]) == {"kernel_good", "kernel_also_good"}
    assert set(rest[at + 1 :]) == {"kernel_wrong", "kernel_overrun"}
    assert {r.id for r in results if r.ok} == {"good", "also-good"}
    events.clear()
    measurement.run([request("good", "c"), request("also-good", "c")], frozenset())
    measurement.run([request(kind, "c") for kind in ("silent", "stale")], frozenset({0}))
    assert not [e for e in events if isinstance(e, tuple)], "nothing is new, or a request is isolated"


def test_recent_kernels_forget_the_oldest_and_compare_sources() -> None:
    recent = RecentKernels(most=2)
    first, second, third = (program(kind, "c").kernels for kind in ("good", "wrong", "silent"))
    recent.add(first, {"kernel_good": 1})
    recent.add(second, {"kernel_wrong": 2})
    assert recent.of((*first, *third)) == {"kernel_good": 1}
    recent.add(third, {"kernel_silent": 3})
    assert recent.of((*first, *second, *third)) == {"kernel_good": 1, "kernel_silent": 3}
    assert recent.of(program("also-good", "c", name="kernel_good").kernels) == {}, "another kernel of that name"
