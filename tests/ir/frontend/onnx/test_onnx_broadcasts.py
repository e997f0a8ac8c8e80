"""Broadcasts of dims that only a call decides, against NumPy: each dim is equal to its partner or 1, or the call is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import model
from tests.support.programs import compiled, opened

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.passes.pipeline import lower

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

PARTS = (
    "<int64[2] one = {1, 1}, int64[2] ends = {9223372036854775807, 9223372036854775807}> { s = Slice(x, one, ends)\n "
)
CASES: dict[str, tuple[str, Callable[..., Array], Sequence[Sequence[Shape]], Sequence[Sequence[Shape]]]] = {
    "add": (
        "(float[a, b] x, float[c, d] y) => (float[e, g] z) { z = Add(x, y) }", np.add,
        [((3, 4), (3, 4)), ((1, 4), (3, 1)), ((3, 1), (1, 4)), ((1, 1), (1, 1))], [((2, 3), (3, 2)), ((4, 2), (2, 4))],
    ),
    "sum of a part": (
        f"(float[a, b] x, float[c, d] y) => (float[e, g] z) {PARTS} z = Add(s, y) }}", lambda x, y: x[1:, 1:] + y,
        [((2, 4), (3, 1)), ((4, 4), (3, 3)), ((4, 4), (1, 1)), ((2, 2), (3, 4)), ((1, 4), (1, 3))],
        [((4, 4), (2, 3)), ((3, 4), (3, 2))],
    ),
    "part and whole": (
        f"(float[a, b] x) => (float[e, g] z) {PARTS} z = Add(s, x) }}", lambda x: x[1:, 1:] + x,
        [((2, 2),)], [((3, 3),), ((2, 3),)],
    ),
    "equal": (
        "(float[a, b] x, float[c, d] y) => (bool[e, g] z) { z = Equal(x, y) }", np.equal,
        [((3, 4), (3, 4)), ((1, 4), (3, 1))], [((2, 3), (3, 2))],
    ),
    "where": (
        "(float[a, b] x, float[c, d] y) => (float[e, g] z) { q = Less(x, y)\n z = Where(q, x, y) }", np.minimum,
        [((3, 4), (3, 4)), ((1, 4), (3, 1))], [((2, 3), (3, 2))],
    ),
    "sum": (
        "(float[a, b] x, float[c, d] y, float[e, g] u) => (float[h, i] z) { z = Sum(x, y, u) }", lambda x, y, u: x + y + u,
        [((3, 4), (3, 4), (3, 4)), ((1, 1), (2, 1), (1, 5)), ((1, 4), (3, 1), (1, 1))], [((2, 3), (3, 2), (2, 3))],
    ),
    "expand": (
        "(float[a, b] x, float[c, d] y) => (float[e, g] z) { s = Shape(y)\n z = Expand(x, s) }",
        lambda x, y: np.broadcast_arrays(x, y)[0],
        [((3, 4), (3, 4)), ((1, 4), (3, 1)), ((3, 4), (1, 1))], [((2, 3), (3, 2)), ((3, 4), (2, 4)), ((2, 4), (3, 4))],
    ),
    "gemm": (
        "(float[a, b] x, float[b, d] y, float[e, g] c) => (float[h, i] z) { z = Gemm(x, y, c) }", lambda x, y, c: x @ y + c,
        [((2, 4), (4, 3), (2, 3)), ((2, 4), (4, 3), (1, 3)), ((2, 4), (4, 3), (2, 1))],
        [((2, 4), (4, 3), (3, 2)), ((1, 4), (4, 3), (3, 3))],
    ),
    "products": (
        "(float[a, 2, 3] x, float[c, 3, 2] y) => (float[h, 2, 2] z) { z = MatMul(x, y) }", np.matmul,
        [((4, 2, 3), (4, 3, 2)), ((1, 2, 3), (4, 3, 2))], [((4, 2, 3), (2, 3, 2))],
    ),
    "prelu": (
        "(float[a, b] x, float[c] y) => (float[e, g] z) { z = PRelu(x, y) }", lambda x, y: np.where(x < 0, x * y, x),
        [((3, 4), (4,)), ((3, 4), (1,))], [((4, 3), (4,))],
    ),
}  # fmt: skip
REFUSED = (UserError, ParseError)


def import_with(text: str, named: bool) -> IRModule:
    proto = model(text)
    for i in proto.graph.input if not named else ():
        for d in i.type.tensor_type.shape.dim:
            if d.WhichOneof("value") == "dim_param":
                d.ClearField("dim_param")
    return load_onnx(proto)


def drawn(shapes: Sequence[Shape]) -> list[Array]:
    return [np.random.default_rng(k).standard_normal(s).astype(np.float32) for k, s in enumerate(shapes)]


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("name", CASES)
def test_broadcast_of_undecided_dims_gives_numpy_s_result(name: str, named: bool) -> None:
    text, wanted, right, wrong = CASES[name]
    module = import_with(text, named)
    for shapes in right:
        inputs = drawn(shapes)
        for form in (module, lower(module).module):
            found = run_function(form, "main", inputs)
            assert found.shape == wanted(*inputs).shape
            np.testing.assert_allclose(found, wanted(*inputs), rtol=1e-5, atol=1e-6)
    for shapes in wrong:
        with pytest.raises(REFUSED, match="expected"):
            run_function(module, "main", drawn(shapes))


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.parametrize("name", ["sum of a part", "expand", "gemm", "prelu"])
def test_built_broadcast_refuses_other_dims(name: str) -> None:
    text, wanted, right, wrong = CASES[name]
    with opened("c") as device, compiled(import_with(text, True), device) as program:
        for shapes in right:
            np.testing.assert_allclose(program(*drawn(shapes)), wanted(*drawn(shapes)), rtol=1e-5, atol=1e-6)
        for shapes in wrong:
            with pytest.raises(REFUSED, match="expected"):
                program(*drawn(shapes))


def test_broadcast_refusal_names_dims_and_sizes() -> None:
    module = load_onnx(model(CASES["sum of a part"][0]))
    with pytest.raises(UserError) as caught:
        run_function(module, "main", drawn([(4, 4), (2, 3)]))
    assert "a - 1" in str(caught.value) and "got 3 and 2" in str(caught.value) and "reshape" not in str(caught.value)


@pytest.mark.parametrize("shapes", [((3, 4), (4, 2)), ((4, 2), (2, 4))])
def test_scatter_nd_refuses_updates_of_the_same_number_of_elements(shapes: tuple[Shape, Shape]) -> None:
    text = "(float[a, b] x, int64[c, 1] i, float[d, e] u) => (float[a, b] z) { z = ScatterND(x, i, u) }"
    module = load_onnx(model(text))
    x, u = drawn(shapes)
    rows = np.array([[0], [2]]) if len(x) == 3 else np.array([[0], [2], [1], [3]])
    with pytest.raises(UserError, match="dim_"):
        run_function(module, "main", [x, rows, u])
    right = drawn([(len(rows), x.shape[1])])[0]
    wanted = x.copy()
    wanted[rows[:, 0]] = right
    np.testing.assert_array_equal(run_function(module, "main", [x, rows, right]), wanted)


def test_dims_of_one_symbol_are_required_equal() -> None:
    """Both halves of an even number are equal; of 3 elements one has 1, which no exporter means as a broadcast."""
    text = """(float[n] x) => (float[m] z) <int64 two = {2}> {
      n = Shape(x)
      h = Div(n, two)
      zero = Sub(h, h)
      one = Slice(x, zero, h)
      rest = Slice(x, h, n)
      z = Add(one, rest) }"""
    module = load_onnx(model(text))
    assert "broadcast" not in repr([b for b in module.graphs["main"].bindings])
    x = drawn([(6,)])[0]
    np.testing.assert_array_equal(run_function(module, "main", [x]), x[:3] + x[3:])
    for n in (3, 5):
        with pytest.raises(UserError, match="dim_0"):
            run_function(module, "main", drawn([(n,)]))


@pytest.mark.parametrize("inputs", ["float[t, b] x, float[c] h", "float[t, ?] x, float[?] h"])
def test_scan_with_state_of_undecided_dims_has_rows_of_one_size(inputs: str) -> None:
    text = f"""({inputs}) => (float[e] last, float[t, g] rows) {{
      last, rows = Scan<num_scan_inputs = 1, body = inner (float[p] s, float[q] i) => (float[p] s1, float[w] o) {{
        s1 = Add(s, i)
        o = Mul(s1, s1) }}>(h, x) }}"""
    module = load_onnx(model(text))
    x, h = drawn([(5, 3), (3,)])
    sums = h + np.cumsum(x, axis=0)
    last, rows = run_function(module, "main", [x, h])
    np.testing.assert_allclose(last, sums[-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rows, sums**2, rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="dim_0"):
        run_function(module, "main", drawn([(5, 3), (2,)]))


def test_static_updates_of_other_dims_are_refused_at_import() -> None:
    text = "(float[3, 4] x, int64[2, 1] i, float[4, 2] u) => (float[3, 4] z) { z = ScatterND(x, i, u) }"
    with pytest.raises(ParseError, match="ScatterND"):
        load_onnx(model(text))
