"""Conditions on indices that differ between the lanes of a vector: one comparison, where lanes differ by whole numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import TARGETS, Compiled, opened

from relax_tune.ir.codegen.generate import generate
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.text.parser import parse_prim_func

Meets = Callable[[np.ndarray, np.ndarray], np.ndarray]
# a condition on row r and element e, and the same condition on arrays
CONDITIONS: dict[str, tuple[str, Meets]] = {
    "pairs": ("(r * 8 + e) // 2 <= n", lambda i, n: i // 2 <= n),
    "pairs from below": ("n < (r * 8 + e) // 2", lambda i, n: n < i // 2),
    "thirds": ("(r * 8 + e) // 3 < n - r", lambda i, n: i // 3 < n - i // 8),
    "remainders": ("(r * 8 + e) % 4 <= n", lambda i, n: i % 4 <= n),
    "reversed": ("7 - e + r * 8 < n", lambda i, n: 7 - i % 8 + i // 8 * 8 < n),
    "steps of 1000": ("e * 1000 + r < n", lambda i, n: i % 8 * 1000 + i // 8 < n),
}
AT_ONCE = ("pairs", "pairs from below", "remainders", "reversed", "steps of 1000")


def guarded_copy(name: str) -> PrimFunc:
    """A function that keeps the elements of rows that meet a condition."""
    return parse_prim_func(f"""@prim_func(outputs=1)
def guarded_copy(x: Buffer((m, 8), f32), n: i64, y: Buffer((m, 8), f32)):
    for r in serial(m):
        for e in vectorized(8):
            y[r, e] = select({CONDITIONS[name][0]}, x[r, e], 0.0)
""")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=getattr(pytest.mark, m)) for k, m in (("c", "ccompiler"), ("opencl", "opencl"))]
)
def test_lanes_meet_conditions_as_single_elements_do(kind: str) -> None:
    device = opened(kind)
    x = 1 + np.arange(9 * 8, dtype=np.float32).reshape(9, 8)
    kernels = Compiled.together(device, kind, [guarded_copy(name) for name in CONDITIONS])
    for run, (name, (_, meets)) in zip(kernels, CONDITIONS.items(), strict=True):
        for n in (-(1 << 40), -3, 0, 1, 2, 3, 4, 7, 8, 17, 35, 36, 4003, 7007, 1 << 40):
            (actual,) = run([x, np.empty_like(x)], [n])
            expected = np.where(meets(np.arange(x.size).reshape(x.shape), n), x, 0)
            np.testing.assert_array_equal(actual, expected, f"{name}, n = {n}")
    device.close()


# the same with bounds from memory, which may be anything
BOUNDS_FROM_MEMORY = {
    "pairs": ("e // 2 < n[r]", lambda i, n: i % 8 // 2 < n[:, None]),
    "pairs from below": ("n[r] < e // 2", lambda i, n: n[:, None] < i % 8 // 2),
    "lanes": ("e < n[r]", lambda i, n: i % 8 < n[:, None]),
    "lanes from below": ("n[r] < e", lambda i, n: n[:, None] < i % 8),
    "lanes to the bound": ("e <= n[r]", lambda i, n: i % 8 <= n[:, None]),
    "lanes and more": ("e + r * 8 <= n[r]", lambda i, n: i <= n[:, None]),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=getattr(pytest.mark, m)) for k, m in (("c", "ccompiler"), ("opencl", "opencl"))],
)
def test_bounds_from_memory_at_the_ends_of_int64_are_met_as_whole_numbers(kind: str) -> None:
    device, low, high = opened(kind), -(1 << 63), (1 << 63) - 1
    n = np.array([low, low + 1, -1, 0, 3, 30, 1 << 40, high - 1, high], np.int64)
    x = 1 + np.arange(n.size * 8, dtype=np.float32).reshape(n.size, 8)
    funcs = [
        parse_prim_func(f"""@prim_func(outputs=1)
def bounded(x: Buffer((m, 8), f32), n: Buffer((m,), i64), y: Buffer((m, 8), f32)):
    for r in serial(m):
        for e in vectorized(8):
            y[r, e] = select({text}, x[r, e], 0.0)
""")
        for text, _ in BOUNDS_FROM_MEMORY.values()
    ]
    for run, (name, (_, meets)) in zip(Compiled.together(device, kind, funcs), BOUNDS_FROM_MEMORY.items(), strict=True):
        (actual,) = run([x, n, np.empty_like(x)])
        expected = np.where(meets(np.arange(x.size).reshape(x.shape).astype(object), n.astype(object)), x, 0)
        np.testing.assert_array_equal(actual, expected, name)
    device.close()


@pytest.mark.parametrize("name", AT_ONCE)
def test_condition_of_lanes_is_one_comparison(name: str) -> None:
    source = generate(guarded_copy(name), TARGETS["c"]).source
    assert "-(int)(" not in source and source.count(">=") == 1
