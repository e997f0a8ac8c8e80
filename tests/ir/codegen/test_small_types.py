"""Types of at most 8 bits, loaded and stored: every code and every kind of rounding, compared with ml_dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cuda_emulation.driver import emulated
from tests.ir.codegen.codegen_cases import pointwise
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.ir.codegen.test_halves import casts
from tests.support.effort import some

from relax_tune.errors import VerifyError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import SMALL, DType, bf16, f4e2m1, f8e4m3fn, f8e8m0, f16, f32, f64, i32, i64
from relax_tune.ir.core.expr import add, cast, const
from relax_tune.ir.core.scalar_ops import converted
from relax_tune.ir.interp.interp import run_prim

Array = NDArray[Any]
FLOATS = tuple(d for d in SMALL if d.is_float)
LANGUAGES = [
    pytest.param("c", marks=pytest.mark.ccompiler), pytest.param("opencl", marks=pytest.mark.opencl),
    pytest.param("cuda", marks=pytest.mark.ccompiler),
]  # fmt: skip


def codes(dtype: DType) -> Array:
    return np.arange(1 << dtype.bits, dtype=np.uint8).view(dtype.numpy)


def around_every_border(dtype: DType) -> NDArray[np.float64]:
    """Each number, the midpoint to the next one, the neighbours of both in f32 and f64, and the ends."""
    every = codes(dtype).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    ends = [1.5 * every[-1] - 0.5 * every[-2], 2.0 * every[-1], 1e38, 1e-38, 1e-45, 1e300, 1e-300, 0.0, np.inf, np.nan]
    exact = np.concatenate([every, (every[1:] + every[:-1]) / 2, ends, [-x for x in ends]])
    narrow = exact.astype(np.float32)
    near = [np.nextafter(narrow, np.float32(end)).astype(np.float64) for end in (np.inf, -np.inf)]
    return np.concatenate([exact, *near, *(np.nextafter(exact, end) for end in (np.inf, -np.inf))])


def rounded(x: float, dtype: DType) -> float:
    """The nearest number of a type as the specification defines it, ties to the even code."""
    every = codes(dtype).astype(np.float64)
    finite = np.flatnonzero(np.isfinite(every) & ~np.signbit(every))
    numbers, size = every[finite], abs(x)
    step = numbers[-1] - numbers[-2]
    if np.isnan(x):
        return float(dtype.numpy.type(np.nan))
    end = numbers[-1] + step / 2
    if size > end or (
        size == end and finite[-1] % 2
    ):  # nearer to a number that the type lacks, or a tie to its even code
        return float(np.sign(x) * dtype.numpy.type(np.inf).astype(np.float64))
    distance = np.abs(numbers - size)
    nearest = finite[distance == distance.min()]
    nearest_value = every[min(nearest, key=lambda code: code % 2)]
    return float(np.copysign(nearest_value, x))


def same(actual: Array, expected: Array) -> None:
    """Whether codes are equal; all NaNs count as equal."""
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    view = np.uint8 if expected.itemsize == 1 else np.uint32
    np.testing.assert_array_equal(actual[~nan].view(view), expected[~nan].view(view))


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d is not f8e8m0], ids=str)
def test_converted_rounds_floats_once(dtype: DType) -> None:
    with np.errstate(all="ignore"):
        x = around_every_border(dtype)
        x = x[np.abs(x) < 2 * dtype.highest]
        expected = np.array([rounded(v, dtype) for v in x])
        np.testing.assert_array_equal(converted(x, dtype).astype(np.float64), expected)
        narrow = x.astype(np.float32)
        same(converted(narrow, dtype), narrow.astype(dtype.numpy))


@pytest.mark.process
@pytest.mark.parametrize("language", LANGUAGES)
def test_small_type_conversions_match_numpy(language: str, tmp_path: Path) -> None:
    device = emulated(tmp_path) if language == "cuda" else opened(language)
    cases = []
    for d in SMALL if language == "c" else some(SMALL):  # the text is the same
        wide = f32 if d.is_float else i32
        cases += [(d, "vectorized", d, wide), (d, "vectorized", wide, d)]
    for d in some(SMALL):  # one helper has all floats, another all integers
        wide = f32 if d.is_float else i32
        cases += [(d, "serial", d, wide), (d, "serial", wide, d), (d, "serial", f64, d)]
    funcs = [casts(language, kind, source, target) for _, kind, source, target in cases]
    numbers = np.random.default_rng(1).integers(-(2**31), 2**31, 500)
    for (d, _, source, target), run in zip(cases, Compiled.together(device, language, funcs), strict=True):
        with np.errstate(all="ignore"):
            if source is d:
                x = np.resize(codes(d), 256 + 64 + 3)
            else:
                x = around_every_border(d) if d.is_float else np.concatenate([np.arange(-40, 40), numbers])
                x = converted(
                    x[x == x] if d is f4e2m1 else x, source
                )  # a type without NaN stores a zero for it, of any sign
            expected = converted(x, target)
        outputs = [np.empty_like(expected)]
        same(run([x, *outputs])[0], expected)
    device.close()


@pytest.mark.parametrize("source", [f16, bf16, f64, i32, i64], ids=str)
def test_interpreter_casts_small_types_as_converted(source: DType) -> None:
    x = np.array([0, 1, -1, 2, 3, 7, 17, 300, 464, 465, 70000, -70000], np.float64)
    x = converted(np.concatenate([x, x + 0.0625]), source)
    for d in SMALL:
        with np.errstate(all="ignore"):
            expected = converted(x if source.is_float else x.astype(np.float32), d) if d.is_float else converted(x, d)
            for vectorise in (True, False):
                actual = np.empty_like(expected)
                run_prim(casts("c", "serial", source, d), [x, actual], vectorise=vectorise)
                same(actual, expected)


def test_integer_types_of_few_bits_wrap() -> None:
    x = np.array([300, -9, 8, 7, -8, 3, -3])
    for name in ("int4", "uint4", "int2", "uint2"):
        (d,) = (d for d in SMALL if d.name == name)
        low, size = int(ml_dtypes.iinfo(name).min), 1 << d.bits
        expected = (x - low) % size + low
        assert converted(x, d).astype(np.int64).tolist() == expected.tolist()
        assert [const(int(v), d).value for v in x] == expected.tolist()
        for source in (s for s in SMALL if s.is_int):
            every = codes(source).astype(np.int64)
            assert converted(codes(source), d).astype(np.int64).tolist() == ((every - low) % size + low).tolist()


def test_literal_of_small_float_is_rounded() -> None:
    assert cast(cast(const(300.0, f32), f8e4m3fn), f32).value == 288.0
    assert np.isnan(const(500.0, f8e4m3fn).value)


def test_verify_arithmetic_of_small_types_raises() -> None:
    func = casts("c", "serial", f8e4m3fn, f8e4m3fn)
    verify(func)
    wrong = pointwise("c", (2, 8), ("serial", "serial"), ("peel", "peel"), lambda x: add(x, x), f8e4m3fn, f8e4m3fn)
    with pytest.raises(VerifyError, match="arithmetic for add, got f8e4m3fn"):
        verify(wrong)
