"""Each graph pass: the text before and after it, that it changes something, keeps results, and does not change its own output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.programs import same
from tests.support.random_graphs import ALWAYS_THESE, SIZES, Made, graphs

from relax_tune.errors import DeduceError, UserError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import bool_, f32, i64, u8
from relax_tune.ir.core.expr import Expr, Var, cast, const, eq, le, select
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, CallTIR, Function, GVar, If, TupleValue, Value
from relax_tune.ir.core.graph_walk import nested_values
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.movement import ExpandDims, Flatten, Permute, Reshape, Slice, Split, Take
from relax_tune.ir.op.math.elementwise import Add, Cast, Exp, Mul, MulScalar, Relu, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax, Sum
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.control.inline import Inline
from relax_tune.ir.passes.fusion.fuse import FuseOps
from relax_tune.ir.passes.graph.canonical import Canonicalise
from relax_tune.ir.passes.graph.cleanup import CancelViews, DeadCode, Deduce, TidyNames
from relax_tune.ir.passes.graph.collapse import CollapseDims
from relax_tune.ir.passes.graph.constant_fold import FoldConstants
from relax_tune.ir.passes.graph.cse import CommonSubexpressions
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.passes.graph.push_permutes import PushPermutes
from relax_tune.ir.passes.graph.split_outputs import SeparateOutputs
from relax_tune.ir.passes.memory.inplace import inplace_pairs, with_inplace
from relax_tune.ir.passes.pipeline import Pass, lower, run_passes
from relax_tune.ir.rewrite.emitter import map_graphs
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text

Golden = Callable[[str, str], None]
RNG = np.random.default_rng(3)


def rand(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def tensor(*shape: Any, element: Any = f32) -> TensorInfo:
    return TensorInfo(tuple(d if isinstance(d, Expr) else const(d) for d in shape), element)


def operators(module: IRModule, name: str = "main") -> Counter[str]:
    """Count how often each operator or tensor function is called, inside branches too."""
    f = module.functions[name]
    assert isinstance(f, Function)
    values = list(nested_values(f))
    counts = Counter(v.op.name for v in values if isinstance(v, Call))  # type: ignore[attr-defined]
    return counts + Counter(v.callee for v in values if isinstance(v, CallTIR))


def same_results(before: IRModule, after: IRModule, *inputs: Any) -> None:
    verify(after)
    expected, actual = (run_function(m, "main", list(inputs)) for m in (before, after))
    for w, f in zip(*((x if isinstance(x, tuple) else (x,)) for x in (expected, actual)), strict=True):
        assert w.dtype == f.dtype
        np.testing.assert_allclose(f, w, rtol=1e-5, atol=1e-5)


# goldens: one small program per pass, before and after it


def tidy() -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n, 4))
    pair = g.emit(TupleValue((x, g.emit(x, "alias"))), "pair")
    same = g.match_cast(g.item(pair, 1), tensor(n, 4))
    same = g.call(Permute((1, 0)), g.call(Cast(f32), same))
    same = g.call(Slice(0, const(0), n), g.call(Permute((1, 0)), same))
    return g.finish(g.call(Relu(), g.call(Reshape((n, const(4))), same)))


def repeated() -> IRModule:
    """Equal calls on equal weights with two names, over n * 2 and n + n; one more on a side of a branch."""
    g = GraphBuilder()
    n, w = g.symbol("n"), np.arange(12, dtype=np.float32).reshape(4, 3)
    x, flag = g.input("x", (n * 2, 4)), g.input("flag", (), bool_)
    a, b = (g.call(Matmul(), x, g.constant(name, w.copy())) for name in ("w", "again"))
    a, b = (g.call(Reshape((d, const(3))), v) for d, v in ((n * 2, a), (n + n, b)))
    chosen = g.branch(flag, lambda: g.call(Tanh(), g.call(Matmul(), x, g.constant("third", w))), lambda: a)
    return g.finish(g.call(Add(), g.call(Add(), a, b), chosen))


def weights_only() -> IRModule:
    """A transposed weight, a third of a weight, and a weight unpacked to four times its bytes, which is not folded."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    y = g.call(Matmul(), x, g.call(Permute((1, 0)), g.constant("w", rand(3, 4))))
    parts = g.call(Split(3), g.constant("parts", rand(9)))
    packed = g.constant("packed", RNG.integers(0, 9, (4, 3)).astype(np.uint8))
    b = TensorBuilder("unpack")
    source, out = b.input("source", (4, 3), u8), b.output("out", (4, 3))
    b.compute(out, lambda i, j: cast(source[i, j], f32))
    wide = g.call_tir(g.add(b.finish()), [packed], tensor(4, 3))
    return g.finish(g.call(Add(), g.call(Add(), y, g.item(parts, 1)), g.call(Matmul(), x, wide)))


def branched() -> IRModule:
    """Work on both sides of a branch: dead, foldable and fusible."""
    g = GraphBuilder()
    x, flag = g.input("x", (g.symbol("n"), 4)), g.input("flag", (), bool_)

    def product() -> Value:
        g.call(Exp(), x, hint="unread")
        w = g.call(Permute((1, 0)), g.constant("w", rand(3, 4)))
        return g.call(Relu(), g.call(Add(), g.call(Matmul(), x, w), g.constant("b", rand(3))))

    return g.finish(g.branch(flag, product, lambda: g.call(Slice(1, const(0), const(3)), g.call(Tanh(), x))))


def views() -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n, 2, 3))
    a, b = (g.call(Reshape((n, const(6))), g.call(Reshape((n * 6,)), x)) for _ in range(2))
    return g.finish(g.call(Relu(), g.call(Reshape((n, const(2), const(3))), g.call(Add(), a, b))))


def mixed() -> IRModule:
    """A product with an epilogue, and a reduction with a producer, over two dims that collapse."""
    g = GraphBuilder()
    b, n = g.symbol("b"), g.symbol("n")
    x = g.input("x", (b, n, 4))
    y = g.call(Relu(), g.call(Add(), g.call(Matmul(), x, g.constant("w", rand(4, 3))), g.constant("c", rand(3))))
    return g.finish(g.call(Softmax(), g.call(MulScalar(0.5), y)))


def turned() -> IRModule:
    """A product with a transposed operand, and elementwise work between two permutes that undo each other."""
    g = GraphBuilder()
    n = g.symbol("n")
    x, w = g.input("x", (n, 4)), g.input("w", (3, 4))
    y = g.call(Matmul(), x, g.call(Permute((1, 0)), w))
    back = [g.call(Permute((1, 0)), v) for v in (y, g.call(Relu(), y))]
    return g.finish(g.call(Exp(), g.call(Permute((1, 0)), g.call(Tanh(), g.call(Add(), *back)))))


CALLS = """module(version=1)
n = symbol("n", lower=0)

@function
def doubled(x: Tensor((m, 4), f32)) -> Tensor((m * 2, 4), f32):
    with dataflow():
        y: Tensor((m * 2, 4), f32) = op.concat(x, x, axis=0)
    return y

@function
def main(x: Tensor((n, 4), f32)) -> Tensor((n * 2, 4), f32):
    with dataflow():
        y: Tensor(None, f32, ndim=2) = call("doubled", x)
        z: Tensor(None, f32) = op.relu(y)
    chosen: Tensor(None, f32)
    if prim(n < 0):
        with dataflow():
            pass
        chosen = y
    else:
        with dataflow():
            pass
        chosen = z
    return chosen
"""


def calls() -> IRModule:
    """A call of a function, a branch with a constant condition, and annotations with less than is known."""
    return parse_module(CALLS, OPERATORS)


def two_of_a_kind() -> IRModule:
    """Two sums with different functions that read the two halves of a split."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    left, right = (g.item(g.call(Split(2, 1), x), i) for i in range(2))
    return g.finish(g.call(Add(), g.call(Sum((1,), True), left), g.call(Sum((0,), True), right)))


def dying() -> IRModule:
    """Values whose last use computes a result of the same dims, and one with a later use."""
    g = GraphBuilder()
    n = g.symbol("n")
    exponential = g.call(Exp(), g.input("x", (n, 4)))
    y = g.call(Add(), g.call(Flatten(), g.call(Relu(), exponential)), g.call(Flatten(), exponential))
    return g.finish(g.call(Softmax(), g.call(Reshape((n, const(4))), g.call(Tanh(), y))))


def in_place(module: IRModule) -> IRModule:
    return map_graphs(module, lambda f, _: with_inplace(f, inplace_pairs(f, module)))


PROGRAMS: dict[str, tuple[Callable[[], IRModule], Sequence[Pass]]] = {
    "canonicalise": (tidy, [Canonicalise()]),
    "common_subexpressions": (repeated, [CommonSubexpressions()]),
    "fold_constants": (weights_only, [FoldConstants(), DeadCode()]),
    "inline": (calls, [Inline()]),
    "deduce": (calls, [Deduce()]),
    "separate_outputs": (two_of_a_kind, [Legalize(), SeparateOutputs()]),
    "tidy_names": (two_of_a_kind, [Legalize(), SeparateOutputs(), FuseOps(), DeadCode(), TidyNames()]),
    "push_permutes": (turned, [PushPermutes(), DeadCode()]),
    "branches": (branched, [FoldConstants(), DeadCode(), Legalize(), FuseOps(), DeadCode()]),
    "cancel_views": (views, [CancelViews(), DeadCode()]),
    "legalize": (mixed, [Legalize()]),
    "fuse": (mixed, [Legalize(), FuseOps(), DeadCode()]),
    "inplace": (dying, [Legalize(), in_place]),
    "collapse": (mixed, [Legalize(), FuseOps(), DeadCode(), CollapseDims()]),
}


def arguments(module: IRModule, size: int, flag: bool) -> list[Any]:
    main = module.functions["main"]
    assert isinstance(main, Function)
    args: list[Any] = []
    for p in main.params:
        assert isinstance(p.info, TensorInfo)
        if p.info.dtype is bool_:
            args.append(np.array(flag))
        else:
            dims = [getattr(d, "value", None) for d in p.info.shape or ()]
            twice = "2" in repr(p.info.shape[0] if p.info.shape else "")
            args.append(rand(*((size * 2 if twice else size) if d is None else d for d in dims)))
    return args


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_before_and_after(name: str, golden: Golden) -> None:
    make, passes = PROGRAMS[name]
    before = make()
    stages = run_passes(before, tuple(passes))
    assert len(stages) == len(passes), "a pass did nothing"
    after = stages[-1][1]
    golden(f"passes/{name}.txt", f"# before\n{print_text(before)}\n# after\n{print_text(after)}")
    for size, flag in ((0, True), (1, False), (3, True)):
        args = arguments(before, size, flag)
        for _, stage in stages:
            same_results(before, stage, *args)
    assert passes[-1](after) is after


# common subexpressions: what is shared, and what is not


def test_cse_keeps_impure_host_routines() -> None:
    """Equal calls are shared only if they are declared pure."""
    for pure, calls in ((False, 2), (True, 1)):
        g = GraphBuilder()
        x = g.input("x", (g.symbol("n"),))
        a, b = (g.call_host("tool.count", [x], x.info, pure) for _ in range(2))
        module = g.finish(g.call(Add(), a, b))
        counted = []

        def count(*args: Any, counted: list[Any] = counted) -> Any:
            counted.append(args)
            return args[0] + 1

        after = CommonSubexpressions()(module)
        actual = run_function(after, "main", [rand(3)], hosts={"tool.count": count})
        assert actual.shape == (3,) and len(counted) == calls


def test_each_result_is_computed_by_itself() -> None:
    """A built program writes every result, so none may become an alias of another one or of a weight."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    results = [g.call(Exp(), x), g.call(Exp(), x), g.call(Cast(f32), x), g.call(Relu(), g.constant("w", rand(4)))]
    module = g.finish(results)
    for step in (CommonSubexpressions(), Canonicalise(), FoldConstants()):
        assert step(module) is module


def test_cse_distinguishes_signs_and_types_of_attributes() -> None:
    g = GraphBuilder()
    x = g.input("x", (4,))
    a, b = (g.call(MulScalar(factor), x) for factor in (0.0, -0.0))
    c, d = (g.call(Sum((0,), keep), x) for keep in (True, False))
    module = g.finish(g.call(Add(), g.call(Add(), a, b), g.call(Add(), c, d)))
    assert CommonSubexpressions()(module) is module


def test_cse_shares_large_equal_weights_only() -> None:
    for size, names in ((4, {"w", "v"}), (1 << 14, {"w"})):
        g = GraphBuilder()
        x, w = g.input("x", (g.symbol("n"), size)), rand(size)
        y = g.call(Mul(), g.call(Add(), x, g.constant("w", w)), g.constant("v", w.copy()))
        module = g.finish(y)
        after = DeadCode()(CommonSubexpressions()(module))
        assert set(after.constants) == names
        same_results(module, after, rand(2, size))


def test_cse_repeats_cheap_work_in_each_kernel() -> None:
    """Sharing cheap work would cost a kernel and memory. Equal whole kernels are still shared."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    a, b = (g.call(Softmax(), g.call(MulScalar(0.5), g.call(Exp(), x))) for _ in range(2))
    total = g.call(Sum((1,), True), g.call(Exp(), x))
    module = g.finish(g.call(Add(), g.call(Add(), a, b), total))
    lowered = lower(module)
    assert Counter(c.callee for c in lowered.calls()) == Counter(
        {"fused_exp_mul_scalar_softmax_add_add": 1, "fused_exp_sum": 1}
    )
    same_results(module, lowered.module, rand(3, 4))


def test_canonicalise_drops_branch_with_equal_sides() -> None:
    g = GraphBuilder()
    x, flag = g.input("x", (g.symbol("n"), 4)), g.input("flag", (), bool_)
    y = g.branch(flag, lambda: x, lambda: x)
    module = g.finish(g.call(Relu(), y))
    after = Canonicalise()(module)
    assert not any(isinstance(v, If) for v in nested_values(after.functions["main"]))  # type: ignore[arg-type]
    same_results(module, after, rand(2, 4), np.array(True))


def test_cse_equal_values_across_branch_stay_separate() -> None:
    """A branch and the code after it compute the same value; neither may read the other's."""
    g = GraphBuilder()
    x, flag = g.input("x", (g.symbol("n"), 4)), g.input("flag", (), bool_)
    y = g.branch(flag, lambda: g.call(Exp(), x), lambda: g.call(Relu(), g.call(Exp(), x)))
    module = g.finish(g.call(Add(), y, g.call(Exp(), x)))
    assert CommonSubexpressions()(module) is module


def test_cse_does_not_share_overwritten_values() -> None:
    """A copy that is read after its source is overwritten stays a copy, and so does a copy of that copy."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    b = TensorBuilder("halve")
    k = Var("k")
    source, out = b.input("source", (k, 4)), b.output("out", (k, 4))
    b.compute(out, lambda i, j: source[i, j] * 0.5)
    name = g.add(b.finish())
    first, second = (g.call(Exp(), x) for _ in range(2))
    copy = g.call(Cast(f32), first)
    turned = g.call(Permute((1, 0)), first)
    half = g.call_tir(name, [first], x.info, inplace=(0,))
    y = g.call(Add(), g.call(Add(), second, copy), half)
    y = g.call(Add(), y, g.call(Permute((1, 0)), turned))
    module = g.finish(g.call(Matmul(), y, turned))
    verify(module)
    for step in (CommonSubexpressions(), Canonicalise(), PushPermutes()):
        assert step(module) is module
    for _, stage in lower(module).stages:
        verify(stage)
    same_results(module, lower(module).module, rand(3, 4))


# weights


def decoded(columns: int) -> tuple[GraphBuilder, GVar]:
    """4-bit weights (8, columns), two in a byte, unpacked by a tensor function."""
    g = GraphBuilder()
    b = TensorBuilder("unpack")
    packed, y = b.input("packed", (8, columns // 2), u8), b.output("y", (8, columns))

    def value(i: Expr, j: Expr) -> Expr:
        byte = cast(packed[i, j // 2], i64)
        return cast(select(eq(j % 2, 0), byte % 16, byte // 16), f32)

    b.compute(y, value)
    array = RNG.integers(0, 256, (8, columns // 2)).astype(np.uint8)
    w = g.call_tir(g.add(b.finish()), [g.constant("packed", array)], tensor(8, columns))
    return g, w


def test_fold_keeps_unpacking_and_folds_sums_of_weights() -> None:
    g, w = decoded(12)
    x = g.input("x", (g.symbol("n"), 8))
    turned = g.call(Permute((1, 0)), w)
    y = g.call(Add(), g.call(Matmul(True), x, turned), g.call(Sum((0, 1), False), w))
    module = g.finish(y)
    lowered = lower(module)
    assert sorted(a.nbytes for a in lowered.module.constants.values()) == [4, 48]
    assert [c.callee for c in lowered.calls()] == ["fused_unpack_matmul_add"]
    same_results(module, lowered.module, rand(3, 8))


@pytest.mark.parametrize("inside", [True, False])
def test_fold_constant_index_out_of_range_takes_nearest(inside: bool) -> None:
    """The index is clamped in the same way inside and outside of a branch."""
    g = GraphBuilder()
    x, flag = g.input("x", (3,)), g.input("flag", (), bool_)
    rows = rand(4, 3)
    table, index = g.constant("table", rows), g.constant("index", np.array(9))
    y = g.branch(flag, lambda: x, lambda: g.call(Take(), table, index)) if inside else g.call(Take(), table, index)
    module = g.finish(g.call(Relu(), y))
    after = FoldConstants()(module)
    assert operators(after)["take"] == 0
    for version in (module, after):
        z = run_function(version, "main", [rand(3), np.array(False)])
        np.testing.assert_array_equal(z, np.maximum(rows[3], 0))


def test_fold_of_a_float64_weight_cast_to_float32_has_the_type_of_the_cast() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (3,)), g.constant("w", np.array([0.1, 2.0, 1e300]))
    module = g.finish(g.call(Add(), x, g.call(Cast(f32), w)))
    after = FoldConstants()(module)
    assert operators(after)["cast"] == 0
    assert {a.dtype for a in after.constants.values() if a.size} >= {np.dtype(np.float32)}
    same_results(module, lower(module).module, rand(3))


def test_fold_keeps_attributes_with_symbols() -> None:
    g = GraphBuilder()
    n = g.symbol("n", 0, 2)
    x, w = g.input("x", (n, 2)), g.constant("w", rand(4, 3))
    y = g.call(Matmul(), x, g.call(Slice(0, n, n + 2), w))
    module = g.finish(y)
    assert FoldConstants()(module) is module
    same_results(module, lower(module).module, rand(1, 2))


# random programs

RANDOM: dict[str, tuple[Pass, Sequence[Pass], Sequence[str]]] = {
    "canonicalise": (Canonicalise(), [], ["nothing"]),
    "common subexpressions": (CommonSubexpressions(), [], ["unary", "again"]),
    "fold constants": (FoldConstants(), [], ["weight", "binary"]),
    "push permutes": (PushPermutes(), [Canonicalise()], ["turned"]),
    "dead code": (DeadCode(), [Canonicalise(), CommonSubexpressions(), FoldConstants()], ["unary", "again"]),
    "legalise": (Legalize(), [], ["unary"]),
    "fuse": (FuseOps(), [Legalize()], ["products"]),
    "collapse": (CollapseDims(), [Legalize(), FuseOps()], ["rows"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_graph_pass_random_programs_keep_values(name: str) -> None:
    """Each pass changes at least a quarter of the programs, and a third application changes nothing."""
    step, before_it, start = RANDOM[name]
    fired = []

    @ALWAYS_THESE
    @given(graphs(steps=5, first=start), SIZES, st.integers(0, 9))
    def check(program: Made, sizes: dict[str, int], seed: int) -> None:
        args = program.arguments(sizes, np.random.default_rng(seed))
        try:
            expected = run_function(program.module, "main", args)
            before = run_passes(program.module, (Deduce(), *before_it))
        except (UserError, DeduceError):
            return
        module = before[-1][1] if before else program.module
        after = step(module)
        fired.append(after is not module)
        text = f"{print_text(module)}\n{print_text(after)}"
        verify(after)
        same(run_function(after, "main", args), expected, text, 1e-4)
        settled = step(step(after))
        assert step(settled) is settled, text

    check()
    assert sum(fired) >= 2 and sum(fired) * 4 >= len(fired), fired


def test_calls_inside_branches_become_kernels() -> None:
    lowered = FuseOps()(Legalize()(branched()))
    main = lowered.functions["main"]
    assert isinstance(main, Function)
    (branch,) = (b.value for b in main.bindings if isinstance(b.value, If))
    calls = [b.value.callee for b in branch.then.bindings if isinstance(b.value, CallTIR)]
    assert calls == ["exp", "fused_permute_matmul_add_relu"]


def test_legalize_branch_condition_simplifies_only_same_side() -> None:
    """In the branch with n <= 2, min(n, 2) becomes n."""
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n, 4))
    y = g.branch(le(n, 2), lambda: g.call(Slice(0, const(0), const(2)), x), lambda: g.call(Relu(), x))
    module = g.finish(g.call(Flatten(), g.call(ExpandDims((0,)), y)))
    after = Legalize()(module)
    for size in (0, 1, 2, 3, 5):
        same_results(module, after, rand(size, 4))


def test_passes_do_not_change_lowered_modules() -> None:
    done = lower(mixed()).module
    for step in (Canonicalise(), CommonSubexpressions(), CommonSubexpressions(repeat_spatial=True), FoldConstants()):
        assert step(done) is done
