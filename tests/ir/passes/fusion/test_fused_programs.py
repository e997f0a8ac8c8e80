"""Fusion and lowering preserve results: programs from the builder or as text, in the interpreter and as compiled C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.built_modules import RNG, kernels, program_of, rand
from tests.support.programs import agree, checked, compiled, ones, read, tensor
from tests.support.tuner_models import QUICK

from relax_tune.database.store import MemoryStore
from relax_tune.errors import DeduceError, UserError
from relax_tune.ir.core.dtype import f16, f32, i32, i64
from relax_tune.ir.core.expr import Var, const, maximum
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.deduce.pattern_kinds import PatternKind, pattern_kind
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.base import Deduction, OperatorSpec
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, Flatten, Permute, Slice, Take
from relax_tune.ir.op.math.elementwise import Add, Cast, Exp, Relu, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.executor import Executor
from relax_tune.tuner.job.device_job import device_job

pytestmark = pytest.mark.ccompiler


# -- tensor functions called across levels, with symbolic dims that grow -------------------------------------------

DOUBLING = """
    @prim_func(outputs=1)
    def double(x: Buffer((k,), f32), y: Buffer((k * 2,), f32)):
        for i in serial(k * 2):
            with block("y"):
                vi = spatial(k * 2, i)
                y[vi] = x[vi % k] * 2.0

    @function
    def main(x: Tensor((n,), f32)) -> Tensor((n * 4,), f32):
        with dataflow():
            y: Tensor((n * 2,), f32) = call_tir("double", (x,), out=Tensor((n * 2,), f32))
            z: Tensor((n * 4,), f32) = call_tir("double", (y,), out=Tensor((n * 4,), f32))
        return z
"""


def test_doubling_twice_and_of_nothing(device: Device) -> None:
    module = read(DOUBLING)
    result, empty, one, prime = agree(module, device, [np.float32([0, 1, 2])], [ones(0)], [ones(1)], [ones(13)])
    assert result.tolist() == [0, 4, 8] * 4
    assert empty.shape == (0,) and one.tolist() == [4] * 4 and prime.shape == (52,)


def test_one_function_serves_both_calls(device: Device) -> None:
    assert len(kernels(read(DOUBLING))) == 1, "both calls fuse where only the last result is expected"
    both = DOUBLING.replace("-> Tensor((n * 4,), f32)", "-> Tuple(Tensor((n * 2,), f32), Tensor((n * 4,), f32))")
    program = program_of(read(both.replace("return z", "return (y, z)")), device)
    targets = {s.target for c in program.calls for v in c.variants for s in v.steps}
    assert len(program.calls) == 2 and len(program.kernels) == len(targets) == 1


def test_shrinking_functions_and_scalar_arguments(device: Device) -> None:
    module = read("""
        @prim_func(outputs=1)
        def every(x: Buffer((k,), f32), y: Buffer(((k + s - 1) // s,), f32), s: i64):
            for i in serial((k + s - 1) // s):
                with block("y"):
                    vi = spatial((k + s - 1) // s, i)
                    y[vi] = x[vi * s]

        @function
        def main(x: Tensor((n,), f32)) -> Tensor(((n + 2) // 3,), f32):
            with dataflow():
                e: Tensor((n,), f32) = op.exp(x)
                y: Tensor(((n + 2) // 3,), f32) = call_tir("every", (e,), out=Tensor(((n + 2) // 3,), f32), scalars=[3])
            return y
    """)
    for x, result in zip(
        [ones(0), ones(1), ones(7), ones(9)], agree(module, device, *[[ones(i)] for i in (0, 1, 7, 9)])
    ):
        np.testing.assert_allclose(result, np.exp(x)[::3], rtol=1e-5)


def test_two_symbols_and_an_empty_dim(device: Device) -> None:
    b = TensorBuilder("outer")
    k, p = Var("k"), Var("p")
    x, y, z = b.input("x", (k,)), b.input("y", (p,)), b.output("z", (k, p))
    b.compute(z, lambda i, j: x[i] * y[j])
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    callee = g.add(b.finish())
    both = g.call_tir(callee, (g.input("a", (n,)), g.input("b", (m,))), tensor(n, m))
    again = g.call_tir(callee, (g.call(Flatten(), both), g.call(Sum((0,), False), both)), tensor(n * m, m))
    module = checked(g.finish(again))
    calls = [[ones(i), ones(j)] for i, j in ((2, 3), (0, 3), (3, 0), (0, 0), (1, 1), (5, 7))]
    for (a, c), result in zip(calls, agree(module, device, *calls)):
        whole = np.outer(a, c)
        np.testing.assert_allclose(result, np.outer(whole.ravel(), whole.sum(0)), rtol=1e-5)


def test_unproven_argument_shapes_are_checked(device: Device) -> None:
    """Dims of arguments and parameters that cannot be proved equal are compared at run time."""
    b = TensorBuilder("both")
    k = Var("k")
    x, y, z = b.input("x", (k,)), b.input("y", (k * 2,)), b.output("z", (k,))
    b.compute(z, lambda i: x[i] + y[i * 2 + 1])
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    call = g.call_tir(g.add(b.finish()), (g.input("a", (n,)), g.input("b", (m,))), tensor(n))
    module = checked(g.finish(call))
    agree(module, device, [ones(3), ones(6)], [ones(0), ones(0)])
    with compiled(module, device) as program:
        for a, c in ((ones(3), ones(5)), (ones(3), ones(8))):
            with pytest.raises(UserError, match=r"parameter y: dim 0: .*6 .*got [58] \(m\)"):
                program(a, c)
    g = GraphBuilder()
    callee, a, c = g.add(b.finish()), g.input("a", (3,)), g.input("b", (5,))
    with pytest.raises(DeduceError, match=r"parameter y: dim 0: .* = 6, got 5\n[^^]*\^"):
        lower(g.finish(g.call_tir(callee, (a, c), tensor(3))))


# -- a symbol that no buffer shows becomes an explicit scalar ------------------------------------------------------


def with_shape_of(make: Callable[[GraphBuilder], Any]) -> IRModule:
    """relu(v + y) where `make` gives v, and y has its dims."""
    g = GraphBuilder()
    v = make(g)
    y = g.input("y", v.info.shape)
    return checked(g.finish(g.call(Relu(), g.call(Add(), v, y))))


def fused_scalars(module: IRModule) -> list[str]:
    return [v.name for v in lower(module).prims["fused_add_relu"].scalar_params]


def test_the_fused_kernel_gets_n_as_a_scalar(device: Device) -> None:
    def twice(g: GraphBuilder) -> Any:
        x = g.input("x", (g.symbol("n"),))
        return g.call(Concat(0), x, x)

    module = with_shape_of(twice)
    assert kernels(module) == ["concat", "fused_add_relu"]
    fused = lower(module).prims["fused_add_relu"]
    (n,) = fused.scalar_params
    assert [b.shape for b in fused.buffers] == [(n * 2,)] * 3
    agree(module, device, *[[rand(size), rand(2 * size)] for size in (0, 1, 7, 64)])


def test_products_and_offsets_of_symbols(device: Device) -> None:
    def flat(g: GraphBuilder) -> Any:
        return g.call(Flatten(), g.input("x", (g.symbol("n"), g.symbol("m"))))

    def longer(g: GraphBuilder) -> Any:
        return g.call(Concat(0), g.input("x", (g.symbol("n"),)), g.constant("one", rand(3)))

    def half(g: GraphBuilder) -> Any:
        n = g.symbol("n")
        return g.call(Slice(0, const(0), n // 2), g.input("x", (n,)))

    module = with_shape_of(flat)
    assert fused_scalars(module) == [], "a product of symbols that is used only as a whole is one symbol"
    agree(module, device, *[[rand(a, b), rand(a * b)] for a, b in ((0, 3), (1, 1), (5, 7))])
    module = with_shape_of(longer)
    assert fused_scalars(module) == ["n"]
    agree(module, device, *[[rand(a), rand(a + 3)] for a in (0, 1, 13)])
    module = with_shape_of(half)
    agree(module, device, *[[rand(a), rand(a // 2)] for a in (0, 1, 2, 13)])


# -- one kernel, one binary, every size ----------------------------------------------------------------------------


def test_matmul_bias_relu_is_one_binary(device: Device) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 64))
    w, c = rand(64, 48), rand(48)
    y = g.call(Add(), g.call(Matmul(), x, g.constant("w", w)), g.constant("c", c))
    module = checked(g.finish(g.call(Relu(), y)))
    assert kernels(module) == ["fused_matmul_add_relu"]
    job = device_job(module, device.info, MemoryStore(), QUICK)
    program = job.build("generic").program
    ((name, task_variants),) = job.task_variants.items()
    tuned = [task_variants.program(task_variants.sketch_set.record_of(c)) for c in task_variants.sketch_set.seeds(2)]
    assert [c.name for c in program.calls] == ["relu"] and tuned
    assert all(len(f.kernels) == 1 + len(f.prepare) for f in tuned), (
        f"{name}: one C function besides the packing of weights"
    )
    for which in (program, *tuned):
        executor = Executor(which, device, {"w": w, "c": c, "p1": w, "p2": c})
        compiled_once = dict(executor._kernels)
        for size in (1, 2, 7, 8, 13, 97, 1024, 0, 1):
            a = rand(size, 64)
            (result,) = executor.run([a])
            np.testing.assert_allclose(result, np.maximum(a @ w + c, 0), rtol=1e-4, atol=1e-4)
        assert executor._kernels == compiled_once
        executor.close()


def test_other_epilogues_are_one_kernel_too(device: Device) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 16))
    module = checked(
        g.finish(g.call(Permute((1, 0)), g.call(Tanh(), g.call(Matmul(), x, g.constant("w", rand(16, 9))))))
    )
    assert kernels(module) == ["fused_matmul_tanh_permute"]
    agree(module, device, *[[rand(n, 16)] for n in (0, 1, 7, 97)])
    g = GraphBuilder()
    n = g.symbol("n")
    product = g.call(Matmul(), g.input("x", (n, 16)), g.constant("w", rand(16, 9)))
    y = g.call(Add(), g.input("r", (n, 9)), g.call(Relu(), g.call(Add(), product, g.constant("c", rand(9)))))
    module = checked(g.finish(y))
    assert kernels(module) == ["fused_matmul_add_relu_add"]
    agree(module, device, *[[rand(n, 16), rand(n, 9)] for n in (0, 1, 7, 97)])


def test_two_symbols_make_one_row_symbol(device: Device) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("b"), g.symbol("n"), 16))
    y = g.call(Add(), g.call(Matmul(), x, g.constant("w", rand(16, 9))), g.constant("c", rand(9)))
    module = checked(g.finish(g.call(Relu(), y)))
    (func,) = lower(module).prims.values()
    assert len(func.symbols) == 1 and func.buffers[0].shape == (func.symbols[0], const(16))
    agree(module, device, *[[rand(b, n, 16)] for b, n in ((1, 1), (2, 7), (3, 0), (5, 13))])


# -- pattern kinds from the loops ----------------------------------------------------------------------------------

N, K = Var("n"), Var("k")
KINDS: list[tuple[OperatorSpec, list[Any], PatternKind]] = [
    (Matmul(), [tensor(N, K), tensor(K, 8)], PatternKind.OUT_FUSIBLE),
    (Exp(), [tensor(N, 4)], PatternKind.ELEMENTWISE),
    (Cast(f16), [tensor(N, 4)], PatternKind.ELEMENTWISE),
    (Permute((1, 0)), [tensor(N, 4)], PatternKind.INJECTIVE),
    (BroadcastTo((N, const(4))), [tensor(4)], PatternKind.BROADCAST),
    (Sum((1,)), [tensor(N, 4)], PatternKind.REDUCTION),
    (Take(), [tensor(9, 4), tensor(N, dtype=i64)], PatternKind.INJECTIVE),
    (Take(), [tensor(9), tensor(N, 3, dtype=i32)], PatternKind.INJECTIVE),
]


def test_kinds_are_read_off_the_loops() -> None:
    for op, infos, kind in KINDS:
        func = op.legalize("unnamed", infos, [False] * len(infos), Deduction())
        assert pattern_kind(func) is kind, op.name
        assert "pattern" not in print_text(func), "a kind is nothing that a function declares"


def test_take_fuses_as_a_gather(device: Device) -> None:
    g = GraphBuilder()
    ids = g.input("ids", (g.symbol("n"),), i64)
    rows = g.call(Take(), g.constant("table", rand(9, 4)), ids)
    module = checked(g.finish(g.call(Relu(), g.call(Add(), rows, g.constant("c", rand(4))))))
    assert kernels(module) == ["fused_take_add_relu"]
    assert pattern_kind(lower(module).prims["fused_take_add_relu"]) is PatternKind.INJECTIVE
    agree(module, device, *[[RNG.integers(0, 9, n)] for n in (0, 1, 7)])


def written(name: str, build: Callable[[TensorBuilder], None]) -> PrimFunc:
    b = TensorBuilder(name)
    build(b)
    return b.finish()


def hand_written() -> dict[str, tuple[PrimFunc, PatternKind]]:
    def polynomial(b: TensorBuilder) -> None:
        x, y = b.input("x", (N, 4)), b.output("y", (N, 4))
        b.compute(y, lambda i, j: x[i, j] * x[i, j] + x[i, j] * 3.0)

    def per_row(b: TensorBuilder) -> None:
        x, s, y = b.input("x", (N, 4)), b.input("s", (N,)), b.output("y", (N, 4))
        b.compute(y, lambda i, j: x[i, j] * s[i])

    def backwards(b: TensorBuilder) -> None:
        x, y = b.input("x", (N,)), b.output("y", (N,))
        b.compute(y, lambda i: x[N - 1 - i])

    def lookup(b: TensorBuilder) -> None:
        x, at, y = b.input("x", (9,)), b.input("at", (N,), i64), b.output("y", (N,))
        b.compute(y, lambda i: x[at[i]] * 2.0)

    def largest(b: TensorBuilder) -> None:
        x, y = b.input("x", (N, 4)), b.output("y", (N,))
        b.reduce(y, (4,), const(float("-inf"), f32), lambda acc, i, r: maximum(acc, x[i, r]))

    def weighted(b: TensorBuilder) -> None:  # a sum of products, but neither factor is reused
        x, w, y = b.input("x", (N, 4)), b.input("w", (N, 4)), b.output("y", (N,))
        b.reduce(y, (4,), const(0.0, f32), lambda acc, i, r: acc + x[i, r] * w[i, r])

    def products(b: TensorBuilder) -> None:  # as a convolution reads: windows of x against w
        x, w, y = b.input("x", (N + 2,)), b.input("w", (3, 5)), b.output("y", (N, 5))
        b.reduce(y, (3,), const(0.0, f32), lambda acc, i, j, r: acc + x[i + r] * w[r, j])

    kinds = PatternKind
    expected = (
        (polynomial, kinds.ELEMENTWISE), (per_row, kinds.BROADCAST), (backwards, kinds.INJECTIVE), (lookup, kinds.INJECTIVE),
        (largest, kinds.REDUCTION), (weighted, kinds.REDUCTION), (products, kinds.OUT_FUSIBLE),
    )  # fmt: skip
    return {make.__name__: (written(f"f{i}", make), kind) for i, (make, kind) in enumerate(expected)}


def test_hand_written_functions_have_kinds_too() -> None:
    for name, (func, kind) in hand_written().items():
        assert pattern_kind(func) is kind, name


def test_unclassified_function_is_opaque() -> None:
    module = read("""
        @prim_func(outputs=1)
        def scattered(at: Buffer((n,), i64), x: Buffer((n,), f32), y: Buffer((n,), f32)):
            for i in serial(n):
                with block("y"):
                    vi = spatial(n, i)
                    y[at[vi]] = x[vi]

        @prim_func(outputs=1)
        def part(x: Buffer((n,), f32), y: Buffer((n,), f32)):
            for i in serial(n // 2):
                with block("y"):
                    vi = spatial(n // 2, i)
                    y[vi] = x[vi]

        @prim_func(outputs=2)
        def pair(x: Buffer((n,), f32), y: Buffer((n,), f32), z: Buffer((n,), f32)):
            for i in serial(n):
                with block("y"):
                    vi = spatial(n, i)
                    y[vi] = x[vi]
            for j in serial(n):
                with block("z"):
                    vj = spatial(n, j)
                    z[vj] = x[vj] * 2.0
    """)
    kinds = {n: pattern_kind(f) for n, f in module.functions.items() if isinstance(f, PrimFunc)}
    assert kinds["scattered"] is PatternKind.OPAQUE and kinds["part"] is PatternKind.OPAQUE
