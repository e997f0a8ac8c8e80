"""Arrays that stay on the device between the subgraphs of a host program: what crosses to the host, and what memory is kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cuda_emulation.driver import emulated
from tests.support.programs import same
from tests.support.tuner_models import QUICK, opened

from relax_tune.database.memory_store import MemoryStore
from relax_tune.errors import MeasureError
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Var
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.struct_info import ShapeInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.shared.handlers.control import LoopBody, Values, loop
from relax_tune.ir.frontend.shared.handlers.sizes import nonzero
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.gather import GatherND
from relax_tune.ir.op.math.elementwise import AddScalar, MulScalar
from relax_tune.ir.op.math.logic import Less
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.ir.op.shapes import ReshapeTo, TensorToShape
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.memory.buffer_pool import BufferPool
from relax_tune.runtime.model import Model
from relax_tune.tuner.job.device_job import device_job

Array = np.ndarray[Any, Any]
DEVICES = [pytest.param("opencl", marks=pytest.mark.opencl), pytest.param("cuda", marks=pytest.mark.ccompiler)]


@contextmanager
def device_of(kind: str, folder: Path) -> Iterator[Device]:
    if kind == "opencl":
        with opened("opencl") as device:
            yield device
        return
    device = emulated(folder)
    yield device
    device.close()


def model_of(module: IRModule, device: Device) -> Model:
    job = device_job(module, device.info, MemoryStore(), QUICK)
    return job.artifact(job.build("generic")).open(device)


def picked() -> IRModule:
    """Twice the elements of x that are not 0, and how many."""
    g = GraphBuilder()
    n = g.symbol("n", 1)
    w = Writer(g)
    x = w.of(g.input("x", (n, 3), f32))
    places = nonzero(w, x, 1)
    return g.finish(w.emit(MulScalar(2.0), w.emit(GatherND(), w.tensor(x), places)))


def doubled() -> IRModule:
    """x doubled until its sum exceeds 100."""
    g = GraphBuilder()
    n = g.symbol("n", 1)
    w = Writer(g)
    x = w.of(g.input("x", (n,), f32))

    def step(b: LoopBody) -> tuple[ImportedValue, Values, Values]:
        now = b.w.emit(MulScalar(2.0), b.w.tensor(b.state[0]))
        return b.w.of(b.w.emit(Less(), b.w.emit(Sum((0,)), now), b.w.literal(100, f32))), [b.w.of(now)], []

    (last,), _ = loop(w, [x], step, going=w.constant(np.asarray(True), "begin"))
    return g.finish(w.emit(AddScalar(1.0), w.tensor(last)))


class Transfers:
    """Counts the bytes that cross between host and device."""

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up, self.down = list[int](), list[int]()
        upload, download = device.upload, device.download

        def up(buffer: Any, array: Array) -> None:
            self.up.append(array.nbytes)
            upload(buffer, array)

        def down(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Array:
            found: Array = download(buffer, dtype, shape)
            self.down.append(found.nbytes)
            return found

        monkeypatch.setattr(device, "upload", up)
        monkeypatch.setattr(device, "download", down)

    def clear(self) -> None:
        self.up.clear()
        self.down.clear()


@pytest.mark.parametrize("kind", DEVICES)
def test_result_left_on_the_device_is_read_by_the_next_call(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1), 3), f32)
    module = g.finish(g.call(MulScalar(2.0), x))
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    with device_of(kind, tmp_path) as device, model_of(module, device) as model:
        model.run([array])
        moved = Transfers(device, monkeypatch)
        left = model.run([array], on_device=True)[0]
        (left,) = model.run([left], on_device=True)
        assert (moved.up, moved.down) == ([array.nbytes], [])
        np.testing.assert_array_equal(model(left)[0], 8 * array)
        np.testing.assert_array_equal(left.numpy(), 4 * array)
        assert moved.up == [array.nbytes] and moved.down == [array.nbytes] * 2
        with model.session({"x": left}, replaced_by={"x": 0}) as session:
            session.run([])
            np.testing.assert_array_equal(session.arrays()["x"], 8 * array)
        assert moved.up == [array.nbytes]


@pytest.mark.parametrize("kind", DEVICES)
def test_count_alone_crosses_to_the_host(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = picked()
    with device_of(kind, tmp_path) as device, model_of(module, device) as model:
        crossed = Transfers(device, monkeypatch)
        for n in (40, 1, 17):
            x = np.random.default_rng(n).integers(0, 3, (n, 3)).astype(np.float32)
            crossed.clear()
            (found,) = model.run([x])
            same(found, run_function(module, "main", [x]), kind)
            assert crossed.up == [x.nbytes]
            assert crossed.down == [8, found.nbytes]


@pytest.mark.parametrize("kind", DEVICES)
def test_loop_state_stays_on_the_device(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = doubled()
    with device_of(kind, tmp_path) as device, model_of(module, device) as model:
        crossed = Transfers(device, monkeypatch)
        x = np.ones(3, np.float32)
        (found,) = model.run([x])
        same(found, np.full(3, 65, np.float32), kind)
        # one byte each: that the loop begins, and whether it goes on
        assert [b for b in crossed.up if b > 1] == [x.nbytes]
        assert [b for b in crossed.down if b > 1] == [found.nbytes]


@pytest.mark.parametrize("kind", DEVICES)
def test_memory_of_arrays_is_used_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with device_of(kind, tmp_path) as device, model_of(doubled(), device) as model:
        for _ in range(2):
            model.run([np.ones(3, np.float32)])
        taken = list[int]()
        alloc = device.alloc
        monkeypatch.setattr(
            device, "alloc", lambda nbytes, lasting=False: taken.append(nbytes) or alloc(nbytes, lasting)
        )
        for _ in range(20):
            model.run([np.ones(3, np.float32)])
        gc.collect()
        assert not taken


@pytest.mark.parametrize("kind", DEVICES)
def test_views_take_arrays_of_the_device(kind: str, tmp_path: Path) -> None:
    g = GraphBuilder()
    n = g.symbol("n", 1)
    x, to = g.input("x", (n,), f32), g.input("to", (2,), i64)
    dims = g.call(TensorToShape(), to)
    a, b = Var("a"), Var("b")
    known = g.match_cast(dims, ShapeInfo((a, b)))
    twice = g.call(MulScalar(2.0), x)
    module = g.finish(g.call(AddScalar(1.0), g.call(ReshapeTo(), twice, known)))
    with device_of(kind, tmp_path) as device, model_of(module, device) as model:
        for shape in ((2, 3), (6, 1)):
            args = [np.arange(6, dtype=np.float32), np.array(shape)]
            same(model.run(args)[0], (args[0] * 2 + 1).reshape(shape), kind)


@pytest.mark.parametrize("kind", DEVICES)
def test_pool_without_memory_frees_other_sizes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with device_of(kind, tmp_path) as device:
        pool, alloc, free, held = BufferPool(device), device.alloc, device.free, dict[int, int]()

        def limited(nbytes: int, lasting: bool = False) -> Any:
            if sum(held.values()) + nbytes > 5000:
                raise MeasureError("memory: none is left")
            buffer = alloc(nbytes, lasting)
            held[id(buffer)] = nbytes
            return buffer

        def freed(buffer: Any) -> None:
            held.pop(id(buffer), None)
            free(buffer)

        monkeypatch.setattr(device, "alloc", limited)
        monkeypatch.setattr(device, "free", freed)
        kept = pool.upload(np.arange(100, dtype=np.float32))
        for count in (256, 512, 800):
            pool.upload(np.zeros(count, np.float32))
        with pytest.raises(MeasureError, match="none is left"):
            pool.upload(np.zeros(2000, np.float32))
        np.testing.assert_array_equal(device.download(kept.buffer, kept.dtype, kept.shape), np.arange(100))
        del kept
        pool.close()
        assert not held
