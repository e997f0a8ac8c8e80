"""Vectors of 8-bit integers, and of pairs of 4-bit integers in bytes: every value, on both devices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.codegen.codegen_runner import Compiled, kernels_of, opened
from tests.support.effort import examples

from relax_tune.ir.codegen.lower.narrow_ints import fits, interval
from relax_tune.ir.core.dtype import DType, f32, i8, i32, u8
from relax_tune.ir.core.expr import Expr, add, cast, const, eq, floordiv, floormod, maximum, minimum, mul, select, sub
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.intervals import UNBOUNDED
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.interp.interp import run_prim
from relax_tune.schedules.schedule import Schedule


def number(value: int) -> Expr:
    return const(value, i32)


def low_bits(e: Expr) -> Expr:
    return floormod(e, number(16))


def high_bits(e: Expr) -> Expr:
    return floordiv(e, number(16))


def signed(bits: Expr) -> Expr:
    return sub(floormod(add(bits, number(8)), number(16)), number(8))


STEPS: dict[str, tuple[DType, Callable[[Expr], Expr]]] = {
    "low half": (u8, low_bits), "high half": (u8, high_bits),
    "signed low half": (u8, lambda e: cast(signed(low_bits(e)), i8)), "signed high half": (u8, lambda e: cast(signed(high_bits(e)), i8)),
    "less a zero point": (u8, lambda e: sub(low_bits(e), number(7))),
    "a code of sixteen": (u8, lambda e: sub(mul(low_bits(e), number(3)), number(5))),
    "low half of a signed byte": (i8, low_bits), "not a half": (i8, high_bits),
    "the right half": (u8, lambda e: select(eq(const(3) % 2, 0), low_bits(e), high_bits(e))),
    "does not fit": (i8, lambda e: cast(mul(e, number(3)), i8)), "wraps at 256": (u8, lambda e: cast(add(e, number(100)), u8)),
    "quarters of negatives": (i8, lambda e: floordiv(e, number(4))), "eights of negatives": (i8, lambda e: floormod(e, number(8))),
    "thirds": (i8, lambda e: floordiv(e, number(3))), "clipped": (i8, lambda e: cast(maximum(minimum(e, number(9)), number(-9)), i8)),
}  # fmt: skip


def spread(name: str, lanes: int) -> PrimFunc:
    """y[i] = the given step applied to x[i], for all 256 bytes, in vectors."""
    dtype, step = STEPS[name]
    b = TensorBuilder("bytes")
    x, y = b.input("x", (256,), dtype), b.output("y", (256,))
    b.compute(y, lambda i: cast(step(cast(x[i], i32)), f32), "decode")
    s = Schedule(b.finish())
    _, inner = s.split("decode_i", [None, lanes])
    s.vectorize(inner)
    return s.func


@pytest.mark.parametrize(
    "language", [pytest.param("c", marks=pytest.mark.ccompiler), pytest.param("opencl", marks=pytest.mark.opencl)]
)
def test_byte_conversion_of_every_value(language: str) -> None:
    device = opened(language)
    funcs = [spread(name, lanes) for name in STEPS for lanes in ((16, 4) if language == "c" else (8,))]
    bytes_ = np.arange(256, dtype=np.uint8)
    for func, run in zip(funcs, Compiled.together(device, language, funcs), strict=True):
        x = bytes_.view(func.input_buffers[0].dtype.numpy)
        expected = np.empty(256, np.float32)
        run_prim(func, [x, expected])
        (actual,) = run([x, np.empty_like(expected)])
        np.testing.assert_array_equal(actual, expected)
    device.close()


@pytest.mark.parametrize("name", [n for n in STEPS if n != "thirds"])
def test_decoding_is_vectorised(name: str) -> None:
    (kernel,) = kernels_of(spread(name, 16), "c")
    text = kernel.source.split("/*end prelude*/")[1]
    assert "rt_floor" not in text and text.count("x + ") <= 2, text


def drawn_expr(draw: st.DrawFn, x: Expr, depth: int) -> Expr:
    if depth == 0:
        return draw(st.sampled_from((x, number(draw(st.integers(-300, 300))))))
    e = drawn_expr(draw, x, depth - 1)
    c = number(draw(st.integers(1, 40)))
    kind = draw(st.sampled_from(("add", "sub", "mul", "div", "mod", "byte", "least", "choice")))
    if kind == "byte":
        return cast(cast(e, draw(st.sampled_from((i8, u8)))), i32)
    if kind == "choice":
        return select(eq(x, c), e, drawn_expr(draw, x, 0))
    return {"add": add, "sub": sub, "mul": mul, "div": floordiv, "mod": floormod, "least": minimum}[kind](e, c)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_interval_bounds_hold_for_all_values(data: st.DataObject) -> None:
    b = TensorBuilder("bounds")
    x, y = b.input("x", (256,), data.draw(st.sampled_from((i8, u8)))), b.output("y", (256,), i32)
    values: list[Expr] = []

    def value(i: Expr) -> Expr:
        values.append(drawn_expr(data.draw, cast(x[i], i32), data.draw(st.integers(1, 4))))
        return values[-1]

    b.compute(y, value, "some")
    func = b.finish()
    out = np.empty(256, np.int32)
    run_prim(func, [np.arange(256, dtype=np.uint8).view(func.input_buffers[0].dtype.numpy), out])
    bounds = interval(func.body.body.body.value)  # type: ignore[union-attr]
    if bounds != UNBOUNDED:
        assert bounds[0] is not None and bounds[1] is not None
        assert bounds[0] <= out.min() and out.max() <= bounds[1]
        assert fits(values[-1], i8) == (bounds[0] >= -128 and bounds[1] <= 127)
