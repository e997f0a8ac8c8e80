"""Tensor functions written by users, and modules that mix levels of lowering."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.built_modules import RNG, kernels, program_of, rand
from tests.support.effort import examples
from tests.support.programs import agree, checked, compiled, read, same, tensor
from tests.support.tuner_models import QUICK

from relax_tune import tune
from relax_tune.database.store import MemoryStore
from relax_tune.errors import BuildError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f32, i64, u8
from relax_tune.ir.core.expr import Expr, Var, cast, const, eq, select
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import CallDPSLibrary, CallTIR, Function
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.deduce.pattern_kinds import PatternKind, pattern_kind
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.op.math.elementwise import Add, Exp, Mul, Relu, Sub, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.ir.passes.control.inline import Inline
from relax_tune.ir.passes.fusion.fuse import FuseOps
from relax_tune.ir.passes.graph.cleanup import CancelViews, DeadCode, Deduce, TidyNames
from relax_tune.ir.passes.graph.collapse import CollapseDims
from relax_tune.ir.passes.graph.constant_fold import FoldConstants
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.pipeline import STANDARD, Pass, lower, run_passes
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.tuner.job.device_job import device_job

pytestmark = pytest.mark.ccompiler


# -- a custom decode and the product that reads it -----------------------------------------------------------------

DECODE = """
    n = symbol("n", lower=0, upper=64)

    @prim_func(outputs=1)
    def mystery(p: Buffer((32, 12), u8), s: Buffer((2, 24), f32), w: Buffer((32, 24), f32)):
        for i in serial(32):
            for j in serial(24):
                with block("w"):
                    vi = spatial(32, i); vj = spatial(24, j)
                    w[vi, vj] = (cast((cast(p[vi, vj // 2], i64) // select(vj % 2 == 0, 1, 16)) % 16, f32) - 8.0) * s[vi // 16, vj]

    @function
    def main(x: Tensor((n, 32), f32), p: Tensor((32, 12), u8), s: Tensor((2, 24), f32)) -> Tensor((n, 24), f32):
        with dataflow():
            w: Tensor((32, 24), f32) = call_tir("mystery", (p, s), out=Tensor((32, 24), f32))
            y: Tensor((n, 24), f32) = op.matmul(x, w, transpose_b=False)
        return y
"""


def decoded(packed: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    k, half = packed.shape
    full = np.stack([packed & 15, packed >> 4], axis=-1).reshape(k, half * 2).astype(np.float32) - 8
    return full * np.repeat(scale, k // len(scale), axis=0)


def test_custom_decode_fuses_into_product(device: Device) -> None:
    module = read(DECODE)
    assert kernels(module) == ["fused_mystery_matmul"]
    assert pattern_kind(lower(module).prims["fused_mystery_matmul"]) is PatternKind.OUT_FUSIBLE
    assert len(program_of(module, device).kernels) == 1
    packed, scale = RNG.integers(0, 256, (32, 12)).astype(np.uint8), rand(2, 24)
    calls = [[rand(n, 32), packed, scale] for n in (0, 1, 13, 64)]
    for (x, *_), result in zip(calls, agree(module, device, *calls)):
        np.testing.assert_allclose(result, x @ decoded(packed, scale), rtol=1e-4, atol=1e-4)


def test_custom_decode_is_tuned(device: Device) -> None:
    module, store = read(DECODE), MemoryStore()
    result = tune(module, target="c", db=store, effort="quick", trials=2)
    (row,) = result.tasks
    assert row.name == "fused_mystery_matmul" and result.work.measurements > 0
    job = device_job(module, device.info, store, QUICK)
    records = store.query(result.target.key)
    assert {r.variant.kind for r in records if r.status == "ok" and r.checked} >= {"tuned"}
    packed, scale = RNG.integers(0, 256, (32, 12)).astype(np.uint8), rand(2, 24)
    executor = Executor(job.build().program, device, module.constants)
    for n in (0, 1, 13, 64):
        x = rand(n, 32)
        np.testing.assert_allclose(
            executor.run([x, packed, scale])[0], x @ decoded(packed, scale), rtol=1e-4, atol=1e-4
        )
    executor.close()


def unpacking(bits: int, scales: str, symbolic: bool) -> tuple[IRModule, Callable[..., Any]]:
    """A product with weights stored in `bits` bits, `scales` per row, per column or per group of 8 rows."""
    per, rows, columns = 8 // bits, 16, 12
    g = GraphBuilder()
    n = g.symbol("n")
    k: Expr = g.symbol("k", 1) * 8 if symbolic else const(rows)
    b = TensorBuilder("opened")
    height: Expr = Var("h") if symbolic else k
    packed = b.input("packed", (height, columns // per), u8)
    dims: Mapping[str, tuple[Expr, ...]] = {
        "row": (height,), "column": (const(columns),), "group": (height // 8, const(columns)),
    }  # fmt: skip
    scale, w = b.input("scale", dims[scales]), b.output("w", (height, columns))

    def value(i: Expr, j: Expr) -> Expr:
        byte = cast(packed[i, j // per], i64)
        number = byte
        for at in range(1, per):
            number = select(eq(j % per, at), byte // 2 ** (bits * at), number)
        index = {"row": (i,), "column": (j,), "group": (i // 8, j)}[scales]
        return cast(number % 2**bits, f32) * scale[index]

    b.compute(w, value)
    callee = g.add(b.finish())
    outer: Mapping[str, tuple[Expr, ...]] = {
        "row": (k,),
        "column": (const(columns),),
        "group": (k // 8, const(columns)),
    }
    x, p = g.input("x", (n, k)), g.input("packed", (k, columns // per), u8)
    s = g.input("scale", outer[scales])
    opened_weights = g.call_tir(callee, (p, s), tensor(k, columns))
    module = checked(g.finish(g.call(Relu(), g.call(Matmul(), x, opened_weights))))

    def reference(x: Any, p: Any, s: Any) -> Any:
        full = (
            np.stack([(p >> (bits * a)) & (2**bits - 1) for a in range(per)], -1)
            .reshape(len(p), columns)
            .astype(np.float32)
        )
        full *= {"row": lambda: s[:, None], "column": lambda: s[None], "group": lambda: np.repeat(s, 8, 0)}[scales]()
        return np.maximum(x @ full, 0)

    return module, reference


@pytest.mark.parametrize(
    ("bits", "scales", "symbolic"),
    [
        (8, "row", False),
        (4, "column", False),
        (4, "group", False),
        (2, "group", False),
        (4, "group", True),
        (8, "group", True),
    ],
)
def test_other_packings(device: Device, bits: int, scales: str, symbolic: bool) -> None:
    module, reference = unpacking(bits, scales, symbolic)
    assert kernels(module) == ["fused_opened_matmul_relu"]
    shape = {"row": (16,), "column": (12,), "group": (2, 12)}[scales]
    packed = RNG.integers(0, 256, (16, 12 * bits // 8)).astype(np.uint8)
    calls = [[rand(n, 16) / 100, packed, rand(*shape)] for n in (0, 1, 7)]
    for args, result in zip(calls, agree(module, device, *calls)):
        np.testing.assert_allclose(result, reference(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_s_weights_in_few_bits(device: Device, bits: int) -> None:
    """In a quantised model each product is one kernel that unpacks its weights."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 64))
    weights = g.constant("w", rand(64, 24))
    module = checked(QuantizeWeights(bits)(g.finish(g.call(Relu(), g.call(Matmul(), x, weights)))))
    assert kernels(module) == [f"fused_{'unpack4_' if bits == 4 else ''}dequantize_matmul_relu"]
    agree(module, device, *([rand(n, 64) / 100] for n in (0, 1, 7)))


def test_costly_producer_is_not_fused(device: Device) -> None:
    b = TensorBuilder("grown")  # reads twice what it writes: as a producer it would be read again by every row
    x, y, z = b.input("x", (16, 12)), b.input("y", (16, 12)), b.output("z", (16, 12))
    b.compute(z, lambda i, j: x[i, j] * y[i, j])
    g = GraphBuilder()
    a = g.input("a", (g.symbol("n"), 16))
    w = g.call_tir(g.add(b.finish()), (g.input("x", (16, 12)), g.input("y", (16, 12))), tensor(16, 12))
    module = checked(g.finish(g.call(Matmul(), a, w)))
    assert kernels(module) == ["grown", "matmul"]
    agree(module, device, *[[rand(n, 16), rand(16, 12), rand(16, 12)] for n in (1, 5)])


# -- levels mixed, passes in any order -----------------------------------------------------------------------------

SGEMM = ("m", "n", "k", "trans_a", "trans_b", "lda", "ldb", "ldc")


def sgemm(inputs: Sequence[Any], outputs: Sequence[Any], numbers: Sequence[int]) -> None:
    """Emulate the documented routine, for dense operands."""
    given = dict(zip(SGEMM, numbers, strict=True))
    a, b = inputs
    np.matmul(a.T if given["trans_a"] else a, b.T if given["trans_b"] else b, out=outputs[0])


LIBRARIES = {"openblas.sgemm": sgemm}
ORDERED: tuple[Pass, ...] = (
    Inline(), Deduce(), FoldConstants(), DeadCode(), Legalize(), FuseOps(), CollapseDims(), CancelViews(), TidyNames(),
)  # fmt: skip


def mixed() -> IRModule:
    """softmax(relu(double(x w))), with the product in a library, the doubling a tensor function, the rest operators."""
    sizes = "[n, 5, 6, 0, 0, 6, 5, 5]"
    return read(f"""
        @prim_func(outputs=1)
        def doubled(a: Buffer((p, q), f32), b: Buffer((p, q), f32)):
            for i in serial(p):
                for j in serial(q):
                    with block("b"):
                        vi = spatial(p, i); vj = spatial(q, j)
                        b[vi, vj] = a[vi, vj] * 2.0

        @function
        def main(x: Tensor((n, 2, 3), f32), w: Tensor((6, 5), f32)) -> Tensor((n * 5,), f32):
            with dataflow():
                e: Tensor((n, 2, 3), f32) = op.tanh(x)
                r: Tensor((n, 6), f32) = op.reshape(e, shape=(n, 6))
                y: Tensor((n, 5), f32) = call_dps_library("openblas.sgemm", (r, w), out=Tensor((n, 5), f32), scalars={sizes})
                d: Tensor((n, 5), f32) = call_tir("doubled", (y,), out=Tensor((n, 5), f32))
                u: Tensor((n, 5), f32) = op.relu(d)
                s: Tensor((n, 5), f32) = op.softmax(u)
                f: Tensor((n * 5,), f32) = op.flatten(s)
                dead: Tensor((n, 5), f32) = op.exp(u)
            return f
    """)


def library_products(op_first: bool, twice: bool) -> IRModule:
    """Operators and a hand-written function around one or two library products of growing sides."""
    g = GraphBuilder()
    n = g.symbol("n")
    k, p = Var("k"), Var("p")
    b = TensorBuilder("shift")
    a, c, z = b.input("a", (k, p)), b.input("c", (p,)), b.output("z", (k, p))
    b.compute(z, lambda i, j: a[i, j] + c[j])
    callee = g.add(b.finish())
    x, w, bias = g.input("x", (n, 4)), g.constant("w", rand(4, 4)), g.constant("bias", rand(4))
    v: Any = g.call(Exp(), x) if op_first else g.call_tir(callee, (x, bias), tensor(n, 4))
    for _ in range(1 + twice):
        v = g.call_library("openblas.sgemm", (v, w), tensor(n, 4), [n, 4, 4, 0, 0, 4, 4, 4])
        v = g.call(Tanh(), g.call_tir(callee, (v, g.call(Mul(), bias, bias)), tensor(n, 4)))
    square = g.call_library("openblas.sgemm", (v, v), tensor(n, n), [n, n, 4, 0, 1, 4, 4, n])
    return checked(g.finish((g.call(Softmax(), square), g.call(Sub(), v, x))))


MIXED: Mapping[str, tuple[Callable[[], IRModule], Callable[[int], list[Any]]]] = {
    "mixed": (mixed, lambda n: [rand(n, 2, 3), rand(6, 5)]),
    "operators first": (lambda: library_products(True, False), lambda n: [rand(n, 4)]),
    "functions first": (lambda: library_products(False, True), lambda n: [rand(n, 4)]),
}


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from(sorted(MIXED)), st.permutations(ORDERED), st.lists(st.sampled_from(ORDERED), max_size=3))
def test_passes_in_any_order_give_the_same(name: str, order: list[Pass], again: list[Pass]) -> None:
    make, arguments = MIXED[name]
    module = make()
    calls = [arguments(n) for n in (0, 1, 3)]
    expected = [run_function(module, "main", a, LIBRARIES) for a in calls]
    for step, stage in run_passes(module, (*order, *again)):
        verify(stage)
        for args, result in zip(calls, expected, strict=True):
            same(run_function(stage, "main", args, LIBRARIES), result, step)


@pytest.mark.parametrize("name", sorted(MIXED))
def test_built_programs_call_the_library(device: Device, name: str) -> None:
    pytest.importorskip("scipy_openblas32", reason="scipy-openblas32 is not installed (extra openblas)")
    make, arguments = MIXED[name]
    module = make()
    reordered = run_passes(module, (CollapseDims(), CancelViews(), FuseOps(), Legalize(), TidyNames()))[-1][1]
    for which in (module, reordered):
        with compiled(which, device) as program:
            for n in (0, 1, 7, 13):
                args = arguments(n)
                same(program(*args), run_function(module, "main", args, LIBRARIES), f"{name} at {n}")
    program = program_of(module, device)
    explicit = [c for c in program.calls if not c.task]
    assert explicit and all(s.target == "openblas.sgemm" for c in explicit for v in c.variants for s in v.steps)


def test_any_legal_order_ends_in_the_same_kernels() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 8))
    h = g.call(Relu(), g.call(Add(), g.call(Matmul(), x, g.constant("w", rand(8, 6))), g.constant("c", rand(6))))
    y = g.call(Reshape((x.info.shape[0], const(2), const(3))), h)  # type: ignore[union-attr]
    module = checked(g.finish(g.call(Tanh(), y)))
    expected = kernels(module)
    for first in ((Legalize(), FuseOps()), (DeadCode(), Legalize(), TidyNames()), (FoldConstants(), CancelViews())):
        early = run_passes(module, first)
        assert kernels(early[-1][1] if early else module) == expected


def test_an_unknown_library_is_refused_by_name(device: Device) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"),))
    module = checked(g.finish(g.call(Exp(), g.call_library("nobody.routine", (x,), x.info))))  # type: ignore[arg-type]
    with pytest.raises(BuildError, match=r"nobody"), compiled(module, device):
        pass


def test_partial_lowering_keeps_both_levels() -> None:
    module = mixed()
    (_, done), *_ = reversed(run_passes(module, STANDARD))
    main = done.functions["main"]
    assert isinstance(main, Function)
    actual = [type(b.value) for b in main.bindings]
    assert CallDPSLibrary in actual and CallTIR in actual
    partly = Legalize()(Deduce()(module))
    for n in (0, 1, 5):
        args = [rand(n, 2, 3), rand(6, 5)]
        expected = run_function(module, "main", args, LIBRARIES)
        same(run_function(partly, "main", args, LIBRARIES), expected, "partly")
        same(run_function(done, "main", args, LIBRARIES), expected, "lowered")
