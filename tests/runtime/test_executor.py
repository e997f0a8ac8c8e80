"""The VM on both devices, with a hand-written program of two calls."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import ArtifactError, UserError
from relax_tune.runtime.artifact import new_artifact
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import MAX_BINDINGS, Executor
from relax_tune.runtime.program.program import BufferSpec, Symbol

RNG = np.random.default_rng(0)


def rows(n: int) -> Any:
    return RNG.standard_normal((n, 3), dtype=np.float32)


def test_every_size_is_right(executor: Executor, small: Any) -> None:
    for n in (1, 7, 0, 4, 5, 100, 2, 1000, 1, 0):
        x = rows(n)
        (z,) = executor.run([x])
        np.testing.assert_allclose(z, small.reference(x), rtol=1e-5, atol=1e-5)
        assert z.shape == (n,) and z.dtype == np.float32


def test_inputs_by_name_and_strided(executor: Executor, small: Any) -> None:
    x = rows(20)[::2]
    np.testing.assert_allclose(executor.run({"x": x})[0], small.reference(x), rtol=1e-5, atol=1e-5)


def test_in_place_reads_and_writes_the_callers_memory(executor: Executor, small: Any, device: Device) -> None:
    """The same results, in arrays of their own; what the executor's buffers hold is what was there before."""
    x = rows(9)
    (z,) = executor.run([x])
    kept = []
    for n in (1, 5, 0, 100, 5):
        odd = (
            np.frombuffer(b"\0" + rows(n).tobytes(), np.uint8)[1:].view(np.float32).reshape(n, 3)
        )  # not where floats lie
        for given in (rows(n), np.asfortranarray(rows(n)), odd):
            before = given.copy()
            (found,) = executor.run([given], in_place=True)
            np.testing.assert_allclose(found, small.reference(given), rtol=1e-5, atol=1e-5)
            assert found.shape == (n,) and found.flags.writeable and np.array_equal(given, before)
            kept.append((found, found.copy()))
    assert all(np.array_equal(a, b) for a, b in kept)
    executor.run([x])
    executor.run([rows(9)], in_place=True)
    executor.bind({"n": 9}).launch()
    if device.info.kind == "c":
        np.testing.assert_array_equal(device.download(executor.buffer("z"), np.dtype(np.float32), (9,)), z)


def test_the_plan_decides_by_shape(executor: Executor) -> None:
    assert executor.bind({"n": 4}).choices == (("affine", "generic"), ("sums", "generic"))
    assert executor.bind({"n": 5}).choices == (("affine", "tuned"), ("sums", "generic"))


def test_bindings_are_kept_and_survive_growth(executor: Executor, small: Any, device: Device) -> None:
    first = executor.bind({"n": 6})
    x = rows(6)
    executor.run([x])
    assert executor.bind({"n": 6}) is first
    executor.run([rows(3000)])  # memory grows: the closures of `first` point at memory that is gone
    device.upload(executor.buffer("x"), x)
    first.launch()
    z = device.download(executor.buffer("z"), np.dtype(np.float32), (6,))
    np.testing.assert_allclose(z, small.reference(x), rtol=1e-5, atol=1e-5)
    for n in range(20, 20 + MAX_BINDINGS):
        executor.bind({"n": n})
    assert executor.bind({"n": 6}) is not first


def test_memory_only_grows(executor: Executor) -> None:
    executor.bind({"n": 100})
    large = executor.buffer("y")
    executor.bind({"n": 3})
    assert executor.buffer("y") is large


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([], "small: expected 1 arguments (x), got 0, missing x"),
        ({}, "small: expected an array for parameter x, got arguments for none"),
        ([np.zeros((2, 3), np.float32)] * 2, "small: expected 1 arguments (x), got 2"),
        ({"x": np.zeros((2, 3), np.float32), "w": 1}, "expected the parameters x, got unknown w"),
        ([np.zeros(3, np.float32)], "small: parameter x: expected 2 dimensions (x: float32 (n, 3)), got 1 (3,)"),
        ([np.zeros((2, 3))], "small: parameter x: expected dtype float32, got float64"),
        ([np.zeros((2, 4), np.float32)], "small: parameter x: expected 3 in dim 1, got 4"),
        ([[1.0]], "small: parameter x: expected 2 dimensions (x: float32 (n, 3)), got 1 (1,)"),
        ([np.zeros((4097, 3), np.float32)], "small: expected n <= 4096, got 4097 (from dim 0 of parameter x)"),
        ([np.zeros((13, 3), np.float32)], "small: dim 0 of x: expected anything but 13, got 13"),
    ],
)
def test_wrong_arguments(executor: Executor, inputs: Any, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        executor.run(inputs)


def test_upper_bound_is_checked_when_memory_suffices(device: Device, small: Any) -> None:
    executor = Executor(small.program(device.info.kind, upper=4), device, small.constants)
    with pytest.raises(UserError, match="expected n <= 4, got 5"):
        executor.run([rows(5)])
    with pytest.raises(UserError, match="expected n <= 4, got 5"):
        executor.bind({"n": 5})
    with pytest.raises(UserError, match="symbols"):
        executor.bind({"m": 5})


def test_a_symbol_seen_twice_must_agree(device: Device, small: Any) -> None:
    program = small.program(device.info.kind)
    n = program.buffers[0].shape[0]
    program = replace(
        program, buffers=(*program.buffers, BufferSpec("w", "int32", (n,), "input")), inputs=(0, len(program.buffers))
    )
    executor = Executor(program, device, small.constants)
    x = rows(5)
    np.testing.assert_allclose(executor.run([x, np.zeros(5, np.int32)])[0], small.reference(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"parameter w: .*dim 0, got 6 .*n = 5 .*parameter x"):
        executor.run([x, np.zeros(6, np.int32)])


def test_unbound_symbol_is_taken_by_bind_and_refused_by_run(device: Device, small: Any) -> None:
    """Measuring names every symbol; a model must find them in its inputs."""
    program = small.program(device.info.kind)
    program = replace(program, symbols=(*program.symbols, Symbol("m")))
    executor = Executor(program, device, small.constants)
    executor.bind({"n": 3, "m": 7}).launch()
    for refused in (lambda: executor.run([rows(3)]), lambda: new_artifact(program, small.constants).open(device)):
        with pytest.raises(ArtifactError, match=r"every symbol, got none for \['m'\]"):
            refused()


def test_executor_refuses_foreign_program(device: Device, small: Any) -> None:
    program = small.program(device.info.kind)
    with pytest.raises(ArtifactError, match="constant bias, got none"):
        Executor(program, device, {})
    with pytest.raises(ArtifactError, match=r"constant bias: expected float32 \(3,\), got float64"):
        Executor(program, device, {"bias": np.zeros(3)})
    symbolic = replace(program.buffers[2], shape=(program.buffers[0].shape[0],))
    broken = replace(program, buffers=(*program.buffers[:2], symbolic, *program.buffers[3:]))
    with pytest.raises(ArtifactError, match=r"buffer packed: .*depend on no symbol"):
        Executor(broken, device, small.constants)


def test_temp_larger_than_storage_is_refused(device: Device, small: Any) -> None:
    program = small.program(device.info.kind)
    executor = Executor(replace(program, storages=(program.buffers[0].shape[1],)), device, small.constants)
    with pytest.raises(ArtifactError, match=r"buffer y: expected 84 bytes, .*has 3"):
        executor.run([rows(7)])


def test_shared_buffers_are_used_in_place(device: Device, small: Any) -> None:
    program = small.program(device.info.kind)
    x = rows(9)
    mine, out = device.alloc(x.nbytes), device.alloc(9 * 4)
    device.upload(mine, x)
    executor = Executor(program, device, small.constants, shared={"x": mine, "z": out})
    executor.bind({"n": 9}).launch()
    z = device.download(out, np.dtype(np.float32), (9,))
    np.testing.assert_allclose(z, small.reference(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="buffer x: expected 120 bytes, got 108"):
        executor.bind({"n": 10})
    executor.close()
    device.download(mine, np.dtype(np.float32), (9, 3))  # still the caller's
    with pytest.raises(UserError, match="shared"):
        Executor(program, device, small.constants, shared={"nothing": mine})
