"""Operators of com.microsoft that are nearly operators of the standard domain, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Input, check, f, whole


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, 1, -1])
def test_triangle(k: int | None, upper: int) -> None:
    check("Trilu", [Input(f(2, 4, 5), "b n m"), None if k is None else np.array(k)], upper=upper)


@pytest.mark.parametrize("pads", [[1, 0, 2, 1], [[1, 0, 2, 1]]], ids=["vector", "row"])
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_pad(mode: str, pads: Any) -> None:
    value = [np.array([0.5], np.float32)] if mode == "constant" else []
    check("Pad", [Input(f(3, 4), "n m"), np.array(pads), *value], mode=mode)


@pytest.mark.parametrize("kind", [np.float32, np.int32, np.int64])
@pytest.mark.parametrize("ends", [(1, 7, 2), (1, 7), (5, 0, -2)])
def test_range(ends: tuple[int, ...], kind: Any) -> None:
    check("Range", [np.array(e, kind) for e in ends])


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample(mode: str, padding: str) -> None:
    grid = (whole(-12, 13, 2, 3, 3, 2) / 10.3).astype(np.float32)
    inputs = [Input(f(2, 3, 4, 5), "b c h w"), Input(grid, "b p q 2")]
    check("GridSample", inputs, mode=mode, padding_mode=padding, rtol=1e-4, atol=1e-5)


def test_gather_nd() -> None:
    check("GatherND", [Input(f(3, 4, 5), "a b c"), Input(np.array([[0, 1], [2, -1]]), "n 2")])


@pytest.mark.parametrize("axis", [0, 1, -1, -3])
def test_expand_dims(axis: int) -> None:
    check("ExpandDims", [Input(f(3, 4), "n m"), np.array(axis, np.int32)])


def test_unique_keeps_the_order_of_occurrence() -> None:
    check("Unique", [Input(np.array([3, 1, 3, 2, 1], np.float32), "n")], 3)


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_distances(metric: str, kind: Any) -> None:
    sides = [Input(f(n, 4).astype(kind), f"{name} k") for n, name in ((3, "n"), (5, "m"))]
    check("CDist", sides, metric=metric, rtol=1e-4, atol=1e-5)


def test_distances_of_close_rows_have_all_digits() -> None:
    a, b = f(3, 4) + 1000, f(5, 4) + 1000

    def reference() -> list[np.ndarray[Any, Any]]:
        return [((a[:, None].astype(float) - b[None]) ** 2).sum(2).astype(np.float32)]

    check("CDist", [Input(a, "n k"), Input(b, "m k")], reference=reference, rtol=1e-5)


@pytest.mark.parametrize("a, b", [((3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5))])
def test_product_of_16_bit_integers(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    sides = [whole(-3000, 3000, *shape, dtype=np.int16) for shape in (a, b)]
    dims = ["n k", "k m"] if len(a) == 2 else ["b n k", "b k m"]
    check("MatMulInteger16", [Input(s, d) for s, d in zip(sides, dims, strict=True)])
