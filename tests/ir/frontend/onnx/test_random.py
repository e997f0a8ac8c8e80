"""Random numbers of ONNX nodes: the generator's known numbers, moments, seeds, and the same numbers at every call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import model

from relax_tune.ir.core.dtype import u64
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.frontend.shared.finish import finish_import
from relax_tune.ir.frontend.shared.handlers.random import philox
from relax_tune.ir.frontend.shared.writer import Writer
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

Array = np.ndarray[Any, Any]


def drawn(text: str, *inputs: Array, opset: int = 22) -> list[Array]:
    """The results of a model, the same before and after lowering."""
    module = load_onnx(model(text, opset))
    first, second = (evaluate_function(m, list(inputs)) for m in (module, lower(module).module))
    first, second = (found if isinstance(found, tuple) else (found,) for found in (first, second))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return [np.asarray(a) for a in first]


@pytest.mark.parametrize("counter, key, wanted", [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])  # fmt: skip
def test_philox_gives_the_numbers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    w = Writer(GraphBuilder())
    values = [w.g.input(f"c{k}", [], u64) for k in range(4)]
    module = finish_import(w, [w.of(v) for v in philox(w, values, key)], list("abcd"))
    assert tuple(int(v) for v in evaluate_function(module, [np.asarray(c, np.uint64) for c in counter])) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("number, element", [(1, "float"), (11, "double"), (10, "float16"), (16, "bfloat16")])
def test_random_floats_have_stated_moments(number: int, element: str) -> None:
    like = f"Like<dtype = {number}"
    kinds = f"{element}[n, m] a, {element}[n, m] b, {element}[n, m] c, {element}[n, m] d"
    nodes = f"a = RandomNormal{like}>(x)\n b = RandomNormal{like}, mean = 3.0, scale = 0.5>(x)\n c = RandomUniform{like}>(x)\n"
    text = f"(float[n, m] x) => ({kinds}) {{ {nodes} d = RandomUniform{like}, low = -3.0, high = 5.0>(x) }}"
    module = load_onnx(model(text, 22))
    found = evaluate_function(module, [np.zeros((211, 97), np.float32)])
    a, b, c, d = (np.asarray(v, np.float64).reshape(-1) for v in found)
    off = 0.01 if element in ("float", "double") else 0.02
    for values, mean, deviation in ((a, 0, 1), (b, 3, 0.5), (c, 0.5, 12**-0.5), (d, 1, 8 * 12**-0.5)):
        error = 5 * deviation / np.sqrt(values.size) + off * deviation
        assert abs(values.mean() - mean) < error and abs(values.std() / deviation - 1) < 0.03
    assert 0 <= c.min() < 0.01 and 0.99 < c.max() < 1 and d.min() >= -3 and d.max() < 5
    for x, y in ((a, b), (c, d), (a, c), (a[1:], a[:-1])):  # nodes differ, and so do neighbours
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.04
    assert np.mean(np.abs(a) < 1) == pytest.approx(0.6827, abs=0.02)


def test_random_nodes_follow_seed_or_place() -> None:
    text = "(float[n] x) => (float[n] a, float[n] b, float[n] c, float[n] d) {{ {} }}"
    nodes = " ".join(
        f"{y} = RandomUniformLike{s}(x)\n" for y, s in zip("abcd", ("<seed = 2.5>", "", "<seed = 2.5>", ""))
    )
    for size in (1, 7, 64):
        x = np.zeros(size, np.float32)
        a, b, c, d = drawn(text.format(nodes), x)
        np.testing.assert_array_equal(a, c)
        assert not np.array_equal(a, b) and not np.array_equal(b, d)
        again = drawn(text.format(nodes), x)
        np.testing.assert_array_equal(np.stack([a, b, c, d]), np.stack(again))


def test_random_numbers_of_a_fixed_shape() -> None:
    a, b = drawn(
        "() => (float[3, 1] a, double[2] b) { a = RandomNormal<shape = [3, 1]>()\n b = RandomUniform<shape = [2], dtype = 11>() }"
    )
    assert a.shape == (3, 1) and b.shape == (2,) and b.dtype == np.float64


@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0])
def test_bernoulli_is_one_with_the_given_chance(chance: float) -> None:
    (found,) = drawn(
        "(float[n, m] x) => (int32[n, m] y) { y = Bernoulli<dtype = 6>(x) }", np.full((60, 61), chance, np.float32)
    )
    assert found.dtype == np.int32 and set(np.unique(found)) <= {0, 1}
    assert found.mean() == pytest.approx(chance, abs=0.03 if 0 < chance < 1 else 0)


def test_multinomial_draws_classes_by_weights() -> None:
    weights = np.array([[0.1, 0.0, 0.2, 0.7, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25, 0.0]])
    with np.errstate(divide="ignore"):
        logs = np.log(weights).astype(np.float32)
    (found,) = drawn("(float[n, m] x) => (int32[n, 4000] y) { y = Multinomial<sample_size = 4000>(x) }", logs)
    assert found.shape == (3, 4000) and found.dtype == np.int32
    for row, wanted in zip(found, weights, strict=True):
        np.testing.assert_allclose(np.bincount(row, minlength=5) / 4000, wanted, atol=0.03)
        assert not np.bincount(row, minlength=5)[wanted == 0].any()


def test_dropout_in_training_scales_kept_elements() -> None:
    text = (
        "(float[n, m] x) => (float[n, m] y, bool[n, m] k) <float r = {0.3}, bool t = {1}> { y, k = Dropout(x, r, t) }"
    )
    y, kept = drawn(text, np.full((70, 71), 2.0, np.float32))
    np.testing.assert_allclose(y, np.where(kept, 2 / 0.7, 0), rtol=1e-6)
    assert kept.mean() == pytest.approx(0.7, abs=0.03)
