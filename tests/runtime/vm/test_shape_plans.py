"""Repeated calls of host programs with the same shapes: launches without instructions, as right as the first call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.programs import read
from tests.support.tuner_models import QUICK, opened

from relax_tune.database.store import MemoryStore
from relax_tune.errors import ModelStateError, UserError
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.model import Model
from relax_tune.runtime.vm import shape_plans
from relax_tune.runtime.vm.shape_plans import ShapePlan
from relax_tune.tuner.job.device_job import device_job

pytestmark = pytest.mark.ccompiler

PAIR = "Tuple(Tensor((n, 4), f32), Tensor((4,), f32))"
# The number of rows decides on a branch, and of the two results the second is computed in a loop over rows.
BY_SHAPE = f"""
    n = symbol("n", lower=1, upper=64)
    i = symbol("i", lower=0)

    @function
    def main(x: Tensor((n, 4), f32), y: Tensor((4,), f32)) -> {PAIR}:
        z: Tensor((n, 4), f32)
        if prim(n < 5):
            with dataflow():
                a: Tensor((n, 4), f32) = op.add(x, y)
            z = a
        else:
            with dataflow():
                b: Tensor((n, 4), f32) = op.mul(x, y)
            z = b
        with dataflow():
            last: Tensor((4,), f32) = call("loop", prim(n), prim(const(0, i64)), y, z)
        return (z, last)

    @function
    def loop(size: Prim(i64, n), at: Prim(i64, i), s: Tensor((4,), f32), z: Tensor((n, 4), f32)) -> Tensor((4,), f32):
        done: Tensor((4,), f32)
        if prim(i < n):
            with dataflow():
                row: Tensor((1, 4), f32) = op.slice(z, axis=0, begin=max(min(i, n - 1), 0), end=max(min(i, n - 1), 0) + 1, step=1)
                now: Tensor((4,), f32) = op.reshape(row, shape=[4])
                t: Tensor((4,), f32) = op.tanh(s)
                u: Tensor((4,), f32) = op.add(t, now)
                again: Tensor((4,), f32) = call("loop", prim(n), prim(i + 1), u, z)
            done = again
        else:
            with dataflow():
                pass
            done = s
        return done
"""
BY_DATA = """
    n = symbol("n", lower=1, upper=64)

    @function
    def main(x: Tensor((n, 4), f32), y: Tensor((4,), f32)) -> Tensor((n, 4), f32):
        with dataflow():
            total: Tensor((), f32) = op.sum(y, axes=(0,))
            twice: Tensor((), f32) = op.add(total, total)
            c: Tensor((), bool) = op.less(total, twice)
        z: Tensor((n, 4), f32)
        if c:
            with dataflow():
                a: Tensor((n, 4), f32) = op.add(x, y)
            z = a
        else:
            with dataflow():
                b: Tensor((n, 4), f32) = op.mul(x, y)
            z = b
        return z
"""


@contextmanager
def model(text: str) -> Iterator[Model]:
    with opened("c") as device:
        job = device_job(read(text), device.info, MemoryStore(), QUICK)
        with job.artifact(job.build("generic")).open(device) as built:
            yield built


def arguments(n: int, seed: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, 4)).astype(np.float32), rng.standard_normal(4).astype(np.float32)]


def expected(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    z, s = x + y if len(x) < 5 else x * y, y
    for row in z:
        s = np.tanh(s) + row
    return [z, s]


def agrees(results: Sequence[Any], args: Sequence[Any]) -> None:
    for got, want in zip(results, expected(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_later_calls_of_a_shape_run_no_subgraph_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with model(BY_SHAPE) as built:
        for n in (1, 3, 5, 9):
            for seed in range(2):
                agrees(built.run(args := arguments(n, seed)), args)
        monkeypatch.setattr(Executor, "run", lambda *_, **__: pytest.fail("an instruction ran"))
        for n in (9, 1, 5, 3):
            for seed in range(2, 5):
                agrees(built.run(args := arguments(n, seed)), args)


def test_results_of_a_plan_are_the_caller_s() -> None:
    with model(BY_SHAPE) as built:
        calls = [arguments(5, seed) for seed in range(6)]
        results = [built.run(args) for args in calls]
        for found, args in zip(results, calls, strict=True):
            agrees(found, args)
        for array in results[-1]:
            array[...] = 77
        agrees(built.run(calls[0]), calls[0])


def test_arguments_of_any_layout_are_read_by_a_plan() -> None:
    with model(BY_SHAPE) as built:
        for seed in range(5):
            x, y = arguments(10, seed)
            args = [x[::2], y[::-1]]
            agrees(built.run(args), args)


def test_branch_on_an_element_forbids_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShapePlan, "run", lambda *_: pytest.fail("a plan ran"))
    with model(BY_DATA) as built:
        for seed in range(6):
            x, y = arguments(3, seed)
            np.testing.assert_allclose(built.run([x, y])[0], x + y if y.sum() > 0 else x * y, rtol=1e-6)


def test_calls_with_large_arrays_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_plans, "MOST_BYTES", 100)
    monkeypatch.setattr(ShapePlan, "run", lambda *_: pytest.fail("a plan ran"))
    with model(BY_SHAPE) as built:
        for seed in range(4):
            agrees(built.run(args := arguments(20, seed)), args)


def test_plan_refuses_wrong_arguments_as_the_first_call() -> None:
    with model(BY_SHAPE) as built:
        for seed in range(3):
            built.run(arguments(5, seed))
        x, y = arguments(5, 0)
        for args in ([x[:, :3], y], [x.astype(np.float64), y[:2]], [np.zeros((65, 4), np.float32), y]):
            with pytest.raises(UserError):
                built.run(args)
        agrees(built.run([x, y]), [x, y])


def test_plans_in_two_threads_at_once() -> None:
    with model(BY_SHAPE) as built, ThreadPoolExecutor(4) as pool:
        calls = [arguments(2 + seed % 5, seed) for seed in range(200)]
        for found, args in zip(pool.map(built.run, calls), calls, strict=True):
            agrees(found, args)


def test_closed_model_with_plans_refuses_calls() -> None:
    with model(BY_SHAPE) as built:
        for seed in range(3):
            built.run(arguments(5, seed))
    with pytest.raises(ModelStateError):
        built.run(arguments(5, 3))
