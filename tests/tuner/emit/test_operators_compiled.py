"""Operators beyond the encoder's, from graph to compiled kernels on each device, against their meaning in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.operator_samples import PLAIN_ELEMENTWISE, elementwise_arguments
from tests.support.tuner_models import DEVICES, narrowed, opened

from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.dtype import bool_, dtype, f32, i8, i32, i64, u8
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.indexing.movement import Slice
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.indexing.scatter import ScatterElements, ScatterND
from relax_tune.ir.op.math.elementwise import Cast, DivScalar
from relax_tune.ir.op.math.numeric import (
    Floor,
)
from relax_tune.ir.op.math.quantize import Dequantize, Pack4, Quantize, Unpack4
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.fold import Fold
from relax_tune.ir.op.neural.resize import Resize
from relax_tune.ir.op.neural.window import Conv, Pool, PoolPositions
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.scan import ArgMax, CumProd, CumSum, Prod, TopK
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.allowed_sizes import Range

Array = np.ndarray[Any, Any]


def elementwise() -> tuple[IRModule, list[Array]]:
    """Return a module of all elementwise operators, each of operands in its domain, with numbers at the ends of int32."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 40)
    results, arrays = [], []
    for operator in PLAIN_ELEMENTWISE:
        values = elementwise_arguments(operator, (7, 6))
        if operator.operands == "integers":
            values = [a.astype(np.int32) for a in values]
            values[0][0, :3] = -(2**31), 2**31 - 1, 7
            values[1:] = [np.array([-1, -3, 4, 0, 5, 2], np.int32)] * len(values[1:])
        dims = [(n, 6), (6,)]
        args = [g.input(f"x{len(arrays) + p}", dims[p], dtype(a.dtype)) for p, a in enumerate(values)]
        arrays += values
        results.append(g.call(operator(), *args))
    k = g.input("k", (n, 6), i32)
    results.append(g.call(Floor(), g.call(DivScalar(41.0), g.call(Cast(f32), k))))
    return g.finish(results), [*arrays, np.arange(42, dtype=np.int32).reshape(7, 6) * 41]


def along_axes() -> tuple[IRModule, list[Array]]:
    g = GraphBuilder()
    n = g.symbol("n", 1, 40)
    x = g.input("x", (n, 9))
    where, updates = g.input("where", (n, 4), i64), g.input("updates", (n, 4))
    rows, lines = g.input("rows", (3, 1), i64), g.input("lines", (3, 9))
    results = [g.call(op, x) for op in (
        ArgMax(1), ArgMax(0, least=True, last=True), TopK(const(3)), CumSum(1), CumSum(0, True, True), CumProd(1), Prod((0,)),
    )]  # fmt: skip
    results += [g.call(ScatterElements(mode, 1), x, where, updates) for mode in ("replace", "add", "mul")]
    results += [g.call(ScatterND(mode), x, rows, lines) for mode in ("replace", "max")]
    rng = np.random.default_rng(2)
    return g.finish(results), [
        rng.integers(-3, 4, (7, 9)).astype(np.float32), np.argsort(rng.random((7, 9)), axis=1)[:, :4],
        rng.standard_normal((7, 4)).astype(np.float32), np.array([[5], [0], [3]]),
        rng.standard_normal((3, 9)).astype(np.float32),
    ]  # fmt: skip


def windows() -> tuple[IRModule, list[Array]]:
    g = GraphBuilder()
    n, h = g.symbol("n", 1, 4), g.symbol("h", 5, 20)
    x = g.input("x", (n, 4, h, 7))
    rng = np.random.default_rng(3)
    kernel = g.constant("kernel", rng.standard_normal((6, 2, 3, 2)).astype(np.float32))
    results = [
        g.call(Conv((2, 1), (1, 2), 2), x, kernel),
        g.call(Pool((3, 2), (1, 2), (2, 1)), x),
        g.call(Pool((2, 2), (2, 2), (1, 1), largest=False), x),
        g.call(
            Resize((2, 3), (h * 2, const(5)), (const(1), const(14)), (const(-1), const(2)), (const(2), const(10))), x
        ),
        g.call(Resize((2,), (const(3),), (h * 2,), (h - 3,), (const(6),), "cubic", wide=(h,), narrow=(const(3),)), x),
        g.call(Fold((h + 2,), (2,), (1,), (const(1),)), x),
    ]
    top = g.call(Pool((3, 2), (2, 2), (1, 1)), x)
    results.append(g.call(PoolPositions((3, 2), (2, 2), (1, 1), (const(0), const(0))), x, top))
    sizes = tuple(map(const, (0, 0, 2, 1))), tuple(map(const, (0, 1, 0, 3)))
    results += [g.call(Pad(*sizes, mode), x) for mode in ("constant", "edge", "wrap")]
    results += [
        g.call(Slice(2, h - 1, const(-1), -2), x),
        g.call(Einsum("bchw,fchw,h->bfw"), x, g.input("u", (3, 4, h, 7)), g.input("s", (h,))),
    ]
    return g.finish(results), [rng.standard_normal(s).astype(np.float32) for s in ((2, 4, 6, 7), (3, 4, 6, 7), (6,))]


def small_numbers() -> tuple[IRModule, list[Array]]:
    g = GraphBuilder()
    n = g.symbol("n", 1, 40)
    x, packed, q = g.input("x", (n, 9)), g.input("packed", (n, 5), u8), g.input("q", (n, 9), i8)
    rng = np.random.default_rng(4)
    scale = g.constant("scale", (rng.random(9) + 0.1).astype(np.float32))
    zero = g.constant("zero", rng.integers(0, 200, 9).astype(np.uint8))
    weights = g.constant("weights", rng.standard_normal((9, 6)).astype(np.float32))
    results = [g.call(Quantize(1, None, u8), x, scale, zero), g.call(Dequantize(1), q, scale), g.call(Pack4(1), q)]
    results.append(g.call(Unpack4(1, const(9)), packed))
    results.append(g.call(Matmul(), x, weights))
    array = rng.standard_normal((7, 9)).astype(np.float32) * 40
    return QuantizeWeights(4, 4)(g.finish(results)), [
        array, rng.integers(0, 256, (7, 5)).astype(np.uint8), rng.integers(-128, 128, (7, 9)).astype(np.int8),
    ]  # fmt: skip


def attention() -> tuple[IRModule, list[Array]]:
    g = GraphBuilder()
    n = g.symbol("n", 1, 40)
    q, k, v = g.input("q", (4, n, 6)), g.input("k", (2, n + 3, 6)), g.input("v", (2, n + 3, 5))
    mask, bias = g.input("mask", (n, n + 3), bool_), g.input("bias", (4, 1, n + 3))
    rng = np.random.default_rng(5)
    ops: list[tuple[Attention, list[Any]]] = [
        (Attention(0.4, True, const(3), window=4), []), (Attention(0.4, softcap=0.8), [mask]),
        (Attention(0.4, True, const(3)), [bias]),
    ]  # fmt: skip
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((4, 2, 6), (2, 5, 6), (2, 5, 5))]
    hidden = np.where(rng.random((4, 1, 5)) < 0.6, -np.inf, 0.5).astype(np.float32)
    hidden[1] = -np.inf
    return g.finish([g.call(op, q, k, v, *more) for op, more in ops]), [*arrays, rng.random((2, 5)) < 0.5, hidden]


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("make", [elementwise, along_axes, windows, small_numbers, attention])
def test_operator_kernels_agree_with_numpy(kind: str, make: Any) -> None:
    module, inputs = make()
    with opened(kind) as device:
        spots = {b.var.name: Range(b.lower + 1, b.lower + 1) for b in module.bounds}
        job = narrowed(device_job(module, device.info, MemoryStore(), Settings(target=kind, effort="quick")), spots)
        with job.artifact(job.build("generic")).open(device) as model:
            found = model.run(inputs)
    for position, (f, w) in enumerate(zip(found, evaluate_function(module, inputs), strict=True)):
        assert f.shape == w.shape, position
        np.testing.assert_allclose(f, w, rtol=2e-5, atol=2e-6, err_msg=f"result {position}")
