"""Every rule of every table keeps the meaning of its example, at several sizes and for random inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Function, TupleValue, Value
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.shared import decomposed_ops, recognised_norms, repeated_heads, simplify_broadcasts
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherND
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute, Reshape, Slice, Take
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    Div,
    DivScalar,
    Erf,
    MaximumScalar,
    Mul,
    MulScalar,
    Relu,
    Rsqrt,
    Sqrt,
    Sub,
    Tanh,
)
from relax_tune.ir.op.math.numeric import Cos, Sin
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Mean, Softmax, Sum
from relax_tune.ir.passes.graph import canonical, cleanup, push_permutes
from relax_tune.ir.rewrite.fixpoint import RewriteToFixpoint
from relax_tune.ir.rewrite.movement_rules import PAD_OF_CONCAT
from relax_tune.ir.rewrite.rules import Rule

TABLES = {
    "repeated heads": repeated_heads.RULES,
    "decomposed operators": decomposed_ops.RULES,
    "broadcasts": simplify_broadcasts.RULES,
    "norms": recognised_norms.RULES,
    "canonical forms": canonical.RULES,
    "moves of parts": (PAD_OF_CONCAT,),
    "views": cleanup.VIEW_RULES,
    "permutes": push_permutes.RULES,
}
RULES = list(dict.fromkeys(rule for table in TABLES.values() for rule in table))
SIZES = (1, 2, 5, 7)
Example = Callable[["Builder"], Value]
EXAMPLES: dict[str, Example] = {}


class Builder:
    """Writes the left side of a rule over one symbol `n`."""

    def __init__(self) -> None:
        self.g = GraphBuilder()
        self.n = self.g.symbol("n", 1, 8)

    def input(self, *dims: Any) -> Value:
        return self.g.input(f"x{len(self.g._params)}", dims)

    def __call__(self, op: OperatorSpec, *args: Value) -> Value:
        return self.g.call(op, *args)


def example(rule: str) -> Callable[[Example], Example]:
    """The decorated function builds the left side of `rule`."""

    def add(build: Example) -> Example:
        assert rule not in EXAMPLES
        EXAMPLES[rule] = build
        return build

    return add


def repeated(b: Builder, heads: Value, length: Any) -> Value:
    """Two heads, each three times: (2, 2, length, 4) to (2, 6, length, 4)."""
    wide = b(BroadcastTo((const(2), const(2), const(3), length, const(4))), b(ExpandDims((2,)), heads))
    return b(Reshape((const(2), const(6), length, const(4))), wide)


@example("product over repeated heads")
def _(b: Builder) -> Value:
    keys = b(Permute((0, 1, 3, 2)), repeated(b, b.input(2, 2, b.n, 4), b.n))
    return b(Matmul(), b.input(2, 6, 5, 4), keys)


@example("attention over repeated heads")
def _(b: Builder) -> Value:
    k, v = (repeated(b, b.input(2, 2, 5, 4), const(5)) for _ in range(2))
    return b(Attention(0.5), b.input(2, 6, b.n, 4), k, v, b.input(b.n, 5))


@example("attention over groups of heads")
def _(b: Builder) -> Value:
    q = b(Reshape((const(2), const(2), const(3), b.n, const(4))), b.input(2, 6, b.n, 4))
    scores = b(Reshape((const(2), const(6), b.n, const(5))), b(Matmul(transpose_b=True), q, b.input(2, 2, 1, 5, 4)))
    return b(Matmul(), b(Softmax(), b(MulScalar(0.5), scores)), repeated(b, b.input(2, 2, 5, 4), const(5)))


@example("scale behind scores")
def _(b: Builder) -> Value:
    scores = b(Matmul(), b(DivScalar(0.3), b.input(b.n, 4)), b(MulScalar(0.5), b.input(4, 3)))
    return b(Softmax(), b(Add(), scores, b.input(3)))


@example("product with a transposed value")
def _(b: Builder) -> Value:
    return b(Matmul(), b.input(b.n, 4), b(Permute((1, 0)), b.input(3, 4)))


@example("attention")
def _(b: Builder) -> Value:
    q, k, v = b.input(2, b.n, 4), b.input(2, 5, 4), b.input(2, 5, 4)
    scores = b(MulScalar(0.5), b(Matmul(transpose_b=True), q, k))
    return b(Matmul(), b(Softmax(), b(Add(), scores, b.input(b.n, 5))), v)


@example("view of a view")
def _(b: Builder) -> Value:
    return b(Reshape((const(6), b.n)), b(Reshape((b.n * 6,)), b.input(b.n, 2, 3)))


@example("transposition under merged dims")
def _(b: Builder) -> Value:
    merged = b(Reshape((b.n * 2, const(3), const(4))), b.input(b.n, 2, 3, 4))
    return b(Reshape((b.n, const(2), const(4), const(3))), b(Permute((0, 2, 1)), merged))


@example("gelu")
def _(b: Builder) -> Value:
    x = b.input(b.n, 4)
    tail = b(AddScalar(1.0), b(Erf(), b(MulScalar(0.5**0.5), x)))
    return b(MulScalar(0.5), b(Mul(), x, tail))


@example("gelu by tanh")
def _(b: Builder) -> Value:
    x = b.input(b.n, 4)
    cube = b(MulScalar(0.044715), b(Mul(), b(Mul(), x, x), x))
    tail = b(AddScalar(1.0), b(Tanh(), b(MulScalar((2 / np.pi) ** 0.5), b(Add(), x, cube))))
    return b(MulScalar(0.5), b(Mul(), x, tail))


@example("product under merged dims")
def _(b: Builder) -> Value:
    rng = np.random.default_rng(0)
    w, bias = (b.g.constant(n, rng.random(shape, np.float32)) for n, shape in (("w", (4, 3)), ("bias", (3,))))
    flat = b(Matmul(), b(Reshape((b.n * 2, const(4))), b.input(b.n, 2, 4)), w)
    return b(Reshape((b.n, const(2), const(3))), b(Add(), flat, bias))


@example("layer norm")
def _(b: Builder) -> Value:
    x = b.input(b.n, 4)
    centred = b(Sub(), x, b(Mean((-1,), True), x))
    variance = b(AddScalar(1e-5), b(Mean((-1,), True), b(Mul(), centred, centred)))
    scaled = b(Mul(), b(Div(), centred, b(Sqrt(), variance)), b.input(4))
    return b(Add(), b.input(4), scaled)


@example("l2 normalize")
def _(b: Builder) -> Value:
    x = b.input(b.n, 4)
    root = b(Sqrt(), b(Sum((-1,), True), b(Mul(), x, x)))
    return b(Div(), x, b(BroadcastTo((b.n, const(4))), b(MaximumScalar(1e-6), root)))


@example("mean pool")
def _(b: Builder) -> Value:
    x, mask = b.input(2, b.n, 4), b.input(2, b.n)
    wide = b(ExpandDims((2,)), b(MaximumScalar(0.0), mask))
    return b(Div(), b(Sum((1,)), b(Mul(), x, wide)), b(MaximumScalar(0.25), b(Sum((1,)), wide)))


@example("attention with a broadcast mask")
def _(b: Builder) -> Value:
    q, k, v = b.input(2, b.n, 4), b.input(2, 5, 4), b.input(2, 5, 4)
    mask = b(BroadcastTo((const(2), b.n, const(5))), b.input(b.n, 5))
    return b(Attention(0.5, hides_rows=False), q, k, v, mask)


@example("elementwise work behind a view")
def _(b: Builder) -> Value:
    return b(Relu(), b(ExpandDims((1,)), b.input(b.n, 4)))


@example("elementwise work behind a broadcast")
def _(b: Builder) -> Value:
    return b(Add(), b(BroadcastTo((const(3), b.n, const(4))), b.input(b.n, 4)), b.input(4))


@example("counted rows")
def _(b: Builder) -> Value:
    return b(Mul(), b(Take(), b.input(8, 3), b(Iota(b.n))), b.input(b.n, 3))


@example("counted grid")
def _(b: Builder) -> Value:
    wide = BroadcastTo((b.n, const(3), const(1)))
    i, j = b(wide, b(ExpandDims((1, 2)), b(Iota(b.n)))), b(wide, b(ExpandDims((0, 2)), b(Iota(const(3)))))
    return b(Relu(), b(GatherND(), b.input(3, b.n), b(Concat(2), j, i)))


@example("slice of a counter")
def _(b: Builder) -> Value:
    return b(Mul(), b(Cast(f32), b(Slice(0, const(0), b.n), b(Iota(const(8))))), b.input(b.n))


@example("rms norm")
def _(b: Builder) -> Value:
    x = b.input(b.n, 4)
    spread = b(AddScalar(1e-5), b(Mean((1,), True), b(Mul(), x, x)))
    return b(Mul(), b(Mul(), x, b(Rsqrt(), spread)), b.input(4))


@example("rotary positions")
def _(b: Builder) -> Value:
    x = b.input(1, 2, b.n, 6)
    half = b(Mul(), b(Cast(f32), b(ExpandDims((1,)), b(Iota(b.n)))), b.input(1, 3))
    angles = b(Concat(1), half, half)
    first, second = (b(Slice(3, const(i), const(i + 3)), x) for i in (0, 3))
    turned = b(Concat(3), b(MulScalar(-1.0), second), first)
    return b(Add(), b(Mul(), x, b(Cos(), angles)), b(Mul(), turned, b(Sin(), angles)))


@example("permute of a permute")
def _(b: Builder) -> Value:
    return b(Permute((1, 2, 0)), b(Permute((2, 0, 1)), b.input(b.n, 2, 3)))


@example("permutes that a later one undoes")
def _(b: Builder) -> Value:
    x, y = (b(Permute((1, 0)), b.input(b.n, 4)) for _ in range(2))
    return b(Permute((1, 0)), b(Mul(), b(Relu(), x), y))


@example("item of a tuple")
def _(b: Builder) -> Value:
    return b(Relu(), b.g.item(b.g.emit(TupleValue((b.input(b.n), b.input(4)))), 1))


@example("tuple of all items")
def _(b: Builder) -> Value:
    pair = b.g.emit(TupleValue((b.input(b.n), b.input(4))))
    again = b.g.emit(TupleValue((b.g.item(pair, 0), b.g.item(pair, 1))))
    return b(Relu(), b.g.item(again, 0))


@example("identity permute")
def _(b: Builder) -> Value:
    return b(Relu(), b(Permute((0, 1)), b.input(b.n, 4)))


@example("cast to the same dtype")
def _(b: Builder) -> Value:
    return b(Relu(), b(Cast(f32), b.input(b.n, 4)))


@example("concat of one")
def _(b: Builder) -> Value:
    return b(Relu(), b(Concat(0), b.input(b.n, 4)))


@example("pad of a concat")
def _(b: Builder) -> Value:
    joined = b(Concat(0), b(Relu(), b.input(b.n, 4)), b.input(2, 4))
    return b(Relu(), b(Pad((const(0), const(1)), (const(0), const(2)), value=3.0), joined))


@example("unchanged dims")
def _(b: Builder) -> Value:
    return b(Relu(), b(Slice(0, const(0), b.n), b(Reshape((b.n, const(4))), b.input(b.n, 4))))


@example("transposed operand")
def _(b: Builder) -> Value:
    return b(Matmul(transpose_b=True), b.input(b.n, 4), b(Permute((0, 1)[::-1]), b.input(4, 3)))


def left_side(rule: Rule) -> IRModule:
    assert rule.title in EXAMPLES, f"rule {rule.title!r} has no example: add one to EXAMPLES"
    b = Builder()
    return b.g.finish(EXAMPLES[rule.title](b))


def arguments(module: IRModule, n: int, rng: np.random.Generator) -> list[Any]:
    main = module.functions["main"]
    assert isinstance(main, Function)
    result = []
    for p in main.params:
        assert isinstance(p.info, TensorInfo) and p.info.shape is not None
        dims = [n if isinstance(d, Var) else d.value for d in p.info.shape]  # type: ignore[attr-defined]
        result.append(rng.standard_normal(dims).astype(np.float32))
    return result


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.title)
def test_rule_example_rewritten_keeps_values(rule: Rule) -> None:
    before = left_side(rule)
    after = RewriteToFixpoint((rule,))(before)
    assert after is not before, "the rule does not match its example"
    verify(after)
    for n in SIZES:
        args = arguments(before, n, np.random.default_rng(n))
        expected, actual = (run_function(m, "main", args) for m in (before, after))
        np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.title)
def test_rule_description_has_equation(rule: Rule) -> None:
    assert " = " in rule.equation


def test_rule_titles_are_distinct() -> None:
    titles = [rule.title for rule in RULES]
    assert len(titles) == len(set(titles))


def test_rule_examples_cover_every_rule() -> None:
    assert EXAMPLES.keys() == {rule.title for rule in RULES}
