"""Our exp, log, erf and tanh: a dense sweep of all magnitudes and the special values, as vectors and as scalars."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, Var, call, ceildiv, const, load, lt
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, LoopKind

SPECIALS = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 88.7, 88.73, 89.0, -87.3, -87.4, -103.0, -103.9, -104.0, -1e9, 1e9, -1e14,
     3.4028235e38, -3.4028235e38, 1.1754944e-38, 1e-45, -1e-45, 9.09, 9.11, -9.11, 4.0, 4.01, -4.01, 0.70710678, 1.4142135],
    np.float32,
)  # fmt: skip
# largest error in units in the last place, as documented in ir/codegen/print/math.py
LIMITS = {"exp": 2, "log": 2, "erf": 6, "tanh": 6}
# the argument from which a function is 1 in single precision
ENDS = {"erf": 4.0, "tanh": 9.1}


def elementwise(name: str, width: int, kind: LoopKind) -> PrimFunc:
    """y = f(x), `width` elements at a time."""
    n, o, v, vi = Var("n"), Var("o"), Var("v"), Var("vi")
    x, y = Buffer("x", (n,), f32), Buffer("y", (n,), f32)
    at: Expr = o * width + v
    body = Block(name, (IterVar(vi, n),), (at,), BufferStore(y, (vi,), call(name, load(x, (vi,)))), None, lt(at, n))
    return PrimFunc(
        f"{name}{width}", (x, y), 1, For(o, ceildiv(n, const(width)), For(v, const(width), body, kind), tail="peel")
    )


def sweep() -> np.ndarray:
    """Every 1009th float of both signs, a fine grid over [-12, 12], and the special values."""
    bits = np.arange(0, 0x7F800000, 1009 * 17, dtype=np.int64).astype(np.int32).view(np.float32)
    grid = np.linspace(-12, 12, 200_001, dtype=np.float32)
    return np.concatenate([bits, -bits, grid, np.linspace(-110, 95, 100_003, dtype=np.float32), SPECIALS])


def exact(name: str, x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        if name == "erf":
            return np.array([math.erf(v) for v in wide])
        functions: dict[str, Callable[[np.ndarray], np.ndarray]] = {"exp": np.exp, "log": np.log, "tanh": np.tanh}
        return functions[name](wide)


def ulps(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The error in units in the last place of the exact value (of the smallest normal below that)."""
    with np.errstate(all="ignore"):
        rounded = expected.astype(np.float32)
        same = (actual == rounded) | (np.isnan(actual) & np.isnan(rounded))
        spacing = np.maximum(np.spacing(np.abs(rounded)).astype(np.float64), 2.0**-149)
        return np.where(same, 0.0, np.abs(actual.astype(np.float64) - expected) / spacing)


@pytest.mark.process
@pytest.mark.parametrize("language", ["c", "opencl"])
@pytest.mark.parametrize("name", sorted(LIMITS))
def test_accuracy(language: str, name: str) -> None:
    device = opened(language)
    x = sweep()
    expected = exact(name, x)
    lanes = 16 if language == "c" else 8
    for width, kind in ((lanes, "vectorized"), (4, "vectorized"), (1, "serial")):
        run = Compiled(device, language, elementwise(name, width, kind))
        (y,) = run([x, np.empty_like(x)])
        error = ulps(y, expected)
        worst = int(np.argmax(np.where(np.isnan(error), np.inf, error)))
        assert error[worst] <= LIMITS[name], (
            f"{name} x{width}: {x[worst]!r} gives {y[worst]!r}, expected {expected[worst]!r}"
        )
    device.close()


@pytest.mark.process
@pytest.mark.parametrize("language", ["c", "opencl"])
@pytest.mark.parametrize("name", sorted(ENDS))
def test_bounded_function_at_ends_is_one(language: str, name: str) -> None:
    device = opened(language)
    low, high = np.float32([ENDS[name] * 0.9, ENDS[name] * 1.1]).view(np.int32)
    near = np.arange(low, high, 3, dtype=np.int32).view(np.float32)
    far = np.float32([ENDS[name], 1e4, 1e19, 1e30, 3.4028235e38, np.inf])
    x = np.concatenate([near, -near, far, -far])
    for width, kind in ((8, "vectorized"), (1, "serial")):
        (y,) = Compiled(device, language, elementwise(name, width, kind))([x, np.empty_like(x)])
        assert np.all(np.abs(y) <= 1) and np.array_equal(np.signbit(y), np.signbit(x))
        assert np.array_equal(y[-len(far) :], np.full(len(far), -1, np.float32))
        assert np.array_equal(y[-2 * len(far) : -len(far)], np.ones(len(far), np.float32))
    device.close()
