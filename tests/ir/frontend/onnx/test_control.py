"""Branches, loops, sequences and recurrent layers of ONNX models with symbolic sizes, against onnx's own evaluator and NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import Array, model, onnx, reference
from tests.support.effort import EFFORT
from tests.support.programs import agree, checked, compiled, opened

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text

BRANCH = """(bool c, float[n, 3] x) => (float[m, 3] y) {
  y = If(c) <then_branch = left () => (float[m, 3] a) { a = Concat<axis = 0>(x, x) },
             else_branch = right () => (float[m, 3] b) { b = Neg(x) }> }"""
# Doubles x until its sum exceeds a limit, and keeps every sum.
UNTIL = """(float[n] x, float limit) => (float[n] y, float[t, 1] sums) <int64 most = {40}, bool begin = {1}> {
  y, sums = Loop(most, begin, x) <body = step (int64 i, bool c, float[n] v) => (bool go, float[n] w, float[1] s) {
    axes = Constant<value_ints = [0]>() s = ReduceSum(v, axes) r = Squeeze(s)
    go = LessOrEqual(r, limit) w = Add(v, v) }> }"""
# A state that grows by one element an iteration.
GROWING = """(float[n] x, int64 count) => (float[m] y, float[count, 1] firsts)
  <bool always = {1}, int64[1] zero = {0}, int64[1] one = {1}> {
  y, firsts = Loop(count, always, x) <body = step (int64 i, bool c, float[k] v) => (bool go, float[k1] w, float[1] first) {
    go = Identity(c) first = Slice(v, zero, one) h = CastLike(i, first) shape = Constant<value_ints = [1]>() h1 = Reshape(h, shape)
    w = Concat<axis = 0>(h1, v) }> }"""
# Sums of rows within a sum of columns: a loop in a loop, and a value that the inner one takes from far outside.
NESTED = """(float[n, m] x, float[n, m] z) => (float[p] total)
  <bool always = {1}, int64 zero = {0}, int64 one = {1}, float[1] begin = {0.5}> {
  shape = Shape(x) rows = Gather<axis = 0>(shape, zero) columns = Gather<axis = 0>(shape, one)
  total = Loop(rows, always, begin) <body = outer (int64 i, bool c, float[1] v) => (bool go, float[1] w) {
    go = Identity(c) row = Gather<axis = 0>(x, i)
    w = Loop(columns, always, v) <body = inner (int64 j, bool d, float[1] u) => (bool on, float[1] t) {
      on = Identity(d) r = Gather<axis = 0>(z, i) e = Gather<axis = 0>(row, j) f = Gather<axis = 0>(r, j) g = Mul(e, f)
      t = Add(u, g) }> }> }"""
# Both states double their size at each iteration; a dim has the name that a result's symbol would have.
BOTH_GROW = """(float[last] x, int64 count) => (float[m] y) <bool always = {1}, int64 two = {2}> {
  y = Loop(count, always, x) <body = outer (int64 i, bool c, float[a] v) => (bool go, float[b] w) {
    go = Identity(c)
    w = Loop(two, always, v) <body = inner (int64 j, bool d, float[p] u) => (bool on, float[q] t) {
      on = Identity(d) t = Concat<axis = 0>(u, u) }> }> }"""
SCAN = """(float[n, b, k] x, float[b, k] h) => (float[b, k] last, float[b, n, k] every) {
  last, every = Scan(h, x) <num_scan_inputs = 1, scan_input_directions = [1], scan_output_axes = [1], scan_output_directions = [1],
    body = step (float[b, k] s, float[b, k] now) => (float[b, k] t, float[b, k] out) { u = Tanh(s) t = Add(u, now) out = Mul(t, t) }> }"""

# Sums of the first rows, as many as each of a list says, collected in a sequence.
COLLECTED = """(float[n, k] x, int64[c] at) => (float[m, k] y, int64 l, float[1, k] last)
  <bool always = {1}, int64 minus = {-1}, int64[1] one = {1}, int64[1] none = {0}> {
  empty = SequenceEmpty() count = Size(at)
  s = Loop(count, always, empty) <body = step (int64 i, bool c, seq(float[1, k]) v) => (bool go, seq(float[1, k]) w) {
    go = Identity(c) i1 = Reshape(i, one) j1 = Add(i1, one) end = Slice(at, i1, j1) rows = Slice(x, none, end)
    row = ReduceSum<keepdims = 1>(rows, none) w = SequenceInsert(v, row) }>
  y = ConcatFromSequence<axis = 0>(s) l = SequenceLength(s) last = SequenceAt(s, minus) }"""
# The same in each of two iterations, from the sequence read in the loop; ends by a condition alone.
READ_WITHIN = """(float[n, k] x) => (float[k] y) <int64 zero = {0}, int64 one = {1}, int64 two = {2}, float[1] begin = {0}> {
  s = SplitToSequence<keepdims = 0>(x) on = Less(zero, one)
  t, i = Loop("", on, begin, zero) <body = step (int64 j, bool c, float[m] v, int64 i) => (bool go, float[m1] w, int64 i1) {
    row = SequenceAt(s, i) w = Add(v, row) i1 = Add(i, one) go = Less(i1, two) }>
  y = Identity(t) }"""
MAPPED = """(float[n, 3] x) => (float[k, n] y) { s = SplitToSequence<keepdims = 0>(x)
  t = SequenceMap(s) <body = each (float[m] v) => (float[m] w) { w = Neg(v) }> y = ConcatFromSequence<axis = 1, new_axis = 1>(t) }"""
# Slices whose ends are computed from tensors.
FROM_DATA = "(float[n, 3] x, int64[1] a, int64[1] b) => (float[m, 3] y) { y = Slice(x, a, b) }"
FROM_DATA_2 = """(float[n, k] x, int32[2] a) => (float[m, l] y)
  <int32[2] ends = {4, 9}, int32[2] axes = {-1, 0}, int32[2] steps = {1, 2}> { y = Slice(x, a, ends, axes, steps) }"""
ONE_FROM_DATA = "(float[n] x, int64[1] a) => (float[1] y) <int64[1] one = {1}> { b = Add(a, one) y = Slice(x, a, b) }"

# Dims of two names that broadcast on both sides of a branch and behind it.
JOINED = """(bool q, float[a, 4] x, float[b, 4] z) => (float[d, 4] y, float[d, 4] w) {
  y = If(q) <then_branch = left () => (float[d, 4] s) { s = Add(x, z) }, else_branch = right () => (float[d, 4] t) { t = Mul(x, z) }>
  w = Sub(x, z) }"""


def f(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def compare(text: str, *calls: Sequence[Array]) -> None:
    """Compare the imported program with onnx's evaluator."""
    proto = model(text)
    module = load_onnx(proto)
    verify(module)
    for args in calls:
        found = run_function(module, "main", args)
        for got, want in zip(found if isinstance(found, tuple) else (found,), reference(proto, args), strict=True):
            assert got.shape == np.shape(want)
            np.testing.assert_allclose(got, want, rtol=1e-5)


def test_if_sides_of_different_sizes() -> None:
    compare(BRANCH, *([np.array(taken), f(2, 3)] for taken in (True, False)))


def test_if_dims_of_two_names_broadcast() -> None:
    sizes = [(1, 3), (3, 1), (3, 3)]
    compare(JOINED, *([np.array(q), f(a, 4), f(b, 4, seed=1)] for a, b in sizes for q in (True, False)))


def test_loop_with_an_end_by_values() -> None:
    compare(UNTIL, *([np.abs(f(4)), np.array(limit, np.float32)] for limit in (-1e9, 3.0, 1e6)))


def test_loop_state_grows() -> None:
    compare(GROWING, *([f(2), np.array(count)] for count in (1, 5)))


def test_loop_in_a_loop_with_growing_states_is_the_same_read_from_text() -> None:
    """The symbols of both loops and a dim of the user's have different names."""
    made = checked(load_onnx(model(BOTH_GROW)))
    module = parse_module(print_text(made), OPERATORS, made.constants)
    for n, count in ((1, 1), (2, 3)):
        found, wanted = run_function(module, "main", [f(n), np.array(count)]), f(n)
        for _ in range(count):
            wanted = np.tile(wanted, 4)
        np.testing.assert_array_equal(found, wanted)


def test_loop_in_a_loop_reads_both_outsides() -> None:
    module = load_onnx(model(NESTED))
    verify(module)
    for n, m in ((1, 1), (3, 5)):
        x, z = f(n, m), f(n, m, seed=1)
        np.testing.assert_allclose(run_function(module, "main", [x, z]), [0.5 + np.sum(x * z)], rtol=1e-5)


def test_scan_backwards_stacks_rows_along_another_axis() -> None:
    for n, b in ((1, 1), (4, 2)):
        x, h = f(n, b, 3), f(b, 3, seed=1)
        found = run_function(load_onnx(model(SCAN)), "main", [x, h])
        states = []
        for now in x[::-1]:
            h = np.tanh(h) + now
            states.append(h * h)
        np.testing.assert_allclose(found[0], h, rtol=1e-5)
        np.testing.assert_allclose(found[1], np.stack(states[::-1], 1), rtol=1e-5)


def _squashed(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _lstm(x: Array, w: Array, r: Array, b: Array, lengths: Array, back: bool) -> tuple[Array, Array, Array]:
    """One direction in NumPy: every state (n, batch, h), the last states."""
    n, batch, size = len(x), x.shape[1], r.shape[1]
    h = c = np.zeros((batch, size), np.float32)
    every = np.zeros((n, batch, size), np.float32)
    for t in reversed(range(n)) if back else range(n):
        i, o, k, g = np.split(x[t] @ w.T + h @ r.T + b[: 4 * size] + b[4 * size :], 4, axis=1)
        cell = _squashed(k) * c + _squashed(i) * np.tanh(g)
        state = _squashed(o) * np.tanh(cell)
        inside = (t < lengths)[:, None]
        every[t] = np.where(inside, state, 0)
        h, c = np.where(inside, state, h), np.where(inside, cell, c)
    return every, h, c


def _lstm_model() -> tuple[Any, Sequence[Array]]:
    """A bidirectional layer of 4 units over x (n, b, 3) with the lengths of its sequences, and its weights."""
    weights = [f(2, 16, 3, seed=2), f(2, 16, 4, seed=3), f(2, 32, seed=4)]
    proto = model("""(float[n, b, 3] x, int32[b] lengths) => (float[n, 2, b, 4] y, float[2, b, 4] h, float[2, b, 4] c) {
        y, h, c = LSTM<hidden_size = 4, direction = "bidirectional">(x, W, R, B, lengths) }""")
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(a, name) for a, name in zip(weights, "WRB", strict=True)
    )
    return proto, weights


def _lstm_calls() -> list[tuple[list[Array], list[Array]]]:
    """Arguments and results at a few sizes."""
    _, (w, r, b) = _lstm_model()
    found = []
    for n, batch in ((1, 1), (5, 1), (7, 3)):
        x, lengths = f(n, batch, 3), np.random.default_rng(1).integers(1, n + 1, batch).astype(np.int32)
        sides = [_lstm(x, w[d], r[d], b[d], lengths, bool(d)) for d in (0, 1)]
        every, *last = (np.stack(parts, axis) for parts, axis in zip(zip(*sides, strict=True), (1, 0, 0), strict=True))
        found.append(([x, lengths], [every, *last]))
    return found


def test_lstm_of_unequal_sequences_both_ways_is_numpy_s() -> None:
    module = load_onnx(_lstm_model()[0])
    verify(module)
    for args, wanted in _lstm_calls():
        for got, want in zip(run_function(module, "main", args), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.process
@pytest.mark.ccompiler
def test_control_flow_compiled_for_c_is_the_interpreter_s() -> None:
    with opened("c") as device:
        agree(load_onnx(_lstm_model()[0]), device, *(args for args, _ in _lstm_calls()))
        agree(load_onnx(model(COLLECTED)), device, *([f(5, 2), np.array(at)] for at in ([3], [1, 0, 5, 9])))
        if EFFORT == "heavy":
            agree(load_onnx(model(GROWING)), device, *([f(2), np.array(count)] for count in (0, 1, 5)))
            agree(load_onnx(model(UNTIL)), device, *([np.abs(f(4)), np.array(v, np.float32)] for v in (-1e9, 3.0, 1e6)))
            agree(load_onnx(model(NESTED)), device, [f(3, 5), f(3, 5, seed=1)], [f(1, 1), f(1, 1)])


@pytest.mark.process
@pytest.mark.ccompiler
def test_loop_in_a_loop_with_both_indices_runs_compiled() -> None:
    module = load_onnx(model(NESTED))
    with opened("c") as device, compiled(module, device) as built:
        for n, m in ((1, 1), (3, 5)):
            x, z = f(n, m), f(n, m, seed=1)
            np.testing.assert_allclose(built(x, z), [0.5 + np.sum(x * z)], rtol=1e-5)


RECURRENT = """(float[n, b, 3] x, int32[b] lengths, float[1, b, 4] h) => (float[n, 1, b, 4] y, float[1, b, 4] g, float[n, 1, b, 4] z) {
  y, g = GRU<hidden_size = 4, direction = "reverse">(x, GW, GR, GB, lengths, h)
  z = RNN<hidden_size = 4>(x, RW, RR, RB, "", h) }"""


def _gru(x: Array, w: Array, r: Array, b: Array, lengths: Array, h: Array) -> tuple[Array, Array]:
    """The layer backwards in float64: every state, the last state."""
    every = np.zeros((len(x), *h.shape))
    own, of_state = np.split(b, 2)
    for t in reversed(range(len(x))):
        update, reset = np.split(_squashed(x[t] @ w[:8].T + h @ r[:8].T + own[:8] + of_state[:8]), 2, axis=1)
        new = np.tanh(x[t] @ w[8:].T + (reset * h) @ r[8:].T + own[8:] + of_state[8:])
        inside = (t < lengths)[:, None]
        state = (1 - update) * new + update * h
        every[t], h = np.where(inside, state, 0), np.where(inside, state, h)
    return every, h


@pytest.mark.process
@pytest.mark.ccompiler
def test_gru_and_rnn_compiled_for_c_are_numpy_s_in_float64() -> None:
    proto = model(RECURRENT)
    shapes = {"GW": (1, 12, 3), "GR": (1, 12, 4), "GB": (1, 24), "RW": (1, 4, 3), "RR": (1, 4, 4), "RB": (1, 8)}
    weights = {name: f(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in weights.items())
    gw, gr, gb, rw, rr, rb = (a[0].astype(np.float64) for a in weights.values())
    with opened("c") as device, compiled(load_onnx(proto), device) as built:
        for n, batch in ((1, 1), (2, 3), (17, 1), (17, 3)):
            x, h = f(n, batch, 3), f(1, batch, 4, seed=9)
            lengths = np.random.default_rng(n).integers(1, n + 1, batch).astype(np.int32)
            every, last = _gru(x.astype(np.float64), gw, gr, gb, lengths, h[0].astype(np.float64))
            states = [h[0].astype(np.float64)]
            for now in x:
                states.append(np.tanh(now @ rw.T + states[-1] @ rr.T + rb[:4] + rb[4:]))
            wanted = every[:, None], last[None], np.stack(states[1:])[:, None]
            for got, want in zip(built(x, lengths, h), wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.process
@pytest.mark.ccompiler
def test_loop_over_a_number_from_data_counts() -> None:
    text = """(float[n] x, int64 count) => (float[n] y, float[m, n] every) <bool always = {1}> {
      y, every = Loop(count, always, x) <body = step (int64 i, bool c, float[n] v) => (bool go, float[n] w, float[n] r) {
        go = Identity(c) number = CastLike(i, v) w = Add(v, number) r = Neg(w) }> }"""
    module = load_onnx(model(text))
    assert lower(module).loops
    with opened("c") as device, compiled(module, device) as built:
        x = f(4)
        for count in (-3, 0, 1, 17):
            last, every = built(x, np.array(count))
            sums = x + np.cumsum(np.arange(max(count, 0), dtype=np.float32))[:, None]
            np.testing.assert_allclose(last, sums[-1] if count > 0 else x, rtol=1e-5)
            np.testing.assert_allclose(every, -sums, rtol=1e-5)


def _node_cases() -> list[Any]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = load_model_tests(kind="node")
    kinds = ("_lstm_", "_gru_", "_rnn_", "test_loop11", "test_scan9_", "test_if")
    return [c for c in every if any(k in c.name for k in kinds) and not c.name.endswith(("_seq", "_opt"))]


@pytest.mark.heavy
def test_onnx_own_cases_agree() -> None:
    for case in _node_cases():
        ((inputs, outputs),) = case.data_sets
        found = run_function(load_onnx(case.model), "main", [np.asarray(i) for i in inputs])
        for got, want in zip(found if isinstance(found, tuple) else (found,), outputs, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6, err_msg=case.name)


def test_loop_rows_of_other_sizes_are_refused_at_run_time() -> None:
    module = load_onnx(
        model(GROWING.replace("Slice(v, zero, one)", "Identity(v)").replace("CastLike(i, first)", "CastLike(i, v)"))
    )
    run_function(module, "main", [f(2), np.array(1)])
    with pytest.raises(UserError, match=r"reshape.*3.*2"):
        run_function(module, "main", [f(2), np.array(2)])


def test_loop_collects_a_sequence() -> None:
    compare(COLLECTED, *([f(5, 2), np.array(at)] for at in ([3], [1, 0, 5, 9])))


def test_loop_reads_a_sequence_from_outside() -> None:
    compare(READ_WITHIN.replace("{0}> {", "{0, 0, 0}> {").replace("float[1] begin", "float[3] begin"), [f(4, 3)])


def test_map_of_a_sequence_is_a_loop() -> None:
    compare(MAPPED, [f(1, 3)], [f(4, 3)])
    several = MAPPED.replace("SplitToSequence<keepdims = 0>(x)", "SequenceConstruct(x, z)").replace(
        "{ s =", "{ z = Concat<axis = 0>(x, x) s =", 1
    )
    with pytest.raises(ParseError, match=r"operator SequenceMap .* operator SequenceAt .* one shape"):
        load_onnx(model(several))


def test_slices_with_ends_from_tensors() -> None:
    ends = [(1, 3), (-2, 9), (4, 2), (-9, -1), (7, 9)]
    compare(FROM_DATA, *([f(5, 3), np.array([a]), np.array([b])] for a, b in ends))
    compare(FROM_DATA_2, [f(5, 6), np.int32([1, 2])])
    compare(ONE_FROM_DATA, [f(5), np.array([3])])


def test_slice_of_one_element_is_checked_at_run_time() -> None:
    with pytest.raises(UserError, match=r"reshape.*0.*1"):
        run_function(load_onnx(model(ONE_FROM_DATA)), "main", [f(3), np.array([3])])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BRANCH.replace("Neg(x)", "Identity(c)"), "node 'y', operator If .* one type and rank"),
        (UNTIL.replace("Loop(most, begin, x)", "Loop(, , x)").replace("LessOrEqual(r, limit)", "Identity(c)"),
         "node 'y', operator Loop .* the loop never ends"),
        (UNTIL.replace("Add(v, v)", "Cast<to = 7>(v)"), "operator Loop .* state 0 of one type"),
        (COLLECTED.replace("SequenceInsert(v, row)", "Identity(v)"),
         "node 's', operator Loop .* to a sequence, .* scan output"),
        (COLLECTED.replace("SequenceEmpty()", "SequenceConstruct(x)"), "node 's', operator Loop .* sequence .* empty"),
        (COLLECTED.replace("SequenceInsert(v, row)", "SequenceInsert(v, row, i)"), "operator SequenceInsert .* got a position"),
        (COLLECTED.replace("end = Slice", "l1 = SequenceLength(v) end = Slice"), "operator SequenceLength .*loop still extends"),
        ("(float[n] x) => (float[n] y) { s = SequenceConstruct(x) y = Neg(s) }",
         "operator Neg .* got a sequence .*; concatenate"),
        ("(float[n] x) => (float[n] y) { y = SequenceConstruct(x) }", "output 'y': expected a tensor, got a sequence"),
        ("(float[n] x, int64 k) => (float[n] y) { s = SequenceConstruct(x) y = SequenceErase(s, k) }",
         "expected a constant position among 1"),
        ("(float[n] x, float[m] z, int64 k) => (float[n] y) { s = SequenceConstruct(x, z) y = SequenceAt(s, k) }",
         "operator SequenceAt .* tensors of one shape"),
        (SCAN.replace("num_scan_inputs = 1", "num_scan_inputs = 3"), "operator Scan .* num_scan_inputs 3"),
        ('(float[n, b, 3] x, float[1, 4, 3] w, float[1, 4, 4] r) => (float[n, 1, b, 4] y) '
         '{ y = RNN<hidden_size = 4, activations = ["Cube"]>(x, w, r) }', "operator RNN .* activations among Relu.* got 'Cube'"),
    ],
)  # fmt: skip
def test_control_flow_refusals_name_the_node(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        load_onnx(model(text))


CURVES: dict[str, Any] = {
    "Softsign": lambda v: v / (1 + np.abs(v)), "ThresholdedRelu": lambda v: np.where(v > 0.5, v, 0), "Tanh": np.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", CURVES)
def test_load_onnx_recurrent_layer_has_activations_of_the_standard(name: str) -> None:
    text = f"""(float[n, b, 3] x, float[1, 4, 3] w, float[1, 4, 4] r) => (float[n, 1, b, 4] y) {{
      y = RNN<hidden_size = 4, activations = ["{name}"], activation_alpha = [0.5]>(x, w, r) }}"""
    module = load_onnx(model(text, 14))
    x, w, r = f(3, 2, 3), f(1, 4, 3, seed=1), f(1, 4, 4, seed=2)
    h, states = np.zeros((2, 4)), []
    for row in x:
        states.append(h := CURVES[name](row @ w[0].T + h @ r[0].T))
    np.testing.assert_allclose(np.asarray(run_function(module, "main", [x, w, r]))[:, 0], states, rtol=1e-4, atol=1e-6)


def test_load_onnx_lstm_with_softsign_is_numpy_s() -> None:
    """Softsign for the new cell and for the state that is shown, as speech models have it."""
    text = """(float[n, b, 3] x, float[1, 16, 3] w, float[1, 16, 4] r) => (float[n, 1, b, 4] y) {
      y = LSTM<hidden_size = 4, activations = ["Sigmoid", "Softsign", "Softsign"]>(x, w, r) }"""
    x, w, r = f(3, 2, 3), f(1, 16, 3, seed=1), f(1, 16, 4, seed=2)
    h = c = np.zeros((2, 4))
    states = []
    for row in x:
        i, o, k, g = np.split(row @ w[0].T + h @ r[0].T, 4, axis=1)
        c = _squashed(k) * c + _squashed(i) * CURVES["Softsign"](g)
        states.append(h := _squashed(o) * CURVES["Softsign"](c))
    found = run_function(load_onnx(model(text, 14)), "main", [x, w, r])
    np.testing.assert_allclose(np.asarray(found)[:, 0], states, rtol=1e-4, atol=1e-6)


SQUEEZED = """(float[b, n] x) => (float[k] y) <int64 one = {1}, int64[1] last = {-1}>
  { s = Shape(x) i = Constant<value_int = 1>() n = Gather(s, i) c = Equal(n, one)
    y = If(c) <then_branch = g () => (float[b] t) { t = Squeeze(x, last) }, else_branch = h () => (float[b, n] e) { e = Identity(x) }> }"""


@pytest.mark.parametrize("bounds, rank", [({"n": (1, 1)}, 1), ({"n": (2, 9)}, 2)])
def test_branches_of_two_ranks_where_a_bound_decides(bounds: dict[str, tuple[int, int]], rank: int) -> None:
    module = load_onnx(model(SQUEEZED), bounds)
    x = np.ones((3, bounds["n"][0]), np.float32)
    assert np.asarray(run_function(module, "main", [x])).ndim == rank


def test_branches_of_two_ranks_without_a_bound_names_the_bound() -> None:
    with pytest.raises(ParseError, match=r"n == 1 leaves one side, such as bounds={.n.: "):
        load_onnx(model(SQUEEZED))


RATES = """(float[b] x, int64 rate) => (float[k] y) <int64 high = {16}>
  { c = Equal(rate, high)
    y = If(c) <then_branch = g () => (float[b] t) { t = Relu(x) },
                     else_branch = h () => (float[b, 1] e) { a = Constant<value_ints = [1]>() e = Unsqueeze(x, a) }> }"""


@pytest.mark.parametrize("rate, shape", [(16, (3,)), (8, (3, 1))])
def test_bound_of_one_number_fixes_an_input(rate: int, shape: tuple[int, ...]) -> None:
    module = load_onnx(model(RATES), {"rate": (rate, rate)})
    assert [p.name for p in module.graphs["main"].params] == ["x"]
    assert np.asarray(run_function(module, "main", [np.ones(3, np.float32)])).shape == shape


def test_bound_of_several_numbers_of_an_input_raises() -> None:
    with pytest.raises(UserError, match=r"bound of rate.*expected one number, got 8 to 16"):
        load_onnx(model(RATES), {"rate": (8, 16)})
    with pytest.raises(ParseError, match="data decide between them"):
        load_onnx(model(RATES))
