"""Pattern kinds, legalisation and fusion on small symbolic graphs: what fuses, and that results stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import BuildError
from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f32, i64, u8
from relax_tune.ir.core.expr import Expr, Var, cast, const, eq, select
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import Binding, Call, CallTIR, GVar
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.deduce.pattern_kinds import PatternKind, pattern_kind
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp import run_prim
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.interp.reference import evaluate_function, evaluate_prim
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, Permute, Reshape, Slice, Take
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Exp, Gelu, Mul, MulScalar, Relu
from relax_tune.ir.op.math.logic import Less, Where
from relax_tune.ir.op.neural.resize import Resize
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Softmax, Sum
from relax_tune.ir.op.reduction.scan import ArgMax, TopK
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.fusion.fuse import FuseOps
from relax_tune.ir.passes.graph.cleanup import CancelViews, DeadCode, Deduce
from relax_tune.ir.passes.graph.collapse import CollapseDims
from relax_tune.ir.passes.graph.constant_fold import FoldConstants
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.passes.pipeline import LoweredModule, lower
from relax_tune.ir.text.parser import parse_text
from relax_tune.ir.text.printer import print_text

RNG = np.random.default_rng(3)


def rand(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def tensor(*shape: Any, element: Any = f32) -> TensorInfo:
    return TensorInfo(tuple(d if isinstance(d, Expr) else const(d) for d in shape), element)


def same_results(before: IRModule, after: IRModule, *inputs: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(
        evaluate_function(after, inputs), evaluate_function(before, inputs), rtol=1e-6, atol=1e-6
    )


def kernels(lowered: LoweredModule) -> list[str]:
    return [c.callee for c in lowered.calls()]


n, k = Var("n"), Var("k")
KINDS: list[tuple[OperatorSpec, list[TensorInfo], PatternKind]] = [
    (Exp(), [tensor(n, 4)], PatternKind.ELEMENTWISE),
    (Cast(i64), [tensor(n, 4)], PatternKind.ELEMENTWISE),
    (Add(), [tensor(n, 4), tensor(n, 4)], PatternKind.ELEMENTWISE),
    (Add(), [tensor(n, 4), tensor(4)], PatternKind.BROADCAST),
    (BroadcastTo((n, const(4))), [tensor(4)], PatternKind.BROADCAST),
    (Permute((1, 0)), [tensor(n, 4)], PatternKind.INJECTIVE),
    (Take(), [tensor(9, 4), tensor(n, element=i64)], PatternKind.INJECTIVE),
    (Sum((1,)), [tensor(n, 4)], PatternKind.REDUCTION),
    (Softmax(), [tensor(n, 4)], PatternKind.REDUCTION),
    (LayerNorm(), [tensor(n, 4), tensor(4), tensor(4)], PatternKind.REDUCTION),
    (Matmul(), [tensor(n, k), tensor(k, 8)], PatternKind.OUT_FUSIBLE),
    (Matmul(True), [tensor(2, n, k), tensor(2, n, k)], PatternKind.OUT_FUSIBLE),
    (Conv((1, 1), (1, 1)), [tensor(n, 4, k, k), tensor(6, 4, 3, 3)], PatternKind.OUT_FUSIBLE),
    (Conv((1, 1), (1, 1), 2), [tensor(n, 4, k, k), tensor(6, 2, 3, 3)], PatternKind.OUT_FUSIBLE),
    (Conv((1,), (1,), 4), [tensor(n, 4, k), tensor(4, 1, 3)], PatternKind.OUT_FUSIBLE),
    (Conv((1,), (1,), 4), [tensor(n, 4, k), tensor(4, 1, 1)], PatternKind.REDUCTION),
    (Concat(0), [tensor(n), tensor(n)], PatternKind.OPAQUE),
]


@pytest.mark.parametrize("case", KINDS, ids=lambda c: f"{c[0].name}-{c[2].name}")
def test_pattern_kind_follows_the_loops(case: tuple[OperatorSpec, list[TensorInfo], PatternKind]) -> None:
    op, infos, kind = case
    assert pattern_kind(op.legalize("f", infos)) is kind


def feed_forward(width: int = 6, inner: int = 10) -> IRModule:
    g = GraphBuilder()
    b, m = g.symbol("b", 1, 4), g.symbol("n", 1, 64)
    x = g.input("x", (b, m, width))
    w = [g.constant(f"w{i}", rand(*s)) for i, s in enumerate(((width, inner), (inner,), (inner, width), (width,)))]
    h = g.call(Gelu(), g.call(Add(), g.call(Matmul(), x, w[0]), w[1]))
    y = g.call(Add(), g.call(Add(), g.call(Matmul(), h, w[2]), w[3]), x)
    return g.finish(g.call(LayerNorm(1e-6), y, g.constant("gamma", rand(width)), g.constant("beta", rand(width))))


def attention(heads: int = 2, size: int = 3) -> IRModule:
    g = GraphBuilder()
    b, m = g.symbol("b", 1, 4), g.symbol("n", 1, 64)
    split = Reshape((b, m, const(heads), const(size)))
    parts = [g.call(split, g.input(p, (b, m, heads * size))) for p in "qkv"]
    q, key, v = (g.call(Permute((0, 2, 1, 3)), p) for p in parts)
    bias = g.input("bias", (b, 1, 1, m))
    scores = g.call(Add(), g.call(MulScalar(0.5), g.call(Matmul(True), q, key)), bias)
    y = g.call(Permute((0, 2, 1, 3)), g.call(Matmul(), g.call(Softmax(), scores), v))
    return g.finish(g.call(Reshape((b, m, const(heads * size))), y))


def test_feed_forward_becomes_three_kernels_over_rows() -> None:
    module = feed_forward()
    lowered = lower(module)
    assert kernels(lowered) == ["fused_matmul_add_gelu", "fused_matmul_add_add", "layer_norm"]
    for f in lowered.prims.values():
        assert len(f.symbols) == 1 and not f.scalar_params
        assert all(len(buffer.shape) <= 2 for buffer in f.buffers)
    assert [c.name for c in lowered.prims["fused_matmul_add_gelu"].consts] == ["b", "y"]
    for b, m in ((1, 1), (2, 7), (3, 13)):
        same_results(module, lowered.module, rand(b, m, 6))


def test_attention_keeps_no_transpose() -> None:
    module = attention()
    lowered = lower(module)
    assert len(kernels(lowered)) == 3
    assert [pattern_kind(lowered.prims[c]) for c in kernels(lowered)] == [
        PatternKind.OUT_FUSIBLE,
        PatternKind.REDUCTION,
        PatternKind.OUT_FUSIBLE,
    ]
    for b, m in ((1, 1), (2, 5)):
        same_results(module, lowered.module, *(rand(b, m, 6) for _ in range(3)), rand(b, 1, 1, m))


def test_fused_functions_agree_with_the_interpreter() -> None:
    for f in {**lower(feed_forward()).prims, **lower(attention()).prims}.values():
        sizes = {v: s for v, s in zip(f.symbols, (2, 3, 5), strict=False)}
        arrays = [rand(*(sizes.get(d, getattr(d, "value", 0)) for d in b.shape)) for b in f.buffers]  # type: ignore[call-overload]
        run_prim(f, arrays)
        (expected,) = evaluate_prim(f, arrays[:-1])
        np.testing.assert_allclose(arrays[-1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 13, 97])
def test_matmul_bias_relu_is_one_kernel_for_every_size(rows: int) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 64))
    y = g.call(Add(), g.call(Matmul(), x, g.constant("w", rand(64, 8))), g.constant("c", rand(8)))
    module = g.finish(g.call(Relu(), y))
    lowered = lower(module)
    assert kernels(lowered) == ["fused_matmul_add_relu"]
    same_results(module, lowered.module, rand(rows, 64))


def test_a_symbol_no_buffer_shows_becomes_a_scalar() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"),))
    both = g.call(Concat(0), x, x)
    y = g.input("y", both.info.shape)  # type: ignore[union-attr]
    module = g.finish(g.call(Relu(), g.call(Add(), both, y)))
    lowered = lower(module)
    assert kernels(lowered) == ["concat", "fused_add_relu"]
    fused = lowered.prims["fused_add_relu"]
    assert [v.name for v in fused.scalar_params] == ["n"]
    for size in (0, 1, 5):
        same_results(module, lowered.module, rand(size), rand(2 * size))


def padded_concat(enlarged: bool, around: int = 1, axis: int = 0) -> IRModule:
    """Pad the concatenation along `axis` of relu(y) with x (2, n, 3), which is `enlarged` to n * 2 rows or not."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 8)
    x, rows = g.input("x", (2, n, 3)), n * 2 if enlarged else n
    y = g.input("y", (2, rows, 3))
    if enlarged:
        x = g.call(Resize((1,), (rows,), (const(1),), (const(0),), (const(2),), kernel="nearest"), x)
    else:
        x = g.call(AddScalar(1.0), x)
    both = g.call(Concat(axis), x, g.call(Relu(), y))
    none, width = const(0), const(around)
    return g.finish(g.call(Pad((none, width, none), (none, width, none), value=2.0), both))


@pytest.mark.parametrize(
    "module,expected",
    [
        (padded_concat(False), ["fused_add_scalar_relu_pad_pad_concat"]),
        (padded_concat(True), ["fused_resize_pad", "fused_relu_pad_concat"]),
        (padded_concat(False, axis=1), ["fused_add_scalar_relu_concat", "pad"]),
    ],
    ids=["moved and computed parts", "resampled part is not fused", "pad along the joined axis stays"],
)
def test_concat_of_computed_values_pads_and_computes_parts(module: IRModule, expected: list[str]) -> None:
    lowered = lower(module)
    assert kernels(lowered) == expected
    for n in (1, 2, 7):
        rows = n * 2 if "fused_resize_pad" in expected else n
        same_results(module, lowered.module, rand(2, n, 3), rand(2, rows, 3))


def test_concat_with_a_parameter_is_not_fused() -> None:
    g = GraphBuilder()
    n = g.symbol("n", 1, 8)
    cache, new = g.input("cache", (n, 3)), g.call(Relu(), g.input("new", (2, 3)))
    lowered = lower(g.finish(g.call(Concat(0), cache, new)))
    assert kernels(lowered) == ["relu", "concat"]


def unpack() -> PrimFunc:
    """A (k, j) f32 array unpacked from 4-bit values, two in a byte, times a scale per row."""
    b = TensorBuilder("unpack")
    packed = b.input("packed", (8, 3), u8)
    scale = b.input("scale", (8,))
    y = b.output("y", (8, 6))

    def value(i: Expr, j: Expr) -> Expr:
        byte = cast(packed[i, j // 2], i64)
        return cast(select(eq(j % 2, 0), byte % 16, byte // 16), f32) * scale[i]

    b.compute(y, value)
    return b.finish()


def test_fuse_unpacking_joins_matmul() -> None:
    g = GraphBuilder()
    rows = g.symbol("n")
    x = g.input("x", (rows, 8))
    callee = g.add(unpack())
    packed, scale = RNG.integers(0, 256, (8, 3)).astype(np.uint8), rand(8)
    w = g.call_tir(callee, (g.constant("packed", packed), g.constant("scale", scale)), tensor(8, 6))
    module = g.finish(g.call(Relu(), g.call(Matmul(), x, w)))
    lowered = lower(module)
    assert kernels(lowered) == ["fused_unpack_matmul_relu"]
    assert pattern_kind(lowered.prims["fused_unpack_matmul_relu"]) is PatternKind.OUT_FUSIBLE
    a = rand(5, 8)
    full = np.stack([packed & 15, packed >> 4], axis=-1).reshape(8, 6) * scale[:, None]
    np.testing.assert_allclose(evaluate_function(lowered.module, [a]), np.maximum(a @ full, 0), rtol=1e-4, atol=1e-4)


def test_costly_work_is_not_fused_into_a_matmul() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 8))
    module = g.finish(g.call(Matmul(), g.call(Exp(), x), g.constant("w", rand(8, 6))))
    assert len(kernels(lower(module))) == 2


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 9])
def test_fuse_convolution_reads_windows_of_computed_values(groups: int, size: int) -> None:
    """An element is read through many windows: neither its padding nor its computation is repeated for each."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4, size, size))
    around = (const(0), const(0), const(1), const(1))
    w = g.constant("w", rand(4, 4 // groups, 3, 3))
    module = g.finish(
        g.call(Relu(), g.call(Conv((1, 1), (1, 1), groups), g.call(Pad(around, around), g.call(Exp(), x)), w))
    )
    assert kernels(lower(module)) == ["fused_exp_pad", "fused_conv_relu"]


def test_fuse_weighted_resampling_keeps_work_around() -> None:
    g = GraphBuilder()
    x = g.call(Relu(), g.input("x", (g.symbol("n"), 8, 9)))
    op = Resize((2,), (const(5),), (const(9),), (const(2),), (const(5),), wide=(const(9),), narrow=(const(5),))
    module = g.finish(g.call(Relu(), g.call(op, x)))
    assert len(kernels(lower(module))) == 1


def test_a_value_with_two_readers_ends_a_group() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    h = g.call(Matmul(), x, g.constant("w", rand(4, 4)))
    y = g.call(Relu(), h)
    module = g.finish((y, h))
    assert kernels(lower(module)) == ["matmul", "relu"]


def test_two_matmuls_never_fuse() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    a, b = (g.call(Matmul(), x, g.constant(c, rand(4, 4))) for c in "ab")
    module = g.finish(g.call(Add(), a, b))
    lowered = lower(module)
    assert len(kernels(lowered)) == 2
    same_results(module, lowered.module, rand(3, 4))


def test_diamonds_fuse_and_stay_right() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    e = g.call(Exp(), x)
    module = g.finish(g.call(Add(), g.call(Relu(), e), g.call(MulScalar(2.0), e)))
    lowered = lower(module)
    assert len(kernels(lowered)) == 1
    same_results(module, lowered.module, rand(3, 4))


def test_passes_return_unchanged_modules() -> None:
    done = lower(feed_forward()).module
    passes = (Deduce(), FoldConstants(), DeadCode(), Legalize(), FuseOps(), CollapseDims(), CancelViews())
    for step in passes:
        assert step(done) is done, step


def test_lowering_is_the_same_every_time() -> None:
    first, second = lower(feed_forward()), lower(feed_forward())
    for a, b in zip(first.prims.values(), second.prims.values(), strict=True):
        assert structural_equal(a, b) and a.name == b.name


def test_constants_fold() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    w = rand(3, 4)
    module = g.finish(g.call(Matmul(), x, g.call(Permute((1, 0)), g.constant("w", w))))
    folded = DeadCode()(FoldConstants()(module))
    assert [a.shape for a in folded.constants.values()] == [(4, 3)]
    same_results(module, folded, rand(2, 4))


def test_partial_lowering_keeps_the_meaning() -> None:
    module = feed_forward()
    steps = (Legalize(), CollapseDims(), FuseOps(), CancelViews())
    for step in steps:
        new = step(module)
        same_results(module, new, rand(2, 3, 6))
        module = new


def test_lower_refuses_unknown_dims() -> None:
    g = GraphBuilder()
    x = g.input("x", None)
    module = g.finish(g.call(Exp(), x, hint="power"))
    with pytest.raises(BuildError, match=r"power.*match_cast"):
        lower(module)
    left = [b for b in Legalize()(module).functions["main"].bindings]  # type: ignore[union-attr]
    assert isinstance(left[0], Binding) and isinstance(left[0].value, Call)


def test_fuse_groups_products_with_elementwise_consumers() -> None:
    groups = FuseOps().groups(Legalize()(feed_forward()))
    assert [[v.name for v in g] for g in groups] == [["matmul", "add", "gelu"], ["matmul_1", "add_1", "add_2"]]
    assert all(isinstance(v, GVar) for g in groups for v in g)


def test_graph_holds_only_calls_and_views_after_lowering() -> None:
    for b in lower(attention()).functions["main"].bindings:
        assert isinstance(b.value, CallTIR) or (isinstance(b.value, Call) and isinstance(b.value.op, Reshape))


@pytest.mark.parametrize("make", [feed_forward, attention])
def test_every_stage_is_well_formed_and_reads_back(make: Callable[[], IRModule]) -> None:
    module = make()
    for name, stage in lower(module).stages:
        verify(stage)
        back = parse_text(print_text(stage), operators=OPERATORS, constants=stage.constants)
        assert structural_equal(back, stage), name


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_fuse_part_of_product_stays_inside_buffer(axes: tuple[int, int]) -> None:
    g = GraphBuilder()
    x, w = g.input("x", (g.symbol("n"), 3)), g.input("w", (3, g.symbol("m")))
    part = g.call(Slice(1, const(0), const(4)), g.call(Matmul(), x, w))
    module = g.finish(part if axes == (0, 1) else g.call(Permute(axes), part))
    lowered = lower(module)
    for n, m in ((2, 8), (3, 4), (1, 2), (0, 9)):
        actual = run_function(lowered.module, "main", [a := rand(n, 3), b := rand(3, m)])
        np.testing.assert_allclose(actual, (a @ b)[:, :4].transpose(axes), rtol=1e-5)


def test_fused_modules_under_the_interpreter() -> None:
    module = feed_forward()
    x = rand(2, 3, 6)
    actual = run_function(lower(module).module, "main", [x])
    np.testing.assert_allclose(actual, run_function(module, "main", [x]), rtol=1e-4, atol=1e-5)


def compared_with_itself(rest: Sequence[OperatorSpec], of: OperatorSpec) -> list[str]:
    """The kernels of `rest` applied to x * y, followed by `of`, which compares elements."""
    g = GraphBuilder()
    m = g.symbol("n", 1, 64)
    x = g.call(Mul(), g.input("x", (m, 8)), g.input("y", (m, 8)))
    for op in rest:
        x = g.call(op, x)
    return kernels(lower(g.finish(g.call(of, x))))


@pytest.mark.parametrize("of", [TopK(const(3), 1), ArgMax(1)], ids=lambda o: o.name)
def test_values_compared_with_copies_are_computed_once(of: OperatorSpec) -> None:
    assert compared_with_itself((AddScalar(1.0),), of) == ["fused_mul_add_scalar", of.name]
    assert compared_with_itself((), of) == ["mul", of.name]
    assert compared_with_itself((Relu(),), of) == ["fused_mul_relu", of.name]


@pytest.mark.parametrize("op", [Permute((1, 0)), Relu()], ids=lambda o: o.name)
def test_moved_values_fuse_with_comparisons(op: OperatorSpec) -> None:
    g = GraphBuilder()
    x = g.call(op, g.input("x", (g.symbol("n", 4, 64), 8)))
    assert kernels(lower(g.finish(g.call(TopK(const(3), 1), x)))) == [f"fused_{op.name}_top_k"]


def test_masks_of_one_copy_fuse() -> None:
    g = GraphBuilder()
    x = g.call(AddScalar(1.0), g.call(MulScalar(3.0), g.input("x", (g.symbol("n", 1, 64), 8))))
    y = g.call(Where(), g.call(Less(), x, g.call(MulScalar(2.0), x)), x, g.call(MulScalar(0.5), x))
    assert len(kernels(lower(g.finish(y)))) == 1
