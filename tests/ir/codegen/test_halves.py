"""16-bit floats from and to f32: every bit pattern and every kind of rounding, compared with NumPy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.ir.codegen import codegen_cases as make
from tests.ir.codegen.codegen_runner import Compiled, opened

from relax_tune.ir.core.dtype import DType, bf16, f16, f32, f64
from relax_tune.ir.core.expr import cast
from relax_tune.ir.core.function import PrimFunc

HALVES = (f16, bf16)


def casts(language: str, kind: Any, source: DType, target: DType) -> PrimFunc:
    tile = 16 if language == "c" else 8
    return make.pointwise(
        language, (2, tile), ("serial", kind), ("peel", "predicate"), lambda x: cast(x, target), source, target
    )


def around_every_pattern(half: DType) -> NDArray[np.float32]:
    """Each value, its neighbours in f32, the tie above it with its neighbours, and the last float before the next value."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(half.numpy).astype(np.float32).view(np.uint32)
    step = 1 << (13 if half is f16 else 16)
    near = [bits + np.uint32(o) for o in (0, 1, step // 2 - 1, step // 2, step // 2 + 1, step - 1)]
    small = np.random.default_rng(1).integers(0, 0x3A000000, 50000, dtype=np.uint32)  # into the subnormals of both
    return np.concatenate([*near, small, small | np.uint32(1 << 31)]).view(np.float32)


def same_bits(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    """Whether arrays are equal bit for bit; all NaNs count as equal."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    view = np.uint16 if expected.itemsize == 2 else np.uint32
    np.testing.assert_array_equal(actual[~nan].view(view), expected[~nan].view(view))


@pytest.mark.process
@pytest.mark.parametrize("language", ["c", "opencl"])
def test_half_conversions_match_numpy_bitwise(language: str) -> None:
    device = opened(language)
    kinds = ("vectorized", "serial")
    cases = [(k, h, up) for k in kinds for h in HALVES for up in (True, False)]
    funcs = [casts(language, k, *((h, f32) if up else (f32, h))) for k, h, up in cases]
    for (_kind, half, up), run in zip(cases, Compiled.together(device, language, funcs), strict=True):
        with np.errstate(all="ignore"):
            x = np.arange(1 << 16, dtype=np.uint16).view(half.numpy) if up else around_every_pattern(half)
            expected = x.astype(np.float32 if up else half.numpy)
        (actual,) = run([x, np.empty_like(expected)])
        same_bits(actual, expected)
    device.close()


@pytest.mark.process
@pytest.mark.parametrize("language", ["c", "opencl"])
def test_f64_is_rounded_to_f16_once(language: str) -> None:
    device = opened(language)
    tie = 1 + 2.0**-11  # between two 16-bit floats
    x = np.array(
        [tie, np.nextafter(tie, 2), np.nextafter(tie, 0), -np.nextafter(tie, 2), 65519.999999, 65520, 1e300, -1e-300, 0]
    )
    with np.errstate(all="ignore"):
        expected = x.astype(np.float16)
    (actual,) = Compiled(device, language, casts(language, "serial", f64, f16))([x, np.empty_like(expected)])
    same_bits(actual, expected)
    device.close()
