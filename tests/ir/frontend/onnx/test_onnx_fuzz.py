"""A slice of the fuzzer of the ONNX importer, its parts, and what it reported: float64 beside float attributes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model, onnx

from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function

trial = pytest.importorskip("tests.fuzz.importers.trial", reason="needs the onnx package")
builder = pytest.importorskip("tests.fuzz.importers.builder", reason="needs the onnx package")
program_of_fuzz = pytest.importorskip("tests.fuzz.importers.program", reason="needs the onnx package")
minimal = pytest.importorskip("tests.fuzz.importers.minimise", reason="needs the onnx package")
oracles = pytest.importorskip("tests.fuzz.importers.oracles", reason="needs the onnx package")
campaigns = pytest.importorskip("tests.fuzz.importers.run", reason="needs the onnx package")
graphs = pytest.importorskip("tests.fuzz.importers.slices", reason="needs the onnx package")

ROOT = Path(__file__).parents[4]


def test_every_operator_has_a_generator() -> None:
    assert trial.uncovered() == []


@pytest.mark.slow
def test_generators_of_other_domains_give_programs() -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install onnxruntime")

    def gives(domain: str, op: str, number: int) -> bool:
        b = builder.Builder(random.Random(f"{op} {number}"), 20)
        try:
            trial.OTHER_USES[domain, op](b, op)
        except program_of_fuzz.Invalid:
            return False
        return op in [n.op_type for n in b.p.nodes]

    never = [key for key in trial.OTHER_USES if not any(gives(*key, number) for number in range(12))]
    assert never == []


@pytest.mark.slow
@pytest.mark.process
def test_fuzzer_finds_no_difference_in_a_few_programs() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.importers.run",
        "--programs",
        "60",
        "--seed",
        "20261130",
        "--sample",
        "0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "60 programs in" in done.stdout


def test_program_is_determined_by_seed_and_number() -> None:
    first, second = trial.make(5, 3), trial.make(5, 3)
    types = first.runs(first.calls[0]).by_name
    assert first.proto(types).SerializeToString() == second.proto(types).SerializeToString()
    assert all(np.array_equal(a, second.calls[0][n], equal_nan=a.dtype.kind == "f") for n, a in first.calls[0].items())


def test_wrong_result_is_reported_and_minimised() -> None:
    """A meaning that is one unit off in a division shows, and its program shrinks to the division."""

    def reciprocal(module: object, args: list[np.ndarray]) -> object:
        results = trial.interpreted(module, args)
        every = results if isinstance(results, tuple) else (results,)
        return tuple(np.nextafter(r, np.float32(np.inf)) if r.dtype == np.float32 else r for r in every)

    proto = model("(float[n] x) => (float[n] z) <float c = {41.0}> { a = Abs(x)\n d = Div(a, c)\n z = Neg(d) }")
    program = program_of(proto, [np.array([41.0, 82.0, -3.0], np.float32)])
    assert not trial.attempt(program).kind
    assert trial.attempt(program, reciprocal).kind == "wrong"
    small = minimal.minimise(program, "z", 0, lambda p: trial.attempt(p, reciprocal).kind == "wrong", 20)
    assert len(small.nodes) == 1 and small.calls[0][next(iter(small.inputs))].size == 1
    assert "check(proto" in minimal.regression_test(small, "why")


def test_stored_program_is_read_again(tmp_path: Path) -> None:
    program = trial.make(5, 3)
    path = minimal.stored(program, tmp_path, "p")
    again = minimal.read(path)
    assert [n.op_type for n in again.nodes] == [n.op_type for n in program.nodes]
    assert trial.attempt(again).kind == trial.attempt(program).kind


def test_slice_of_a_graph_has_symbols_where_sizes_differ(tmp_path: Path) -> None:
    if not oracles.has_runtime():
        pytest.skip("needs onnxruntime, which runs the whole graph")
    file = tmp_path / "m.onnx"
    onnx.save(model("(float[n, 3] x) => (float[n, 3] z) { a = Abs(x)\n b = Exp(a)\n z = Neg(b) }"), str(file))
    rng = random.Random(2)
    graph = graphs.read(file, rng)
    while graph.runs[0]["x"].shape == graph.runs[1]["x"].shape:
        graph = graphs.read(file, rng)
    program = graphs.slice_of(graph, rng)
    assert any(isinstance(d, str) for i in program.inputs.values() for d in i.dims)
    assert not trial.attempt(program).kind


def program_of(proto: object, args: list[np.ndarray]) -> object:
    types = {i.name: a for i, a in zip(proto.graph.input, args, strict=True)}
    program = trial.Program(proto.opset_import[0].version, list(proto.graph.node))
    program.inputs = {n: minimal.Input(a.dtype, a.shape) for n, a in types.items()}
    program.constants = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    program.outputs, program.calls = [o.name for o in proto.graph.output], [types]
    return program


@pytest.mark.parametrize("node", [
    "Selu", "Elu<alpha = 0.1>", "LeakyRelu<alpha = 0.1>", "HardSigmoid<alpha = 0.3>", "HardSwish", "Celu<alpha = 0.7>",
    "ThresholdedRelu<alpha = 0.1>", "LpNormalization",
])  # fmt: skip
def test_float_attribute_beside_float64_is_the_number_of_the_file(node: str) -> None:
    x = np.array([[-5.0, -0.1, 0.1, 2.0]])
    check(model(f"(double[a, b] x) => (double[a, b] y) {{ y = {node}(x) }}", 22), [x], rtol=1e-14)


def test_epsilon_beside_float64_is_the_number_of_the_file() -> None:
    x, one, variance = np.array([[-3.0, 4.0]]), np.array([-2.0, 1.0]), np.array([0.0, 1e-6])
    text = "(double[n, 2] x, double[2] s, double[2] v) => (double[n, 2] y) { y = BatchNormalization(x, s, s, s, v) }"
    check(model(text, 15), [x, one, variance], rtol=1e-13)


def test_clip_of_attributes_beside_float64_is_the_number_of_the_file() -> None:
    x = np.array([-5.0, 0.05, 2.0])
    check(model("(double[n] x) => (double[n] y) { y = Clip<min = -0.1, max = 0.3>(x) }", 10), [x], rtol=1e-15)


def test_scale_of_attention_of_float64_is_the_square_of_a_float32_root() -> None:
    """The square of the root of 0.5 in 32 bits is 0.4999999842."""
    q, k, v = (np.array(a).reshape(1, 1, -1, 1) for a in ([1.0], [1.0, 0.0], [1e9, 0.0]))
    text = "(double[1, 1, n, 1] q, double[1, 1, m, 1] k, double[1, 1, m, 1] v) => (double[1, 1, n, 1] y) "
    check(model(f"{text} {{ y = Attention<scale = 0.5>(q, k, v) }}", 23), [q, k, v], rtol=1e-12)


def test_attribute_beside_float32_is_a_short_decimal() -> None:
    module = load_onnx(model("(float[n] x) => (float[n] y) { y = LeakyRelu<alpha = 0.1>(x) }"))
    assert "0.1)" in repr(module.graphs["main"].bindings)


def test_rate_of_adam_is_computed_from_the_number_of_the_file() -> None:
    """1 - 0.999 in 32 bits is 0.00099998712, 13 units of a thousandth of 1 % away from 0.001."""
    import onnx.parser
    from onnx.reference import ReferenceEvaluator

    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20, "ai.onnx.preview.training" : 1]> graph (float r, int64 t, float[n] x, float[n] g, '
        "float[n] v, float[n] h) => (float[n] a, float[n] b, float[n] c) { a, b, c = ai.onnx.preview.training.Adam(r, t, x, g, v, h) }"
    )
    f = np.float32
    args = [np.asarray(f(0.1)), np.asarray(np.int64(1)), *(np.array([k], f) for k in (1, -32, 1, 1))]
    expected = ReferenceEvaluator(proto).run(None, dict(zip((i.name for i in proto.graph.input), args, strict=True)))
    results = run_function(load_onnx(proto), "main", args)
    np.testing.assert_allclose(results[2], expected[2], rtol=1e-6)


@pytest.mark.parametrize(
    "dtype, number", [("uint8", 5), ("uint32", 5), ("uint64", 5), ("int8", -128), ("int8", 127), ("uint16", 0)]
)
def test_integer_minus_constant_wraps_around(dtype: str, number: int) -> None:
    x = np.array([1, 100, 3, 0], dtype)
    check(model(f"({dtype}[n] x) => ({dtype}[n] y) <{dtype} c = {{{number}}}> {{ y = Sub(x, c) }}"), [x])


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32"])
@pytest.mark.parametrize("op, function", [
    ("ReduceMean", lambda x: x.mean(1)), ("ReduceL2", lambda x: np.sqrt((x * x).sum(1))), ("ReduceLogSum", lambda x: np.log(x.sum(1))),
    ("ReduceLogSumExp", lambda x: np.log(np.exp(x).sum(1))),
])  # fmt: skip
def test_reduction_of_integers_to_real_numbers_gives_integer_parts(op: str, function: Any, dtype: str) -> None:
    x = np.array([[7, 2, 2, 1], [5, 6, 3, 3], [1, 1, 1, 0]], dtype)
    x = np.where(x == 5, -3, x).astype(dtype) if dtype != "uint32" else x
    text = f"({dtype}[n, m] x) => ({dtype}[n] y) <int64[1] a = {{1}}> {{ y = {op}<keepdims = 0>(x, a) }}"
    result = run_function(load_onnx(model(text)), "main", [x])
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result, np.trunc(function(x.astype(np.float64))).astype(dtype))


@pytest.mark.parametrize("noop", [0, 1])
def test_product_of_a_shape_without_axes_follows_noop_with_empty_axes(noop: int) -> None:
    text = f"(float[n, 3] x) => (int64[q] y) {{ s = Shape(x) y = ReduceProd<noop_with_empty_axes = {noop}>(s) }}"
    check(model(text, 18), [np.zeros((5, 3), np.float32)])


def test_reduce_log_sum_exp_of_a_number_is_the_number() -> None:
    """The exponential of -28 is 0 in float16."""
    module = load_onnx(model("(float16 x) => (float16 y) { y = ReduceLogSumExp(x) }", 13))
    assert run_function(module, "main", [np.asarray(-28, np.float16)]) == -28


@pytest.mark.process
@pytest.mark.slow
def test_program_without_an_answer_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that computes for too long, and one that ends its process, cost one program each."""

    def attempt(program: int, seed: int) -> object:
        while program == 1:
            pass
        if program == 2:
            os._exit(1)
        return trial.Outcome()

    monkeypatch.setattr(campaigns, "SECONDS", 1)
    trials = replace(campaigns.ONNX, make=lambda seed, number: number, attempt=attempt)
    totals = campaigns.campaign(1, 4, 60, trials=trials)
    assert totals.lost == [(1, "no answer"), (2, "an oracle died")] and totals.kinds["agrees"] == 2
