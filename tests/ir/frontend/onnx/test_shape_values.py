"""Shapes that ONNX nodes compute from constants and sizes, by operators of every kind, against onnx's own evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model, reference
from tests.support.effort import thinned

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function

RNG = np.random.default_rng(11)

CONSTANTS = """int64[4] p = {0, 1, 2, 3}, int64[2] q = {2, 3}, int64[1] one = {1}, int64[1] two = {2}, int64 zero = {0},
  int64[1] more = {-1}, int64[2] pairs = {2, 2}, int64[2, 1] rows = {1, 0}, int32[2] small = {2, -3},
  float half = {0.5}, float three = {3.0}, float double = {2.0}, int64[2, 2] grid = {3, 1, 1, 2}, bool[2] mask = {1, 0}"""

OF_CONSTANTS: list[tuple[str, str]] = [
    ("Transpose", "t = Reshape(p, pairs) u = Transpose<perm = [1, 0]>(t) pads = Reshape(u, more)"),
    ("ConstantOfShape", "k = Concat<axis = 0>(two, two) t = ConstantOfShape<value = int64[1] {1}>(k) pads = Reshape(t, more)"),
    ("Expand", "k = Add(one, two) e = Add(k, one) pads = Expand(two, e)"),
    ("Tile", "pads = Tile(q, two)"),
    ("Split", "a, b = Split(p, pairs) pads = Concat<axis = 0>(b, a)"),
    ("Split_in_half", "a, b = Split<num_outputs = 2>(p) pads = Concat<axis = 0>(b, a)"),
    ("Abs", "n = Neg(p) pads = Abs(n)"),
    ("Abs_of_int32", "n = Abs(small) m = Cast<to = 7>(n) pads = Concat<axis = 0>(m, q)"),
    ("ScatterElements", "pads = ScatterElements(p, q, pairs)"),
    ("ScatterElements_add", 'pads = ScatterElements<reduction = "add">(p, q, pairs)'),
    ("ScatterND", "i = Unsqueeze(q, more) pads = ScatterND(p, i, pairs)"),
    ("GatherND", "g = GatherND(p, rows) pads = Concat<axis = 0>(g, q)"),
    ("GatherElements", "g = GatherElements(p, q) pads = Concat<axis = 0>(q, g)"),
    ("sequence", "s = SequenceConstruct(q, two, one) pads = ConcatFromSequence<axis = 0>(s)"),
    ("sequence_new_axis",
     "s = SequenceConstruct(one, two, one, two) t = ConcatFromSequence<axis = 0, new_axis = 1>(s) pads = Reshape(t, more)"),
    ("SplitToSequence", "s = SplitToSequence<axis = 0, keepdims = 0>(p) a = SequenceAt(s, zero) b = Unsqueeze(a, more) "
     "pads = Concat<axis = 0>(b, two, q)"),
    ("ReverseSequence", "b = Unsqueeze(p, more) k = Size(p) l = Reshape(k, more) r = ReverseSequence<batch_axis = 1, time_axis = 0>(b, l) "
     "pads = Reshape(r, more)"),
    ("CumSum", "pads = CumSum(p, zero)"),
    ("ReduceSum", "r = ReduceSum<keepdims = 0>(grid, one) pads = Concat<axis = 0>(r, q)"),
    ("ReduceMax", "r = ReduceMax<keepdims = 0>(grid, one) pads = Concat<axis = 0>(r, q)"),
    ("ReduceProd", "r = ReduceProd<keepdims = 0>(grid, one) pads = Concat<axis = 0>(r, q)"),
    ("NonZero", "n = NonZero(p) m = Reshape(n, more) pads = Concat<axis = 0>(m, two)"),
    ("Compress", "c = Compress(q, mask) pads = Concat<axis = 0>(c, q, two)"),
    ("Where", "w = Where(mask, q, small64) pads = Concat<axis = 0>(w, q)"),
    *((f"Unique_{k}", f"k = Reshape(grid, more) u, first, place, count = Unique<sorted = {k}>(k) m = ReduceMax(count) n = ReduceSum(first) "
       "e = Mul(place, m) d = Add(e, n) l = Gather(u, zero) pads = Sub(d, l)") for k in (0, 1)),
    ("TopK", "v, i = TopK(p, two) pads = Concat<axis = 0>(i, v)"),
    ("ArgMax", "a = ArgMax<axis = 1, keepdims = 0>(grid) pads = Concat<axis = 0>(a, q)"),
    ("MatMul", "f = MatMul(grid, q) pads = Concat<axis = 0>(f, q)"),
    ("OneHot", "h = OneHot(zero, depth, pairs) pads = Concat<axis = 0>(h, h)"),
    ("Trilu", "t = Trilu(grid) pads = Reshape(t, more)"),
    ("Clip", "pads = Clip(p, zero, zero)"),
    ("Sqrt", "f = Cast<to = 1>(p) g = Sqrt(f) pads = Cast<to = 7>(g)"),
    ("Round", "f = Cast<to = 1>(p) g = Mul(f, half) h = Round(g) pads = Cast<to = 7>(h)"),
    ("Pow", "pads = Pow(p, two)"),
    ("int32", "a = Cast<to = 6>(p) b = Mul(a, a) c = Sub(b, a) pads = Cast<to = 7>(c)"),
    ("uint8", "a = Cast<to = 2>(p) b = Add(a, a) pads = Cast<to = 7>(b)"),
    ("bool", "a = Cast<to = 9>(p) b = Not(a) pads = Cast<to = 7>(b)"),
]  # fmt: skip


def f(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("body", [b for _, b in OF_CONSTANTS], ids=[n for n, _ in OF_CONSTANTS])
def test_load_onnx_pads_computed_from_constants_are_known(body: str) -> None:
    more = "int64[2] small64 = {4, 1}, int64 depth = {2}"
    text = f"(float[n, m] x) => (float[a, b] y) <{CONSTANTS}, {more}> {{ {body} y = Pad(x, pads) }}"
    check(model(text), [f(3, 5)])


OF_SIZES: list[tuple[str, str]] = [
    ("Transpose", "a = Concat<axis = 0>(s, p) b = Reshape(a, pairs3) c = Transpose(b) d = Reshape(c, more) "
     "e = Slice(d, zeros, two) y = Expand(x1, e)"),
    ("Expand", "n = Gather(s, zero) e = Expand(n, two) y = Expand(x1, e)"),
    ("Tile", "n = Slice(s, zeros, one) t = Tile(n, two) y = Expand(x1, t)"),
    ("Split", "a, b = Split<num_outputs = 2>(s) t = Concat<axis = 0>(b, a) y = Expand(x1, t)"),
    ("Split_sizes", "c = Concat<axis = 0>(s, q) a, b = Split(c, thirds) y = Expand(x1, b)"),
    ("Abs", "n = Neg(s) t = Abs(n) y = Expand(x1, t)"),
    ("Abs_of_either_sign", "n = Sub(s, q) t = Abs(n) u = Add(t, one) y = Expand(x1, u)"),
    ("ScatterElements", "t = ScatterElements(s, zeros, one) y = Expand(x1, t)"),
    ("ScatterElements_size", "n = Slice(s, one, two) t = ScatterElements(q, one, n) y = Expand(x1, t)"),
    ("ScatterND", "n = Slice(s, one, two) i = Unsqueeze(one, more) t = ScatterND(q, i, n) y = Expand(x1, t)"),
    ("GatherND", "t = GatherND(s, rows) y = Expand(x1, t)"),
    ("GatherElements", "i = Reshape(rows, more) t = GatherElements(s, i) y = Expand(x1, t)"),
    ("sequence", "a, b = Split<num_outputs = 2>(s) l = SequenceConstruct(b, a) t = ConcatFromSequence<axis = 0>(l) y = Expand(x1, t)"),
    ("sequence_of_scalars",
     "a = Gather(s, zero) l = SequenceConstruct(a, a) t = ConcatFromSequence<axis = 0, new_axis = 1>(l) y = Expand(x1, t)"),
    ("SplitToSequence", "l = SplitToSequence<axis = 0>(s) a = SequenceAt(l, zero) b = SequenceAt(l, minus) "
     "t = Concat<axis = 0>(b, a) y = Expand(x1, t)"),
    ("SequenceErase", "l = SplitToSequence<axis = 0>(s) a = SequenceAt(l, zero) k = SequenceInsert(l, a) m = SequenceErase(k, zero) "
     "t = ConcatFromSequence<axis = 0>(m) y = Expand(x1, t)"),
    ("SequenceInsert", "a, b = Split<num_outputs = 2>(s) e = SequenceEmpty<dtype = 7>() k = SequenceInsert(e, a) "
     "l = SequenceInsert(k, b, zero) t = ConcatFromSequence<axis = 0>(l) y = Expand(x1, t)"),
    ("ReverseSequence", "b = Unsqueeze(s, more) r = ReverseSequence<batch_axis = 1, time_axis = 0>(b, two) t = Reshape(r, more) "
     "y = Expand(x1, t)"),
    ("Pad", "k = Concat<axis = 0>(zeros, one) n = Slice(s, zeros, one) t = Pad(n, k, sevens) y = Expand(x1, t)"),
    ("CumSum", "t = CumSum(s, zero) y = Expand(x1, t)"),
    ("ReduceSum", "r = ReduceSum(s) t = Concat<axis = 0>(r, two) y = Expand(x1, t)"),
    ("ReduceSum_of_rows", "k = Concat<axis = 0>(s, q) g = Reshape(k, pairs) t = ReduceSum<keepdims = 0>(g, zeros) y = Expand(x1, t)"),
    ("ReduceMax", "r = ReduceMax(s) t = Concat<axis = 0>(r, two) y = Expand(x1, t)"),
    ("ReduceMin", "r = ReduceMin(s) t = Concat<axis = 0>(r, two) y = Expand(x1, t)"),
    ("ReduceProd", "k = Concat<axis = 0>(s, q) g = Reshape(k, pairs) t = ReduceProd<keepdims = 0>(g, one) y = Expand(x1, t)"),
    ("Relu", "n = Sub(s, q) c = Cast<to = 1>(n) r = Relu(c) d = Cast<to = 7>(r) t = Add(d, one) y = Expand(x1, t)"),
    ("Sum", "t = Sum(s, q, one) y = Expand(x1, t)"),
    ("Clip", "low = Gather(q, zero) t = Clip(s, low) y = Expand(x1, t)"),
    ("Mod", "a = Mod(s, q) t = Add(a, one) y = Expand(x1, t)"),
    ("Pow", "t = Pow(s, pairs) y = Expand(x1, t)"),
    ("Where_by_constant", "t = Where(mask, s, q) y = Expand(x1, t)"),
    ("Where_undecided", "c = Less(s, q) t = Where(c, s, q) y = Expand(x1, t)"),
    ("Where_equal_undecided", "c = Equal(s, one) t = Where(c, q, s) y = Expand(x1, t)"),
    ("And_undecided", "c = Less(s, q) d = Greater(s, one) e = And(c, d) g = Not(e) t = Where(g, s, q) y = Expand(x1, t)"),
    ("truth_as_number", "c = Less(s, q) d = Cast<to = 7>(c) t = Add(d, one) y = Expand(x1, t)"),
    ("NonZero", "n = NonZero(s) m = Reshape(n, more) t = Add(m, one) y = Expand(x1, t)"),
    ("int32", "a = Cast<to = 6>(s) b = Add(a, a) t = Cast<to = 7>(b) y = Expand(x1, t)"),
    ("int32_rows", "a = Cast<to = 6>(s) b = Expand(a, pairs) c = Gather<axis = 0>(b, zero) t = Cast<to = 7>(c) y = Expand(x1, t)"),
    ("int32_sequence", "a = Cast<to = 6>(s) l = SplitToSequence<axis = 0>(a) t = ConcatFromSequence<axis = 0>(l) "
     "u = Cast<to = 7>(t) y = Expand(x1, u)"),
    ("uint64", "a = Cast<to = 13>(s) b = Mul(a, a) t = Cast<to = 7>(b) y = Expand(x1, t)"),
    ("float_doubled", "a = Cast<to = 1>(s) b = Mul(a, double) c = Floor(b) t = Cast<to = 7>(c) y = Expand(x1, t)"),
    ("float_halved", "a = Cast<to = 1>(s) b = Mul(a, half) c = Ceil(b) t = Cast<to = 7>(c) y = Expand(x1, t)"),
    ("float_third", "a = Cast<to = 1>(s) b = Div(a, three) c = Ceil(b) t = Cast<to = 7>(c) y = Expand(x1, t)"),
    ("float_truncated", "a = Cast<to = 1>(s) b = Add(a, half) c = Div(b, double) d = Add(c, half) t = Cast<to = 7>(d) y = Expand(x1, t)"),
    ("float_of_either_sign", "m = Sub(s, q) a = Cast<to = 1>(m) b = Div(a, three) c = Cast<to = 7>(b) d = Add(c, two) "
     "y = Expand(x1, d)"),
    ("float_compared", "a = Cast<to = 1>(s) b = Mul(a, half) c = Less(b, three) t = Where(c, s, q) y = Expand(x1, t)"),
    ("float16", "a = Cast<to = 10>(s) b = Add(a, a) t = Cast<to = 7>(b) y = Expand(x1, t)"),
    ("double", "a = Cast<to = 11>(s) b = Mul(a, a) t = Cast<to = 7>(b) y = Expand(x1, t)"),
]  # fmt: skip


@pytest.mark.parametrize("n, m", thinned([(1, 1), (3, 4), (7, 2), (10, 9)], 2))
@pytest.mark.parametrize("body", [b for _, b in OF_SIZES], ids=[n for n, _ in OF_SIZES])
def test_load_onnx_shapes_computed_from_sizes_are_known(body: str, n: int, m: int) -> None:
    more = "int64[2] pairs3 = {3, 2}, int64[2] thirds = {2, 2}, int64[1] zeros = {0}, int64 minus = {-1}, int64 sevens = {7}"
    text = f"""(float[n, m] x) => (float[a, b] y) <{CONSTANTS}, {more}> {{ s = Shape(x) x0 = ReduceMean(x) x1 = Reshape(x0, more)
      {body} }}"""
    check(model(text), [f(n, m)])


def test_load_onnx_pads_of_torch_are_known() -> None:
    """The shape arithmetic that torch's exporter of opset 11 and later writes for `torch.nn.functional.pad`."""
    text = f"""(float[n, m, k] x) => (float[a, b, c] y) <{CONSTANTS}, int64[2] given = {{1, 2}}, int64[1] rank = {{3}},
      int64[1] end = {{-9223372036854775807}},
      int64[2] matrix = {{-1, 2}}, int64[1] zeros = {{0}}> {{ l = Shape(given) d = Mul(rank, two) e = Sub(d, l)
      z = ConstantOfShape<value = int64[1] {{0}}>(e)
      a = Concat<axis = 0>(given, z) b = Reshape(a, matrix) r = Slice(b, more, end, zeros, more) t = Transpose<perm = [1, 0]>(r)
      v = Reshape(t, more) w = Cast<to = 7>(v) y = Pad<mode = "reflect">(x, w) }}"""
    check(model(text), [f(2, 3, 5)])


def test_load_onnx_sizes_beyond_int32_are_refused_at_the_call() -> None:
    """A size that its type would wrap around is no dim; a call with one ends with an error."""
    text = """(float[n, m] x, float[1] v) => (float[a] y) <int32 c = {1000000}, int64[1] more = {-1}> { s = Size(x) a = Cast<to = 6>(s)
      b = Mul(a, c) d = Div(b, c) t = Reshape(d, more) e = Cast<to = 7>(t) y = Expand(v, e) }"""
    module = check(model(text), [f(3, 5), f(1)])
    with pytest.raises(UserError, match="2147483647"):
        run_function(module, "main", [f(50, 50), f(1)])


def test_load_onnx_shape_computed_from_data_is_refused() -> None:
    text = "(int64[2] s, float[1] v) => (float[a, b] y) <int64[2] q = {2, 3}> { t = Add(s, q) y = Reshape(v, t) }"
    with pytest.raises(ParseError, match="computed from tensors"):
        load_onnx(model(text))


def test_load_onnx_wrong_shape_arithmetic_is_refused() -> None:
    """Arguments that do not fit end with the error of the node, whether their values are known or not."""
    for body in ("t = Squeeze(s, z)", "t = Concat<axis = 1>(s, s)", "t = Gather<axis = 3>(s, z)", "t = Reshape(s, three)",
                 "t = Unsqueeze(s, far)", "t = Add(s, three)"):  # fmt: skip
        text = f"""(float[n, m] x) => (int64[a] t) <int64[1] z = {{0}}, int64[3] three = {{3, 3, 3}}, int64[1] far = {{7}}>
          {{ s = Shape(x) {body} }}"""
        with pytest.raises(ParseError, match=r"^node 't'"):
            load_onnx(model(text))


def test_load_onnx_inexact_float_of_sizes_is_refused() -> None:
    """Floats round a quotient; what a second operation makes of it is not the exact result."""
    text = """(float[n] x, float[1] v) => (float[a] y) <float three = {3.0}, float[1] c = {0.3}> { s = Shape(x) a = Cast<to = 1>(s)
      b = Div(a, three) %s e = Cast<to = 7>(d) y = Reshape(v, e) }"""
    for body, operator in (("d = Mul(b, three)", "mul_scalar"), ("d = Mul(a, c)", "mul"), ("d = Sqrt(a)", "sqrt")):
        with pytest.raises(ParseError, match=f"not followed for sizes: {operator}"):
            load_onnx(model(text % body))


def test_load_onnx_sizes_beyond_the_digits_of_a_float_are_refused_at_the_call() -> None:
    """Float32 holds every integer up to 2**24."""
    text = """(float[n] x, float[1] v) => (float[a] y) <float half = {0.5}, int64[1] c = {4194304}> { s = Shape(x) a = Cast<to = 1>(s)
      b = Mul(a, half) d = Floor(b) e = Cast<to = 7>(d) g = Div(e, c) y = Expand(v, g) }"""
    module = load_onnx(model(text))
    (y,) = (run_function(module, "main", [np.broadcast_to(np.float32(0), (1 << 24,)), f(1)]),)
    assert y.shape == (2,)
    with pytest.raises(UserError, match="16777216"):
        run_function(module, "main", [np.broadcast_to(np.float32(0), ((1 << 24) + 1,)), f(1)])


def test_load_onnx_large_tensors_of_constants_are_not_folded() -> None:
    """A file of a few bytes must not take the memory of the import."""
    text = """(float[n] x) => (int64 y) <int64[1] c = {1}, int64[3] d = {100000, 100000, 100}, int64[3] e = {1, 1, 1}, int64[1] z = {0}> {
      g = Reshape(c, e) t = Tile(g, d) u = ReduceMax<keepdims = 0>(t) s = Shape(x) v = ReduceMax<keepdims = 0>(s) y = Add(u, v) }"""
    module = load_onnx(model(text))
    assert not any(a.size > 1 for a in module.constants.values())


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("body", [
    "a = Cast<to = 1>(n) y = Range(zero, a, one)",
    "a = Cast<to = 1>(n) b = Add(a, two) y = Range(a, b, one)",
    "a = Cast<to = 1>(n) b = Neg(a) y = Range(b, a, two)",
    "a = Add(n, n) z = Range(n, a, step) y = Cast<to = 1>(z)",
    "a = Cast<to = 1>(k) b = Add(a, two) y = Range(zero, b, half)",
])  # fmt: skip
def test_load_onnx_range_over_sizes_matches_the_evaluator(body: str, n: int) -> None:
    text = f"""(float[n] x) => (float[a] y) <float zero = {{0.0}}, float one = {{1.0}}, float two = {{2.0}}, float half = {{0.5}},
      int64 step = {{2}},
      int64 k = {{3}}> {{ n = Size(x) {body} }}"""
    check(model(text), [f(n)])


def test_load_onnx_range_of_floats_over_a_size_is_no_loop() -> None:
    text = """(float[n] x) => (float[a] y) <float zero = {0.0}, float one = {1.0}> { n = Size(x) a = Cast<to = 1>(n)
      y = Range(zero, a, one) }"""
    assert set(check(model(text), [f(5)]).graphs) == {"main"}


def test_load_onnx_resize_takes_scales_computed_from_constants() -> None:
    text = """(float[n, 2, 4, 6] x) => (float[a, b, c, d] y) <float[2] ones = {1.0, 1.0}, int64[2] sizes = {8, 3}, int64[1] two = {2},
      int64[1] four = {4}> { s = Shape(x) h = Slice(s, two, four) a = Cast<to = 1>(h) b = Cast<to = 1>(sizes) r = Div(b, a)
      k = Concat<axis = 0>(ones, r) y = Resize<mode = "nearest">(x, , k) }"""
    check(model(text), [f(2, 2, 4, 6)])


@pytest.mark.parametrize("n", [1, 3, 6, 9])
def test_load_onnx_shapes_computed_in_branches_match_the_evaluator(n: int) -> None:
    """Sizes from outside are followed into both sides."""
    text = """(float[n] x, float[1] v) => (float[a] y) <float five = {5.0}, int64 limit = {5}, int64[1] two = {2}> {
      s = Shape(x) q = Size(x) z = Cast<to = 1>(s) below = Less(q, limit)
      y = If(below) <then_branch = g () => (float[b] t) { c = Less(z, five) d = Where(c, s, two) t = Expand(v, d) },
        else_branch = h () => (float[b] u) { c = Less(z, five) d = Where(c, s, two) u = Expand(v, d) }> }"""
    proto, inputs = model(text), [f(n), f(1)]
    np.testing.assert_array_equal(run_function(load_onnx(proto), "main", inputs), reference(proto, inputs)[0])


def test_load_onnx_sizes_squared_many_times_are_not_expanded() -> None:
    """The power of a size with an exponent of 2**24 has no normal form that fits into memory."""
    steps = "\n".join(f"v{k + 1} = Mul(v{k}, v{k})" for k in range(24))
    load_onnx(model(f"(float[n, m] x) => (int64[a] v24) {{ v0 = Shape(x)\n{steps} }}"))
