"""Indices smaller than the data, positions within a batch, and pads that crop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model
from tests.ir.frontend.onnx.test_operators import f, i

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function

SCATTER = '(%s x, int64%s k, float%s u) => (float[q] y) { y = ScatterElements<axis = %d, reduction = "%s">(x, k, u) }'
FEWER = [
    ("float[4, 5]", "[2, 2]", 1, "none", (4, 5), (2, 2)),
    ("float[a, b]", "[c, d]", 1, "none", (4, 5), (2, 2)),
    ("float[a, b]", "[c, d]", 0, "add", (4, 5), (9, 3)),
    ("float[a, b]", "[c, d]", 1, "none", (4, 5), (4, 3)),  # fewer at no axis but the scattered one
    ("float[a, b]", "[0, 2]", 1, "none", (4, 5), (0, 2)),
    ("float[a, 5, c]", "[2, 2, 3]", 1, "max", (4, 5, 6), (2, 2, 3)),
    ("float[a, b, c]", "[d, e, g]", -1, "mul", (3, 2, 4), (2, 1, 5)),
]  # fmt: skip


@pytest.mark.parametrize("data, indices, axis, mode, shape, part", FEWER)
def test_load_onnx_scatter_of_fewer_indices_leaves_the_rest(
    data: str, indices: str, axis: int, mode: str, shape: tuple[int, ...], part: tuple[int, ...]
) -> None:
    where = i(-shape[axis], shape[axis], *part)
    if mode == "none":  # distinct, as the order of updates of one element is free
        where = np.argsort(f(*part[:1], shape[1]), 1)[:, : part[1]]
    check(model(SCATTER % (data, indices, indices, axis, mode), 18), [f(*shape), where, f(*part)])


def test_load_onnx_old_scatter_of_fewer_indices_leaves_the_rest() -> None:
    text = "(float[a, b] x, int64[2, 2] k, float[2, 2] u) => (float[a, b] y) { y = Scatter<axis = 1>(x, k, u) }"
    x, u = f(4, 5), f(2, 2)
    wanted = x.copy()
    wanted[[0, 0, 1, 1], [1, 0, 3, 2]] = u.reshape(-1)
    found = run_function(load_onnx(model(text, 10)), "main", [x, np.array([[1, 0], [3, 2]]), u])
    np.testing.assert_array_equal(np.asarray(found), wanted)


def test_load_onnx_scatter_of_more_indices_raises() -> None:
    with pytest.raises(ParseError, match="operator ScatterElements"):
        load_onnx(model(SCATTER % ("float[4, 5]", "[5, 2]", "[5, 2]", 1, "none"), 18))
    with pytest.raises(ParseError, match="operator ScatterElements"):
        load_onnx(model(SCATTER % ("float[4, 5]", "[5]", "[5]", 1, "none"), 18))
    module = load_onnx(model(SCATTER % ("float[a, b]", "[c, d]", "[c, d]", 1, "none"), 18))
    with pytest.raises(UserError, match="c <= a"):
        run_function(module, "main", [f(2, 3), i(0, 3, 3, 1), f(3, 1)])


GATHERS: list[tuple[str, list[Any]]] = [
    ("(float[b, 4, 5] x, int64[b, n, 1] k) => (float[q] y) { y = GatherND<batch_dims = 1>(x, k) }", [f(2, 4, 5), i(-4, 4, 2, 3, 1)]),
    ("(float[b, 4, 5] x, int64[c, 2] k) => (float[q] y) { y = GatherND<batch_dims = 1>(x, k) }", [f(2, 4, 5), i(-4, 4, 2, 2)]),
    ("(float[b, h, 4, 5, 6] x, int64[b, h, n, m, 2] k) => (float[q] y) { y = GatherND<batch_dims = 2>(x, k) }",
     [f(2, 3, 4, 5, 6), i(-4, 4, 2, 3, 2, 3, 2)]),
    ("(float[2, 4, 5] x) => (float[q] y) <int64[2, 1] k = {1, -1}> { y = GatherND<batch_dims = 1>(x, k) }", [f(2, 4, 5)]),
    ("(int64[b, n] x, int64[b, 1] k) => (int64[q] y) { y = GatherND<batch_dims = 1>(x, k) }", [i(0, 9, 3, 4), i(-4, 4, 3, 1)]),
]  # fmt: skip


@pytest.mark.parametrize("text, inputs", GATHERS)
def test_load_onnx_gather_nd_picks_within_each_batch(text: str, inputs: list[Any]) -> None:
    check(model(text, 13), inputs)


def test_load_onnx_gather_nd_of_symbolic_depth_names_the_bound() -> None:
    proto = model("(float[b, 4] x, int64[c, d] k) => (float[q, 4] y) { y = GatherND(x, k) }", 13)
    with pytest.raises(ParseError, match="fix dims"):
        load_onnx(proto)
    assert load_onnx(proto, {"d": (1, 1)}).graphs


def test_load_onnx_gather_nd_of_other_batch_raises() -> None:
    with pytest.raises(ParseError, match="batch_dims"):
        load_onnx(model("(float[b, 4] x, int64[b, 1] k) => (float[q] y) { y = GatherND<batch_dims = 2>(x, k) }", 13))
    with pytest.raises(ParseError, match="operator GatherND"):
        load_onnx(model("(float[2, 4] x, int64[3, 1] k) => (float[q] y) { y = GatherND<batch_dims = 1>(x, k) }", 13))


@pytest.mark.parametrize("dims", ["a, b", "4, 7"])
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("pads", [(0, -1, 1, -2), (-1, 2, 2, -3), (-2, -3, -2, -4), (0, 0, 0, -1)])
def test_load_onnx_negative_pads_crop(dims: str, mode: str, pads: tuple[int, ...]) -> None:
    x = f(4, 7)
    cropped = x[max(-pads[0], 0) : 4 - max(-pads[2], 0), max(-pads[1], 0) : 7 - max(-pads[3], 0)]
    more = [(max(pads[p], 0), max(pads[p + 2], 0)) for p in (0, 1)]
    wanted = cropped if not np.any(more) else np.pad(cropped, more, mode)  # type: ignore[call-overload]
    numbers = ", ".join(map(str, pads))
    text = f'(float[{dims}] x) => (float[q] y) <int64[4] p = {{{numbers}}}> {{ y = Pad<mode = "{mode}">(x, p) }}'
    np.testing.assert_array_equal(np.asarray(run_function(load_onnx(model(text, 19)), "main", [x])), wanted)


def test_load_onnx_pads_cropping_too_much_raise() -> None:
    text = "(float[%s] x) => (float[q] y) <int64[2] p = {-3, -2}> { y = Pad(x, p) }"
    with pytest.raises(ParseError, match="5 or more"):
        load_onnx(model(text % "4", 13))
    module = load_onnx(model(text % "n", 13))
    assert np.shape(run_function(module, "main", [f(5)])) == (0,)
    with pytest.raises(UserError, match="5 <= n"):
        run_function(module, "main", [f(4)])


def bytes_of(*shape: int) -> Any:
    return i(0, 256, *shape).astype(np.uint8)


QUANTIZED = [
    ("", "[3]", (5, 4), (4, 3)),
    ("", "[3]", (2, 5, 4), (4, 3)),
    ("[5]", "[3]", (5, 4), (4, 3)),
    ("[2, 5, 1]", "[2, 1, 3]", (2, 5, 4), (2, 4, 3)),
    ("[1]", "[1]", (5, 4), (4, 1)),
]
"""Dims of the scales of both operands, and of the operands."""


@pytest.mark.parametrize("own, other, a, b", QUANTIZED)
def test_load_onnx_qlinear_matmul_has_scales_of_rows_and_columns(
    own: str, other: str, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    shapes = [tuple(int(d) for d in s.strip("[]").split(", ") if d) for s in (own, other)]
    (sa, sb), (za, zb) = (
        [np.asarray(make(*s)) for s in shapes] for make in (lambda *s: np.abs(f(*s)) / 8 + 0.01, bytes_of)
    )
    x, w = bytes_of(*a), bytes_of(*b)
    dims = ["n, 4" if len(a) == 2 and not own else ", ".join(map(str, a)), ", ".join(map(str, b))]
    text = f"""(uint8[{dims[0]}] x, float{own} sa, uint8{own} za, uint8[{dims[1]}] w, float{other} sb, uint8{other} zb) => (uint8[q] y)
      <float sy = {{9.5}}, uint8 zy = {{100}}> {{ y = QLinearMatMul(x, sa, za, w, sb, zb, sy, zy) }}"""
    found = run_function(load_onnx(model(text, 10)), "main", [x, sa.astype("f4"), za, w, sb.astype("f4"), zb])
    low, scale = (v[:, None] if v.ndim == 1 else v for v in (za.astype("i8"), sa.astype("f8")))
    total = (x.astype("i8") - low) @ (w.astype("i8") - zb.astype("i8"))
    wanted = np.clip(np.rint(total * scale * sb / 9.5) + 100, 0, 255)
    assert np.shape(found) == wanted.shape
    assert np.max(np.abs(np.asarray(found, np.float64) - wanted)) <= 1  # of ties, which rounding of scales decides
    assert np.mean(np.asarray(found) != wanted) <= 0.1


@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("outputs", ["y, m, s", "y, m", "y, , s"])
def test_load_onnx_layer_norm_gives_mean_and_deviation(axis: int, outputs: str) -> None:
    """A large mean shows how the variance is computed."""
    x = (f(2, 3, 5) + 3000).astype(np.float32)
    axes = tuple(range(axis % 3, 3))
    g = f(*x.shape[axis % 3 :])
    names = ["q0, q1, q2", *(f"{n}0, {n}1, {n}2" for n in "ms" if n in outputs)]
    given = [n for n in outputs.split(", ") if n]
    results = ", ".join(f"float[{dims}] {name}" for name, dims in zip(given, names, strict=True))
    text = f"""(float[a, b, c] x, float[{", ".join("abc"[axis % 3 :])}] g) => ({results})
      {{ {outputs.replace(", ,", ', "",')} = LayerNormalization<axis = {axis}, epsilon = 0.001>(x, g) }}"""
    found = run_function(load_onnx(model(text, 17)), "main", [x, g])
    wide = x.astype(np.float64)
    mean = wide.mean(axes, keepdims=True)
    scale = 1 / np.sqrt(((wide - mean) ** 2).mean(axes, keepdims=True) + 1e-3)
    wanted = {"y": (wide - mean) * scale * g, "m": mean, "s": scale}
    for got, name in zip(found, given, strict=True):
        assert np.asarray(got).dtype == np.float32
        np.testing.assert_allclose(got, wanted[name], rtol=2e-3, atol=2e-3)
