"""Arrays of other libraries on a CUDA device, and results there for other libraries: on the emulated device."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cuda_emulation.driver import EmulatedDriver, emulated
from tests.runtime.test_resident import Transfers, doubled, model_of, picked
from tests.support.dlpack_capsules import CODES, Consumed, Produced

from relax_tune.errors import ModelStateError, UserError
from relax_tune.ir.core.dtype import bf16, f32, i64
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.elementwise import Add, MulScalar
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.cuda import CUDADevice
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.memory.buffer_pool import BufferPool
from relax_tune.runtime.memory.resident import DeviceArray
from relax_tune.runtime.model import Model

pytestmark = pytest.mark.ccompiler
Array = NDArray[Any]
X = np.arange(12, dtype=np.float32).reshape(4, 3)
STREAM = 0x57
"""The handle of the emulated stream."""


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return memory of the emulated device, which is the host's."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class Foreign:
    """Memory of another library on the emulated device."""

    def __init__(self, device: CUDADevice, array: Array, shift: int = 0) -> None:
        self.device, self.nbytes, self.like = device, array.nbytes, array
        self.buffer = device.alloc(array.nbytes + shift)
        self.address = self.buffer.live() + shift
        self.view = bytes_at(self.address, array.nbytes)
        self.write(array)

    def write(self, array: Array) -> None:
        self.view[:] = array.reshape(-1).view(np.uint8)

    def read(self) -> Array:
        self.device.synchronize()
        return self.view.copy().view(self.like.dtype).reshape(self.like.shape)

    def produced(self, **options: Any) -> Produced:
        given = {"address": self.address, "dtype": self.like.dtype.name, "shape": self.like.shape, **options}
        return Produced(**given)


def twice() -> IRModule:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1), 3), f32)
    return g.finish(g.call(MulScalar(2.0), x))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def device(folder: Path) -> Iterator[CUDADevice]:
    opened = emulated(folder)
    yield opened
    opened.close()


@pytest.fixture
def model(device: CUDADevice) -> Iterator[Model]:
    with model_of(twice(), device) as opened:
        yield opened


def driver_of(device: CUDADevice) -> EmulatedDriver:
    driver: EmulatedDriver = device._driver
    return driver


@pytest.mark.parametrize("versioned", [True, False])
def test_argument_and_result_on_the_device_cross_no_host(
    device: CUDADevice, model: Model, versioned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Foreign(device, X).produced(versioned=versioned)
    moved = Transfers(device, monkeypatch)
    (result,) = model(given)
    assert (moved.up, moved.down) == ([], [])
    assert isinstance(result, DeviceArray) and given.streams == [STREAM]
    gc.collect()
    assert (given.ended, given.alive) == (1, {})
    np.testing.assert_array_equal(Consumed(result.__dlpack__()).read(), 2 * X)
    assert moved.down == []
    np.testing.assert_array_equal(model.run([given], on_device=False)[0], 2 * X)


def test_argument_lives_until_the_device_is_done(device: CUDADevice, model: Model) -> None:
    """The memory is overwritten by the deleter, as another library may do that gives it to its next array."""
    memory = Foreign(device, X)
    given = memory.produced()
    ended = given._end

    def end(address: int) -> None:
        memory.write(np.full_like(X, -1))
        ended(address)

    given._deleter = type(given._deleter)(end)
    (result,) = model(given)
    gc.collect()
    assert given.ended == 1
    np.testing.assert_array_equal(result.numpy(), 2 * X)


def test_argument_with_strides_of_c_order_and_an_offset_is_read(device: CUDADevice, model: Model) -> None:
    both = Foreign(device, np.concatenate([X, X + 100]))
    given = both.produced(shape=(4, 3), strides=(3, 1), offset=X.nbytes)
    np.testing.assert_array_equal(model(given)[0].numpy(), 2 * (X + 100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": (2, 1)}, "got one on cuda:1"),
        ({"dtype": "int32"}, "expected dtype float32, got int32"),
        ({"strides": (1, 4)}, "in C order"),
        ({"offset": 2}, "in C order"),
        ({"lanes": 4}, "DLPack's type"),
        ({"shape": (12,)}, "expected 2 dimensions"),
        ({"shape": (3, 4)}, "expected 3 in dim 1"),
        ({"device": (10, 0)}, "on rocm:0"),
    ],
)
def test_unfit_argument_is_refused_and_released(
    device: CUDADevice, model: Model, options: dict[str, Any], message: str
) -> None:
    memory = Foreign(device, np.concatenate([X, X]))
    given = memory.produced(**{"shape": (4, 3), **options})
    with pytest.raises(UserError, match=message) as caught:
        model(given)
    del caught
    gc.collect()
    # A capsule without a destructor, as here, is the producer's until somebody takes it.
    assert given.ended == 1 or "lanes" in options or not given.streams


@pytest.mark.parametrize("kind", ["c", pytest.param("opencl", marks=pytest.mark.opencl)])
def test_argument_on_a_cuda_device_is_refused_by_a_model_of_the_processor(device: CUDADevice, kind: str) -> None:
    given = Foreign(device, X).produced()
    cpu = open_device(kind)
    with model_of(twice(), cpu) as model, pytest.raises(UserError, match="on cuda:0; copy it to the processor"):
        model(given)
    cpu.close()
    assert not given.streams


def test_empty_argument_is_read(device: CUDADevice) -> None:
    g = GraphBuilder()
    module = g.finish(g.call(MulScalar(2.0), g.input("x", (g.symbol("n", 0), 3), f32)))
    with model_of(module, device) as model:
        assert model(Produced(0, "float32", (0, 3)))[0].numpy().shape == (0, 3)


def test_indices_on_the_device_are_checked(device: CUDADevice) -> None:
    g = GraphBuilder()
    table = g.constant("table", np.arange(20, dtype=np.float32).reshape(5, 4))
    module = g.finish(g.call(Take(), table, g.input("ids", (g.symbol("n", 1),), i64)))
    with model_of(module, device) as model:
        memory = Foreign(device, np.array([4, 0, 2]))
        np.testing.assert_array_equal(model(memory.produced())[0].numpy()[:, 0], [16, 0, 8])
        memory.write(np.array([4, 5, 2]))
        with pytest.raises(UserError, match=r"got 5 at \[1\]"):
            model(memory.produced())


@pytest.mark.parametrize(("module", "result"), [(doubled, 65.0), (picked, None)])
def test_host_program_reads_arguments_on_the_device(
    device: CUDADevice, module: Any, result: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.ones(3, np.float32) if result else np.array([[0, 2, 0], [3, 0, 4]], np.float32)
    with model_of(module(), device) as model:
        given = Foreign(device, array).produced()
        moved = Transfers(device, monkeypatch)
        (found,) = model.run([given])
        np.testing.assert_array_equal(found, np.full(3, 65) if result else [4, 6, 8])
        assert array.nbytes not in moved.up
        gc.collect()
        assert given.ended == 1


def test_result_lives_as_long_as_a_consumer(device: CUDADevice, model: Model) -> None:
    given = Foreign(device, X).produced()
    consumed = Consumed(model(given)[0].__dlpack__(stream=2, max_version=(1, 0)))
    assert consumed.versioned and consumed.device == (2, 0)
    gc.collect()
    others = [model.run([X + n], on_device=True)[0] for n in range(4)]
    np.testing.assert_array_equal(consumed.read(), 2 * X)
    used = {driver_of(device).allocations[o.buffer.address].bytes.ctypes.data for o in others}
    assert consumed.address not in used
    model.close()
    np.testing.assert_array_equal(consumed.read(), 2 * X)
    consumed.end()


def test_memory_dropped_by_a_consumer_is_reused_after_all_queues(
    device: CUDADevice, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[None]()
    finish = device.finish
    monkeypatch.setattr(device, "finish", lambda: (waits.append(None), finish()))
    consumed = Consumed(model.run([X], on_device=True)[0].__dlpack__())
    gc.collect()
    (other,) = model.run([X], on_device=True)
    assert not waits and other.buffer.address != consumed.address
    consumed.end()
    gc.collect()
    (again,) = model.run([X], on_device=True)
    assert again.buffer.address == consumed.address and len(waits) == 1


def test_capsule_without_consumer_frees_the_memory(device: CUDADevice, model: Model) -> None:
    (result,) = model.run([X], on_device=True)
    address, capsule = result.buffer.address, result.__dlpack__()
    del result
    gc.collect()
    assert model.run([X], on_device=True)[0].buffer.address != address
    del capsule
    gc.collect()
    assert address in {a.buffer.address for a in [model.run([X], on_device=True)[0] for _ in range(2)]}


def test_writes_of_a_consumer_are_read(device: CUDADevice, model: Model) -> None:
    (result,) = model.run([X], on_device=True)
    np.testing.assert_array_equal(result.numpy(), 2 * X)
    consumed = Consumed(result.__dlpack__())
    bytes_at(consumed.address, X.nbytes).view(np.float32)[:] = 7
    np.testing.assert_array_equal(result.numpy(), np.full((4, 3), 7))
    np.testing.assert_array_equal(model(result)[0], np.full((4, 3), 14))
    consumed.end()


def test_result_is_copied_to_the_processor_on_request(device: CUDADevice, model: Model) -> None:
    (result,) = model.run([X], on_device=True)
    assert result.__dlpack_device__() == (2, 0)
    np.testing.assert_array_equal(np.asarray(result), 2 * X)
    copied = Consumed(result.__dlpack__(dl_device=(1, 0), max_version=(1, 0)))
    assert copied.device == (1, 0) and copied.address != result.buffer.address
    np.testing.assert_array_equal(copied.read(), 2 * X)
    copied.end()
    with pytest.raises(BufferError):
        result.__dlpack__(dl_device=(1, 0), copy=False)
    with pytest.raises(BufferError):
        result.__dlpack__(dl_device=(2, 1))
    model.close()
    with pytest.raises(ModelStateError, match="closed"):
        result.__dlpack__()


def test_result_of_a_model_on_another_handle_of_the_device_stays(
    device: CUDADevice, model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = emulated(folder)
    (result,) = model.run([X], on_device=True)
    with model_of(twice(), other) as second:
        moved = Transfers(other, monkeypatch)
        (chained,) = second(result)
        assert moved.up == []
        np.testing.assert_array_equal(chained.numpy(), 4 * X)
        del chained
    other.close()


@pytest.mark.parametrize("name", CODES)
def test_every_type_is_exported(device: CUDADevice, name: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(np.dtype(name))
    pool = BufferPool(device)
    copied = pool.upload(array)
    consumed = Consumed(copied.__dlpack__())
    assert consumed.dtype == name
    np.testing.assert_array_equal(consumed.read().astype(np.float32), array.astype(np.float32))
    consumed.end()
    del copied, consumed
    pool.close()


def test_array_with_another_dim_outermost_is_exported_with_strides(device: CUDADevice) -> None:
    stored = np.arange(24, dtype=np.float32).reshape(4, 2, 3)  # dims 2, 4, 3 with dim 1 outermost
    pool = BufferPool(device)
    array = pool.empty(stored.dtype, (2, 4, 3), outer=1)
    device.upload(array.buffer, stored)
    consumed = Consumed(array.__dlpack__())
    np.testing.assert_array_equal(consumed.read(), np.moveaxis(stored, 0, 1))
    consumed.end()


def test_bfloat16_argument_is_read(device: CUDADevice) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1),), bf16)
    with model_of(g.finish(g.call(MulScalar(2.0), x)), device) as model:
        array = np.array([1.5, -3], "bfloat16")
        given = Foreign(device, array).produced()
        np.testing.assert_array_equal(np.asarray(model(given)[0], np.float32), [3, -6])


def test_session_starts_from_and_takes_arrays_on_the_device(
    device: CUDADevice, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Foreign(device, X).produced()
    moved = Transfers(device, monkeypatch)
    with model.session({"x": given}, replaced_by={"x": 0}) as session:
        gc.collect()
        assert moved.up == [] and given.ended == 1
        session.run([])
        np.testing.assert_array_equal(session.arrays()["x"], 2 * X)


def sums() -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n", 1)
    return g.finish(g.call(Add(), g.input("x", (n, 3), f32), g.input("y", (n, 3), f32)))


@pytest.mark.parametrize("shift", [0, 4])
def test_bound_call_computes_over_memory_of_other_libraries(
    device: CUDADevice, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_of(sums(), device) as model:
        x, y, out = Foreign(device, X, shift), Foreign(device, 3 * X), Foreign(device, 0 * X)
        given = x.produced(), y.produced(), out.produced()
        bound = model.bind(given[:2], [given[2]])
        moved = Transfers(device, monkeypatch)
        copied, copy = list[int](), device.copy
        monkeypatch.setattr(device, "copy", lambda to, by, nbytes: (copied.append(nbytes), copy(to, by, nbytes)))
        assert bound.run()[0] is given[2]
        np.testing.assert_array_equal(out.read(), 4 * X)
        x.write(X + 1)
        bound.run()
        np.testing.assert_array_equal(out.read(), 4 * X + 1)
        # Kernels load vectors from memory that is aligned to 64 bytes; other memory is copied.
        assert (moved.up, moved.down) == ([], []) and copied == [X.nbytes] * (2 if shift else 0)
        assert [len(g.streams) for g in given] == [3, 3, 3]
        given[0].address += 64
        with pytest.raises(UserError, match="expected the memory that was bound"):
            bound.run()
        del bound
        gc.collect()
        assert not any(g.alive for g in given)


def test_bound_call_with_overlapping_or_read_only_results_is_refused(device: CUDADevice) -> None:
    with model_of(sums(), device) as model:
        x, y = Foreign(device, X), Foreign(device, X)
        for result, message in (
            (x.produced(), "separate memory"),
            (y.produced(read_only=True), "read-only"),
            (y.produced(shape=(3, 4)), "expected an array of float32"),
            (y.produced(device=(2, 3)), "cuda:3"),
        ):
            with pytest.raises(UserError, match=message):
                model.bind([x.produced(), X], [result])


def test_bound_indices_on_the_device_are_checked_in_every_run(device: CUDADevice) -> None:
    g = GraphBuilder()
    table = g.constant("table", np.arange(20, dtype=np.float32).reshape(5, 4))
    module = g.finish(g.call(Take(), table, g.input("ids", (g.symbol("n", 1),), i64)))
    with model_of(module, device) as model:
        memory = Foreign(device, np.array([4, 0]))
        bound = model.bind([memory.produced()])
        np.testing.assert_array_equal(bound.run()[0][:, 0], [16, 0])
        memory.write(np.array([1, 2]))
        np.testing.assert_array_equal(bound.run()[0][:, 0], [4, 8])
        memory.write(np.array([5, 2]))
        with pytest.raises(UserError, match="got 5"):
            bound.run()


def test_device_without_shared_memory_is_unchanged(tmp_path: Path) -> None:
    opened: Device = open_device("c")
    with model_of(twice(), opened) as model:
        (result,) = model.run([X], on_device=True)
        assert isinstance(result, np.ndarray)
    opened.close()
