"""DFT, STFT and MelWeightMatrix of ONNX, over symbolic dims, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy import fft
from tests.ir.frontend.onnx.onnx_models import check, model

from relax_tune.errors import ParseError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

Array = np.ndarray[Any, Any]
LENGTHS = (1, 2, 7, 16, 31)


def signal(*dims: int) -> Array:
    return np.random.default_rng(dims).standard_normal(dims).astype(np.float32)


def numbers(x: Array) -> Array:
    """A signal as complex numbers."""
    x = x.astype(np.float64)
    return x[..., 0] + 1j * (x[..., 1] if x.shape[-1] == 2 else 0)


def parts(z: Array) -> Array:
    return np.stack([z.real, z.imag], -1)


def agree(proto: Any, x: Array, wanted: Array) -> None:
    module = load_onnx(proto)
    verify(module)
    for form in (module, lower(module).module):
        found = evaluate_function(form, [x])
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6 * max(1.0, float(np.abs(wanted).max())))


def transform(more: str, kept: int, opset: int = 20, inputs: str = "x") -> Any:
    values = "<int64 axis = {0}, int64 last = {-2}, int64 length = {9}>" if opset == 20 else "<int64 length = {9}>"
    return model(f"(float[n, b, {kept}] x) => (float[p, q, r] y) {values} {{ y = DFT{more}({inputs}) }}", opset)


@pytest.mark.slow
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("kept", (1, 2))
def test_dft_of_symbolic_lengths(n: int, kept: int) -> None:
    x = signal(3, n, kept)
    z = numbers(x)
    agree(transform("", kept, 17), x, parts(fft.fft(z, axis=1)))
    agree(transform("<axis = -3, inverse = 1>", kept, 19), x, parts(fft.ifft(z, axis=0)))
    agree(transform("", kept), x, parts(fft.fft(z, axis=1)))
    agree(transform("<onesided = 1>", kept, 20, "x, length, axis"), x, parts(fft.fft(z, 9, axis=0)[:5]))
    agree(transform("<inverse = 1>", kept, 20, "x, length, last"), x, parts(fft.ifft(z, 9, axis=1)))
    agree(transform("<inverse = 1, onesided = 1>", kept, 20, "x, length"), x, fft.irfft(z, 9, axis=1)[..., None])
    if n > 1:
        agree(transform("<inverse = 1, onesided = 1>", kept), x, fft.irfft(z, axis=1)[..., None])


def test_dft_length_may_be_a_dim() -> None:
    proto = model(
        "(float[b, n, 1] x, float[m] z) => (float[b, k, 2] y) { s = Shape(z)\n l = Squeeze(s)\n y = DFT<onesided = 1>(x, l) }"
    )
    check(proto, [signal(2, 5, 1), signal(8)])
    check(proto, [signal(2, 5, 1), signal(3)])


def test_dft_of_other_types() -> None:
    for name, kind in (("double", np.float64), ("float16", np.float16)):
        x = signal(2, 12, 1).astype(kind)
        module = load_onnx(model(f"({name}[b, n, 1] x) => ({name}[b, n, 2] y) {{ y = DFT(x) }}"))
        wanted = parts(fft.fft(numbers(x), axis=1))
        found = evaluate_function(lower(module).module, [x])
        np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-2 if kind is np.float16 else 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("n", (8, 9, 31, 64))
def test_stft_of_symbolic_lengths(n: int) -> None:
    window = np.hanning(8).astype("f4")
    values = f"<int64 s = {{3}}, int64 l = {{8}}, float[8] w = {{{', '.join(map(str, window))}}}>"
    for kept, more, inputs, by, full in (
        (1, "", "x, s, w", window, False), (1, "<onesided = 0>", "x, s, , l", np.ones(8), True),
        (2, "<onesided = 0>", "x, s, w, l", window, True),
    ):  # fmt: skip
        x = signal(2, n, kept)
        frames = np.stack([numbers(x)[:, k : k + 8] * by for k in range(0, n - 7, 3)], 1)
        wanted = parts(fft.fft(frames)[..., : 8 if full else 5])
        agree(
            model(f"(float[b, n, {kept}] x) => (float[b, f, k, 2] y) {values} {{ y = STFT{more}({inputs}) }}"),
            x,
            wanted,
        )


def test_stft_of_a_computed_window() -> None:
    text = (
        """(float[b, n, 1] x, float[m] w) => (float[b, f, k, 2] y) <int64 s = {2}> { v = Abs(w)\n y = STFT(x, s, v) }"""
    )
    check(model(text), [signal(2, 11, 1), signal(5)])
    check(model(text), [signal(1, 6, 1), signal(6)])


def test_mel_weights_are_a_constant() -> None:
    values = "<int64 m = {{{0}}}, int64 d = {{{1}}}, int64 r = {{{2}}}, float low = {{{3}}}, float high = {{{4}}}>"
    for given in ((8, 16, 8192, 0.0, 4096.0), (40, 512, 16000, 20.0, 8000.0), (5, 7, 8000, 60.0, 3000.0)):
        text = "(float[n, k] x) => (float[n, c] y) " + values.format(*given)
        proto = model(text + " { v = MelWeightMatrix(m, d, r, low, high)\n y = MatMul(x, v) }")
        check(proto, [signal(3, given[1] // 2 + 1)])


def refused(text: str, opset: int = 20) -> str:
    with pytest.raises(ParseError) as error:
        load_onnx(model(text, opset))
    return str(error.value)


def test_wrong_signals_are_refused_by_name() -> None:
    assert "operator DFT" in (said := refused("(float[b, n, c] x) => (float[b, n, 2] y) { y = DFT(x) }"))
    assert "expected a signal whose last dim is 1 for real or 2 for complex numbers" in said and "reshape it" in said
    said = refused("(float[b, n, 2] x) => (float[b, n, 2] y) <int64 a = {2}> { y = DFT(x, , a) }")
    assert "expected an axis but the last" in said
    said = refused("(float[b, n, 2] x, int64 a) => (float[b, n, 2] y) { y = DFT(x, , a) }")
    assert "expected input 2 to be constant" in said
    said = refused("(float[b, 4, 1] x) => (float[b, f, k, 2] y) <int64 s = {2}, int64 l = {5}> { y = STFT(x, s, , l) }")
    assert "operator STFT" in said and "expected a signal of at least 5 elements, got 4; pad it first" in said
    said = refused("(float[b, n, 1] x) => (float[b, f, k, 2] y) <int64 s = {0}, int64 l = {5}> { y = STFT(x, s, , l) }")
    assert "expected a frame_step of at least 1, got 0" in said
    said = refused(
        "(int64 m) => (float[a, b] y) <int64 d = {8}, float f = {9.0}> { y = MelWeightMatrix(m, d, d, f, f) }"
    )
    assert "operator MelWeightMatrix" in said and "expected input 0 to be one constant" in said
