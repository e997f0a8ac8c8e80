"""Calls over the same arrays each time: the results of `run`, without its allocations and copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.decoder_families import write_family
from tests.support.tuner_models import QUICK

from relax_tune.database.store import MemoryStore
from relax_tune.errors import ModelStateError, UserError
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.struct_info import ShapeInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.elementwise import MulScalar
from relax_tune.runtime.calls.bound_call import BoundCall
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.model import Model
from relax_tune.tuner.job.device_job import device_job

pytestmark = pytest.mark.ccompiler
RNG = np.random.default_rng(0)


def rows(n: int) -> Any:
    return RNG.standard_normal((n, 3), dtype=np.float32)


def watched(moved: list[str], name: str, own: Callable[..., Any], *args: Any) -> Any:
    moved.append(name)
    return own(*args)


@pytest.mark.parametrize("n", [0, 1, 5, 100])
def test_every_run_reads_the_arrays_anew(executor: Executor, small: Any, n: int) -> None:
    x, z = rows(n), np.empty(n, np.float32)
    call = BoundCall(executor, [x], [z])
    for _ in range(4):  # a recording is made of the second run
        x[:] = rows(n)
        (found,) = call.run()
        assert found is z
        np.testing.assert_array_equal(z, executor.run([x])[0])
        np.testing.assert_allclose(z, small.reference(x), rtol=1e-5, atol=1e-5)


def test_calls_of_other_shapes_run_in_between(executor: Executor, small: Any) -> None:
    """They may move the memory between kernels."""
    arrays = [rows(n) for n in (3, 40, 7)]
    calls = [BoundCall(executor, [x]) for x in arrays]
    for n in (1, 30, 500, 4000, 2):
        executor.run([rows(n)])
        for x, call in zip(arrays, calls):
            np.testing.assert_allclose(call.run()[0], small.reference(x), rtol=1e-5, atol=1e-5)


def test_arrays_in_other_orders_are_copied(executor: Executor, small: Any) -> None:
    odd = np.frombuffer(b"\0" + rows(9).tobytes(), np.uint8)[1:].view(np.float32).reshape(9, 3)
    for x in (rows(20)[::2], np.asfortranarray(rows(8)), odd):
        np.testing.assert_allclose(BoundCall(executor, [x]).run()[0], small.reference(x), rtol=1e-5, atol=1e-5)


def test_nothing_is_copied_where_launches_reach_the_arrays(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    call, moved = BoundCall(executor, [rows(9)]), list[str]()
    device = executor.device
    for name in ("upload", "download", "copy"):
        monkeypatch.setattr(device, name, partial(watched, moved, name, getattr(device, name)))
    call.run()
    assert moved == ([] if device.info.kind in ("c", "opencl") else ["upload", "download"])


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "expected arrays for 1 results, got 0"),
        ([[1.0]], "array of result 0: expected an array that stays the same (float32 (9,)), got a list"),
        ([np.empty(8, np.float32)], "expected an array of float32 (9,), got float32 (8,)"),
        ([np.empty(9)], "got float64 (9,)"),
        ([np.empty(18, np.float32)[::2]], "expected writable memory in C order"),
    ],
)
def test_results_of_another_form_are_refused(executor: Executor, results: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        BoundCall(executor, [rows(9)], results)
    assert message in str(error.value)


def test_result_over_an_argument_is_refused(executor: Executor) -> None:
    x = rows(9)
    with pytest.raises(UserError, match="expected separate memory"):
        BoundCall(executor, [x], [x.reshape(-1)[4:13]])


def test_fixed_names_are_parameters(executor: Executor) -> None:
    with pytest.raises(UserError, match=r"fixed: .*parameters, x; got y"):
        BoundCall(executor, [rows(9)], fixed=("y",))


def test_closed_executor_refuses_runs(executor: Executor) -> None:
    call = BoundCall(executor, [rows(9)])
    executor.close()
    with pytest.raises(ModelStateError, match="expected an open model"):
        call.run()


def opened(module: IRModule) -> Model:
    device = open_device("c")
    job = device_job(module, device.info, MemoryStore(), QUICK)
    return job.artifact(job.build("generic")).open(device)


def looked_up() -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n", 1, 64)
    table, ids = g.input("table", (10, 4)), g.input("ids", (n,), i64)
    return g.finish(g.call(MulScalar(2.0), g.call(Take(), table, ids)))


def test_indices_are_checked_in_every_run_unless_fixed() -> None:
    table, ids = np.arange(40, dtype=np.float32).reshape(10, 4), np.array([3, 9, 0])
    with opened(looked_up()) as model:
        call = model.bind([table, ids])
        np.testing.assert_array_equal(call.run()[0], 2 * table[ids])
        ids[1] = 10
        with pytest.raises(UserError, match=r"got 10 at \[1\]"):
            call.run()
        with pytest.raises(UserError, match=r"got 10 at \[1\]"):
            model.bind([table, ids], fixed=("ids",))
        ids[1] = 1
        fixed = model.bind([table, ids], fixed=("ids",))
        table += 1
        np.testing.assert_array_equal(fixed.run()[0], 2 * table[ids])


def test_caches_of_a_decoder_are_read_and_written_in_place(tmp_path: Path) -> None:
    """Results that extend an argument, and weights of a host's library, are as of `run`."""
    with opened(load_model(write_family(tmp_path, "llama_yarn")[0])) as model:
        _, *caches = model.run([np.array([[3, 1, 4]], np.int64)], "prefill")
        tokens = np.array([[1]], np.int64)
        call = model.bind([tokens, *caches], function="decode")
        for token in (1, 5, 9):
            tokens[:] = token
            for found, wanted in zip(call.run(), model.run([tokens, *caches], "decode"), strict=True):
                np.testing.assert_array_equal(found, wanted)
    with pytest.raises(ModelStateError):
        model.bind([tokens, *caches], function="decode")


def cut(whole: bool = True) -> IRModule:
    """Twice the first k rows of x, for k given as a shape; and, for whole, x itself."""
    g = GraphBuilder()
    n, k = g.symbol("n", 1, 64), g.symbol("k", 1, 64)
    x = g.input("x", (n, 4))
    g.parameter("rows", ShapeInfo((k,)))
    firsts = g.call(MulScalar(2.0), x) if whole else g.call(Take(), x, g.input("ids", (n,), i64))
    return g.finish((firsts, x) if whole else firsts)


@pytest.mark.parametrize("given", [False, True])
def test_host_program_of_shapes_is_bound(given: bool) -> None:
    x = rows(20)[:, :1].repeat(4, 1)
    with opened(cut()) as model:
        results = [np.empty_like(x), np.empty_like(x)] if given else None
        call = model.bind([x, (3,)], results)
        for step in range(3):
            x[:] = step
            doubled, same = call.run()
            np.testing.assert_array_equal(doubled, 2 * x)
            np.testing.assert_array_equal(same, x)
            assert results is None or (doubled is results[0] and same is results[1])
        for array in call.results:
            array[:] = -1
        assert (x == 2).all()
        with pytest.raises(UserError, match="results: expected arrays of"):
            model.bind([x, (3,)], [np.empty_like(x)])
        with pytest.raises(UserError, match="array of result 1: expected separate memory"):
            model.bind([x, (3,)], [np.empty_like(x), x])
        with pytest.raises(UserError, match=r"fixed: .*parameters, x, rows; got y"):
            model.bind([x, (3,)], fixed=("y",))


def test_fixed_indices_of_a_host_program_are_checked_once() -> None:
    x, ids = rows(6)[:, :1].repeat(4, 1), np.arange(6)
    with opened(cut(False)) as model:
        call, fixed = model.bind([x, (3,), ids]), model.bind([x, (3,), ids], fixed=("ids",))
        np.testing.assert_array_equal(call.run()[0], fixed.run()[0])
        ids[2] = 6
        with pytest.raises(UserError, match=r"got 6 at \[2\]"):
            call.run()
