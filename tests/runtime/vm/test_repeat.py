"""Counted loops on devices: right at every number of iterations, whichever way their steps run, and in several threads at once."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.programs import agree, compiled, ones, read, same
from tests.support.tuner_models import QUICK, opened

from relax_tune.database.store import MemoryStore
from relax_tune.errors import ArtifactError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.program.host_program import (
    CallHostProgram,
    HostProgram,
    Repeat,
    host_programs_from_json,
    verify_host_programs,
)
from relax_tune.runtime.vm import repeat
from relax_tune.tuner.job.device_job import device_job

pytestmark = pytest.mark.ccompiler

HEAD = """
    @function
    def main(x: Tensor((n, 4), f32), start: Tensor((4,), f32), old: Tensor((k, 4), f32)) -> {result}:
        with dataflow():
            r: {result} = call("loop", prim(n), prim(k), start, start, old, old, x)
        return r

    @function
    def loop({params}) -> {result}:
        done: {result}
        if prim(i < n):
            with dataflow():
                slice: Tensor((1, 4), f32) = op.slice(x, axis=0, begin=max(min(i, n - 1), 0), end=max(min(i + 1, n), 1), step=1)
                now: Tensor((4,), f32) = op.reshape(slice, shape=[4])
                {body}
                ra: Tensor((1, 4), f32) = op.reshape({row}, shape=[1, 4])
                rb: Tensor((1, 4), f32) = op.reshape({second}, shape=[1, 4])
                ma: Tensor((i + 1, 4), f32) = op.concat(a, ra, axis=0)
                mb: Tensor((i + 1, 4), f32) = op.concat(b, rb, axis=0)
                again: {result} = call("loop", prim(n), prim(i + 1), {after}, ma, mb, x)
            done = again
        else:
            with dataflow():
                pass
            done = (s, o, a, b)
        return done
"""
PARAMS = """size: Prim(i64, n), at: Prim(i64, i), s: Tensor((4,), f32), o: Tensor((4,), f32), a: Tensor((i, 4), f32),
    b: Tensor((i, 4), f32), x: Tensor((n, 4), f32)""".replace("\n", " ")
RESULT = "Tuple(Tensor((4,), f32), Tensor((4,), f32), Tensor(None, f32, ndim=2), Tensor(None, f32, ndim=2))"
STEP = (
    "u: Tensor((4,), f32) = op.add(s, now)",
    "v: Tensor((4,), f32) = op.tanh(o)",
    "w: Tensor((4,), f32) = op.sub(u, v)",
)
# The rows so far decide the size of an array of the iteration.
SIZED = (
    "f: Tensor((max(min(i, n), 0), 4), f32) = op.slice(x, axis=0, begin=const(0, i64), end=max(min(i, n), 0), step=1)",
    "e: Tensor((max(min(i, n), 0), 4), f32) = op.exp(f)",
    "p: Tensor((4,), f32) = op.sum(e, axes=(0,))",
    "u: Tensor((4,), f32) = op.add(s, p)",
    "v: Tensor((4,), f32) = op.tanh(o)",
    "w: Tensor((4,), f32) = op.sub(u, v)",
)


def loop(
    body: Sequence[str] = STEP, row: str = "u", second: str = "w", after: str = "u, w", symbols: str = ""
) -> IRModule:
    lines = ("\n" + " " * 16).join(body)
    text = HEAD.format(params=PARAMS, result=RESULT, body=lines, row=row, second=second, after=after)
    return read(symbols + textwrap.dedent(text))


CALLS = [
    [ones(n, 4) / 50, np.linspace(-1, 1, 4, dtype=np.float32), ones(k, 4)]
    for n, k in ((0, 0), (1, 0), (2, 0), (17, 0), (5, 3), (2, 4))
]


@pytest.fixture(params=["in C", "launched by Python", "called"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the steps of a loop run: each way gives the same."""
    if request.param == "launched by Python":
        monkeypatch.setattr(CDevice, "repeated", lambda *_: None)
    if request.param == "called":
        monkeypatch.setattr(repeat, "layout_of", lambda *_: None)
    monkeypatch.setattr(repeat, "CHUNK", 4)
    return str(request.param)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(lambda: loop(), id="two states, two rows"),
        pytest.param(lambda: loop(second="u"), id="one value is the row of two"),
        pytest.param(lambda: loop(SIZED), id="a size depends on the index"),
    ],
)
def test_counted_loop_is_the_interpreter_s_each_way(module: Callable[[], IRModule], way: str) -> None:
    with opened("c") as device:
        agree(module(), device, *CALLS)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(lambda: loop(after="o, u"), id="states change places"),
        pytest.param(lambda: loop(row="s"), id="the row is the old state"),
        pytest.param(lambda: loop(after="u, o"), id="a state stays"),
    ],
)
def test_counted_loop_of_old_states_is_the_interpreter_s(module: Callable[[], IRModule], device: Device) -> None:
    agree(module(), device, *CALLS)


def test_counted_loop_in_c_calls_no_executor() -> None:
    """In C, an iteration is no call of the executor."""
    with opened("c") as device:
        job = device_job(loop(), device.info, MemoryStore(), QUICK)
        with job.artifact(job.build("generic")).open(device) as model:
            executor = model.executors["loop_part0"]
            executor.run = lambda *_, **__: pytest.fail("a call of the executor")
            same(tuple(model.run(CALLS[3])), run_function(loop(), "main", CALLS[3]), "in C")


def test_counted_loop_longer_than_a_plan_is_called_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "MOST_STEPS", 16)
    monkeypatch.setattr(repeat.LoopPlan, "run", lambda *_: pytest.fail("a plan of 17 steps"))
    module = loop()
    with opened("c") as device, compiled(module, device) as program:
        same(program(*CALLS[3]), run_function(module, "main", CALLS[3]), "17 steps")


def test_counted_loop_in_two_threads_at_once() -> None:
    module, calls = loop(), [CALLS[n % 4 + 1] for n in range(24)]
    wanted = [run_function(module, "main", args) for args in calls]
    with opened("c") as device, compiled(module, device) as program, ThreadPoolExecutor(4) as threads:
        for got, want in zip(threads.map(lambda args: program(*args), calls), wanted, strict=True):
            same(got, want, "in threads")


def test_counted_loop_after_an_interruption_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    module, done = loop(), CDevice.repeated
    monkeypatch.setattr(repeat, "CHUNK", 4)
    chunks: list[int] = []

    def repeated(*args: Any) -> Any:
        run = done(*args)
        assert run is not None

        def chunk(table: Any) -> None:
            chunks.append(len(table))
            if len(chunks) == 2:
                raise KeyboardInterrupt
            run(table)

        return chunk

    monkeypatch.setattr(CDevice, "repeated", repeated)
    with opened("c") as device, compiled(module, device) as program:
        with pytest.raises(KeyboardInterrupt):
            program(*CALLS[3])
        assert chunks == [4, 4]
        same(program(*CALLS[3]), run_function(module, "main", CALLS[3]), "after it")
        assert chunks[2:] == [4, 4, 4, 4, 1]


def test_counted_loop_index_beyond_a_bound_is_refused() -> None:
    module = loop(symbols='i = symbol("i", lower=0, upper=9)')
    with opened("c") as device, compiled(module, device) as program:
        program(*CALLS[2])
        with pytest.raises(UserError, match="expected i <= 9, got 16"):
            program(*CALLS[3])


def test_counted_loop_is_in_the_artifact(tmp_path: Path) -> None:
    module, path = loop(), tmp_path / "model.rta"
    with opened("c") as device:
        job = device_job(module, device.info, MemoryStore(), QUICK)
        job.artifact(job.build("generic")).save(path)
        artifact = load_artifact(path)
        (instruction,) = repeats(artifact.host_programs)
        assert instruction.part == "loop_part0" and [p.name for p in artifact.programs] == ["loop_part0"]
        assert not any(
            isinstance(i, CallHostProgram) for i in program_of(artifact.host_programs, "loop").instructions()
        )
        with artifact.open(device) as model:
            same(tuple(model.run(CALLS[1])), run_function(module, "main", CALLS[1]), "loaded")
        wrong_counts_are_refused(artifact.host_programs, artifact.programs, instruction)


def program_of(host_programs: Sequence[HostProgram], name: str) -> HostProgram:
    return next(p for p in host_programs if p.name == name)


def repeats(host_programs: Sequence[HostProgram]) -> list[Repeat]:
    return [i for p in host_programs for i in p.instructions() if isinstance(i, Repeat)]


def wrong_counts_are_refused(host_programs: Sequence[HostProgram], programs: Any, right: Repeat) -> None:
    """Each field of the instruction is checked when an artifact is read."""
    text = f"[{','.join(p.to_json() for p in host_programs)}]"
    assert host_programs_from_json(text) == tuple(host_programs)
    changes = [
        {"part": "another"}, {"inputs": right.inputs[:-1]}, {"inputs": (*right.inputs[:-1], 99)}, {"after": (99, 0)}, {"appended": (0,)},
        {"into": right.into[:-1]}, {"index": 7}, {"symbols": ()}, {"end": 1 << 19}, {"states": right.states[:-1]},
    ]  # fmt: skip
    for change in changes:
        forged = [
            replace(p, blocks=tuple(tuple(replace(i, **change) if i == right else i for i in b) for b in p.blocks))
            for p in host_programs
        ]
        with pytest.raises(ArtifactError, match=r"host_programs\[\d\]"):
            verify_host_programs(forged, programs)


def test_counted_loop_rows_of_another_size_raise() -> None:
    """An artifact from elsewhere may state other rows than its program writes: no memory outside of them is touched."""
    with opened("c") as device:
        job = device_job(loop(), device.info, MemoryStore(), QUICK)
        with job.artifact(job.build("generic")).open(device) as model:
            (instruction,) = repeats(model.artifact.host_programs)
            steps = repeat.StepLoop(model.executors["loop_part0"], instruction)
            x, start = ones(5, 4), np.zeros(4, np.float32)
            symbols = [{"n": 5, "i": 0}[s.name] for s in steps.executor.program.symbols]
            for rows in (np.empty((0, 3), np.float32), np.empty((0, 4), np.float64)):
                with pytest.raises(ArtifactError, match="expected rows of"):
                    steps.run(range(5), symbols, [start, start], [rows, rows], [x])
            for wrong in ((1, 2), np.float32(1), None):
                with pytest.raises(UserError, match="expected rows in an array"):
                    steps.run(range(5), symbols, [start, start], [wrong, wrong], [x])
