"""Chains of maxima and minima, which test for NaN once: a NaN at every position, among infinities and zeros."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened

from relax_tune.ir.core.expr import Expr, Var, add, const, maximum, minimum, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.schedule import Schedule

NEAR = 5


def near(values: str) -> PrimFunc:
    """Each result is computed from five neighbours: their range, their maximum, or their minimum and 0.5."""
    n = Var("n")
    b = TensorBuilder("near")
    x, y = b.input("x", (add(n, NEAR - 1),)), b.output("y", (n,))

    def value(i: Expr) -> Expr:
        terms = [x[add(i, k)] for k in range(NEAR)]
        if values == "range":
            return reduce(maximum, terms) - reduce(minimum, terms)
        if values == "balanced":
            return maximum(maximum(terms[0], terms[1]), maximum(terms[2], maximum(terms[3], terms[4])))
        if values == "twice":  # a part of the chain is also a separate value
            inner = reduce(maximum, terms[:3])
            return add(maximum(maximum(inner, terms[3]), terms[4]), mul(inner, const(2.0)))
        return reduce(minimum, [*terms, const(0.5)])

    b.compute(y, value, "near")
    return b.finish()


def expected(values: str, x: np.ndarray) -> np.ndarray:
    terms = np.stack([x[k : len(x) - NEAR + 1 + k] for k in range(NEAR)])
    with np.errstate(invalid="ignore"):
        if values == "range":
            return terms.max(0) - terms.min(0)
        if values == "balanced":
            return terms.max(0)
        if values == "twice":
            return terms.max(0) + 2 * terms[:3].max(0)
        return np.minimum(terms.min(0), np.float32(0.5))


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.parametrize("width", [4, 8])
def test_nan_of_any_place_is_the_result(width: int) -> None:
    device, cases = opened("c"), []
    for values in ("range", "balanced", "twice", "limited"):
        s = Schedule(near(values))
        _, lanes = s.split("near_i", [None, width])
        s.vectorize(lanes)
        cases.append((values, s.func))
    rng = np.random.default_rng(0)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3.0], np.float32)
    for (values, _), run in zip(cases, Compiled.together(device, "c", [f for _, f in cases]), strict=True):
        assert any("rt_unordered_f32" in k.source.split("/*end prelude*/")[1] for k in run.kernels)
        for n in (1, 7, 8, 40):
            for share in (0.0, 0.2, 0.7):
                x = rng.standard_normal(n + NEAR - 1, np.float32)
                x = np.where(rng.random(x.shape) < share, rng.choice(special, x.shape), x).astype(np.float32)
                (actual,) = run([x, np.empty(n, np.float32)])
                np.testing.assert_array_equal(actual, expected(values, x))
    device.close()
