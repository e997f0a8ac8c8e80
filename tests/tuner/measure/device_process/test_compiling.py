"""Which candidates a translation unit holds, and what one that does not compile costs the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tuner.measure.measure_programs import program

from relax_tune.errors import BuildError
from relax_tune.runtime.device.base import Device, DeviceInfo
from relax_tune.runtime.program.program import KernelSource, Program
from relax_tune.tuner.measure.device_process import compiling
from relax_tune.tuner.measure.device_process.compiling import balance, compile_programs, plan_units


@pytest.mark.parametrize("language", ["c", "opencl"])
def test_units_hold_consecutive_kernels_without_name_clashes(language: str) -> None:
    plain = [program(kind, language) for kind in ("good", "wrong", "silent")]
    assert plan_units(plain, frozenset()) == [range(0, 3)]
    assert plan_units(plain, frozenset({1})) == [range(0, 1), range(1, 2), range(2, 3)]
    clashing = [program("good", language, name="f"), program("wrong", language, name="f"), program("silent", language)]
    assert plan_units(clashing, frozenset()) == [range(0, 1), range(1, 3)]
    assert plan_units([], frozenset()) == []
    assert [len(unit) for unit in plan_units([plain[0]] * 10, frozenset())] == [4, 4, 2]
    assert [len(unit) for unit in plan_units([plain[0]] * 10, frozenset(), 4)] == [3, 3, 3, 1], "nobody waits for four"
    assert [len(unit) for unit in plan_units([plain[0]] * 3, frozenset(), 16)] == [1, 1, 1]


def test_units_hold_one_language() -> None:
    both = [program("good", "opencl"), program("good", "c")]
    assert plan_units(both, frozenset()) == [range(0, 1), range(1, 2)]


def _of_length(name: str, length: int) -> Program:
    return replace(program("good", "c"), kernels=(KernelSource(name, "c", "x" * length),))


def test_units_compiled_at_a_time_hold_equal_text() -> None:
    programs = [_of_length(f"f{n}", size) for n, size in enumerate((9, 8, 7, 6, 1, 1, 2, 2))]
    assert balance(programs, [range(0, 4), range(4, 8)]) == [[0, 3, 4, 6], [1, 2, 5, 7]]
    assert balance(programs, [range(2, 4)]) == [[2, 3]]
    assert balance(programs, [range(0, 1), range(1, 2)]) == [[0], [1]]


def test_balanced_units_hold_no_name_clashes_and_one_language() -> None:
    clashing = [_of_length("f", 9), _of_length("f", 8), _of_length("g", 7)]
    assert balance(clashing, [range(0, 1), range(1, 3)]) == [[0], [1, 2]]
    assert balance(clashing[:2], [range(0, 2)]) == [range(0, 2)], "what fits nowhere leaves the units as they are"
    both = [program("good", "opencl"), program("good", "c")]
    assert sorted(balance(both, [range(0, 1), range(1, 2)])) == [[0], [1]]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=16), st.integers(1, 4))
def test_balance_keeps_every_program_once(sizes: list[int], width: int) -> None:
    programs = [_of_length(f"f{n}", size) for n, size in enumerate(sizes)]
    units = plan_units(programs, frozenset(), width)[:width]
    parts = balance(programs, units)
    assert sorted(i for part in parts for i in part) == [i for unit in units for i in unit]
    longest = max(sum(1 + sizes[i] for i in part) for part in parts)
    assert longest <= sum(1 + size for size in sizes) / len(units) + 1 + max(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("language", ["c", "opencl"])
@given(st.lists(st.booleans(), min_size=1, max_size=14), st.sets(st.integers(0, 13)))
def test_suspect_kernel_is_compiled_alone(language: str, broken: list[bool], alone: set[int]) -> None:
    class Compiler:
        """Refuses every unit with a broken kernel in it."""

        info = DeviceInfo(language, "", (), ())

        def compile(self, kernels: Sequence[KernelSource]) -> dict[str, str]:
            if any("broken" in kernel.source for kernel in kernels):
                raise BuildError("broken")
            return {kernel.name: kernel.name for kernel in kernels}

    def one(at: int) -> Program:
        text = KernelSource(f"f{at}", language, "broken" if broken[at] else "whole")
        return replace(program("good", language), kernels=(text,))

    told: list[range] = []
    alone &= set(range(len(broken)))
    programs = [one(at) for at in range(len(broken))]
    found = compile_programs(cast(Device, Compiler()), programs, frozenset(alone), told.append)
    assert [isinstance(entry, BuildError) for entry in found] == broken
    assert all(f"f{at}" in entry[0] for at, entry in enumerate(found) if isinstance(entry, tuple))
    assert all(len(unit) == 1 for unit in told if alone & set(unit))
    assert set().union(*told) == set(range(len(broken)))


@pytest.mark.parametrize(("kind", "at_once"), [("c", 3), ("cuda", 3), ("opencl", 1)])
def test_compilations_at_once_equal_processors(monkeypatch: pytest.MonkeyPatch, kind: str, at_once: int) -> None:
    monkeypatch.setattr(compiling.host, "usable_cpus", lambda: 3)
    meeting = threading.Barrier(at_once)

    class Compiler:
        info = DeviceInfo(kind, "", (), ())
        compiles_in_threads = kind != "opencl"

        def compile(self, kernels: Sequence[KernelSource]) -> dict[str, str]:
            meeting.wait(20)
            return {kernel.name: kernel.name for kernel in kernels}

    programs = [replace(program("good", "c"), kernels=(KernelSource(f"f{at}", kind, ""),)) for at in range(3)]
    found = compile_programs(cast(Device, Compiler()), programs, frozenset(), lambda unit: None)
    assert [f"f{at}" in entry[0] for at, entry in enumerate(found) if isinstance(entry, tuple)] == [True] * 3
