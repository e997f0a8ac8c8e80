"""Special functions against scipy in float64, and random numbers of torch programs by their moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import bool_, f32, f64, i64
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.shared.finish import finish_import
from relax_tune.ir.frontend.shared.writer import Writer
from relax_tune.ir.frontend.torch import special
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.frontend.torch.program import Ref, TorchCall, TorchProgram, TorchSymbol, TorchTensor
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.passes.pipeline import lower

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(2)
WIDE = np.concatenate([RNG.uniform(-30, 30, 999), RNG.uniform(0, 1, 99), 10.0 ** RNG.uniform(-10, 8, 99)])
UNIT = np.concatenate([RNG.uniform(-1, 1, 999), 1 - 10.0 ** RNG.uniform(-15, -1, 99), 10.0 ** RNG.uniform(-30, 0, 99)])
CHANCE = np.concatenate(
    [RNG.uniform(0, 1, 999), 10.0 ** RNG.uniform(-300, 0, 99), 1 - 10.0 ** RNG.uniform(-15, -1, 99)]
)
EDGES = np.array([0.0, -0.0, np.inf, np.nan, -1.0, -2.0, 1.0, 2.0])


def computed(function: Callable[[special.Formula], special.Formula], x: Array) -> Array:
    w = Writer(GraphBuilder())
    n = w.g.symbol("n", 1, None)
    value = function(special.Formula(w, w.g.input("x", [n], f64))).value
    with np.errstate(all="ignore"):
        return np.asarray(evaluate_function(finish_import(w, [w.of(value)], ["y"]), [x]))


@pytest.mark.parametrize("function, name, x, bound", [
    (special.lgamma, "gammaln", WIDE, 2e-11), (special.digamma, "digamma", WIDE, 2e-11),
    *[(lambda v, n=n: special.polygamma(n, v), n, np.abs(WIDE), 1e-13) for n in (1, 2, 5, 20)],
    (special.erfc, "erfc", WIDE[np.abs(WIDE) < 26], 1e-13), (special.erfcx, "erfcx", WIDE[WIDE > -26], 1e-13),
    (special.erfinv, "erfinv", UNIT, 1e-14), (special.ndtri, "ndtri", CHANCE, 1e-13),
    (lambda v: special.bessel_i(0, v), "i0", WIDE, 1e-13), (lambda v: special.bessel_i(1, v), "i1", WIDE, 1e-13),
    (lambda v: special.scaled_bessel_i(0, v), "i0e", WIDE, 1e-13), (lambda v: special.scaled_bessel_i(1, v), "i1e", WIDE, 1e-13),
])  # fmt: skip
def test_special_function_keeps_bound(
    function: Callable[[special.Formula], special.Formula], name: str | int, x: Array, bound: float
) -> None:
    """Relative errors against scipy, beside zeros of lgamma and digamma those of values of 1e-3."""
    scipy_special = pytest.importorskip("scipy.special", reason="needs scipy, which judges: pip install scipy")
    floor = 1e-3 if name in ("gammaln", "digamma") else 1e-300
    for values in (x, EDGES):
        with np.errstate(all="ignore"):
            wanted = (
                scipy_special.polygamma(name, values) if isinstance(name, int) else getattr(scipy_special, name)(values)
            )
            found = computed(function, values)
            error = np.abs(found - wanted) / np.maximum(np.abs(wanted), floor)
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        assert np.max(np.where(same, 0, error), initial=0) < bound


def program(*calls: TorchCall) -> TorchProgram:
    """A program of x (n, 5) that returns the result of each call."""
    outputs = tuple((f"y{k}", Ref(c.name)) for k, c in enumerate(calls))
    x = TorchTensor(("n", 5), f32, "torch.float32")
    return TorchProgram((TorchSymbol("n", 1, None),), (("x", x),), {}, {}, calls, outputs)


def call(name: str, op: str, *args: Any, element: Any = f32, dims: Any = ("n", 5), **kwargs: Any) -> TorchCall:
    return TorchCall(name, op, args, kwargs, TorchTensor(dims, element, str(element)), "")


def drawn(x: Array, *calls: TorchCall) -> list[Array]:
    module = import_program(program(*calls))
    first, second = (evaluate_function(m, [x]) for m in (module, lower(module).module))
    first, second = (found if isinstance(found, tuple) else (found,) for found in (first, second))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return [np.asarray(a) for a in first]


@pytest.mark.slow
def test_random_operators_have_stated_moments() -> None:
    x = Ref("x")
    calls = [
        (call("a", "aten.rand_like.default", x), 0.5, 1 / 12, 0, 1),
        (call("b", "aten.randn_like.default", x), 0, 1, -9, 9),
        (call("c", "aten.normal.Tensor_float", x, 2.0), 3, 4, -99, 99),
        (call("d", "aten.randint.low", -2, 4, ["n", 5], element=i64), 0.5, 35 / 12, -2, 3),
        (call("e", "aten.bernoulli.p", x, 0.25), 0.25, 3 / 16, 0, 1),
        (call("f", "aten.uniform.default", x, 2.0, 4.0), 3, 1 / 3, 2, 4),
        (call("g", "aten.exponential.default", x, 2.0), 0.5, 0.25, 0, 99),
        (call("h", "aten.randint_like.default", x, 7), 3, 4, 0, 6),
    ]
    found = drawn(np.full((4001, 5), 3, np.float32), *(c[0] for c in calls))
    for values, (_, mean, variance, low, high) in zip(found, calls, strict=True):
        flat = values.astype(np.float64)
        assert abs(flat.mean() - mean) < 5 * np.sqrt(variance / flat.size) + 1e-3
        assert flat.var() == pytest.approx(variance, rel=0.1)
        assert low <= flat.min() and flat.max() <= high
    assert abs(np.corrcoef(found[0].reshape(-1), found[5].reshape(-1))[0, 1]) < 0.03
    assert sorted(np.unique(found[3])) == [-2, -1, 0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_random_programs_give_the_same_numbers_at_every_call(size: int) -> None:
    calls = [call("a", "aten.rand_like.default", Ref("x")), call("b", "aten.rand_like.default", Ref("x"))]
    x = np.zeros((size, 5), np.float32)
    a, b = drawn(x, *calls)
    np.testing.assert_array_equal(np.stack([a, b]), np.stack(drawn(x, *calls)))
    assert not np.array_equal(a, b)


def test_multinomial_with_and_without_replacement() -> None:
    weights = np.tile(np.array([0.5, 0.0, 0.25, 0.125, 0.125], np.float32), (3000, 1))
    again, other, order = drawn(
        weights,
        call("a", "aten.multinomial.default", Ref("x"), 3, True, element=i64, dims=("n", 3)),
        call("b", "aten.multinomial.default", Ref("x"), 4, element=i64, dims=("n", 4)),
        call("c", "aten.randperm.default", 11, element=i64, dims=(11,)),
    )
    np.testing.assert_allclose(np.bincount(again.reshape(-1), minlength=5) / again.size, weights[0], atol=0.03)
    np.testing.assert_allclose(np.bincount(other[:, 0], minlength=5) / len(other), weights[0], atol=0.04)
    assert all(sorted(row) == [0, 2, 3, 4] for row in other)
    assert sorted(order) == list(range(11))


def test_number_read_for_a_result_may_be_below_0() -> None:
    """A number that dims depend on has a symbol; torch states none that nothing reads."""
    x = TorchTensor((), i64, "torch.int64")
    read = TorchCall("y", "aten._local_scalar_dense.default", (Ref("x"),), {}, [None], "")
    made = TorchProgram((), (("x", x),), {}, {}, (read,), (("y", Ref("y")),))
    found = evaluate_function(import_program(made), [np.array(-3)])
    assert np.asarray(found).shape == () and found == -3


def test_dropout_in_training_scales_kept_elements() -> None:
    x = TorchTensor(("n", 5), f32, "torch.float32")
    both = TorchCall(
        "d",
        "aten.native_dropout.default",
        (Ref("x"), 0.4, True),
        {},
        [x, TorchTensor(("n", 5), bool_, "torch.bool")],
        "",
    )
    kept = call("k", "getitem", Ref("d"), 1, element=bool_)
    y = call("y", "getitem", Ref("d"), 0)
    made = TorchProgram(
        (TorchSymbol("n", 1, None),), (("x", x),), {}, {}, (both, y, kept), (("y", Ref("y")), ("k", Ref("k")))
    )
    found, mask = evaluate_function(import_program(made), [np.full((2000, 5), 3, np.float32)])
    np.testing.assert_allclose(found, np.where(mask, 3 / 0.6, 0), rtol=1e-6)
    assert np.mean(mask) == pytest.approx(0.6, abs=0.02)


def test_import_refuses_unknown_bounds_and_large_orders() -> None:
    for wrong, why in (
        (call("a", "aten.polygamma.default", 40, Ref("x")), r"operator aten.polygamma.default .*order of 0 to 20, got 40"),
        (call("a", "aten.randint.default", 0, ["n", 5], element=i64), r"operator aten.randint.default .*at least one integer"),
        (call("a", "aten.rand_like.default", Ref("x"), element=i64), r"operator aten.rand_like.default .*random floats"),
    ):  # fmt: skip
        with pytest.raises(ParseError, match=why):
            import_program(program(wrong))
