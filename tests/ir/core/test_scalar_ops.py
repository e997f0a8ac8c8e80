"""The table of scalar operations against those who derive from it, and against the runtime's own list."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from relax_tune.ir.core.dtype import bool_, f32, i64
from relax_tune.ir.core.expr import Var, op
from relax_tune.ir.core.expr_text import format_expr
from relax_tune.ir.core.scalar_ops import SCALAR_OPS, ScalarOp
from relax_tune.ir.interp.interp_expr import Tape
from relax_tune.runtime.program import plan_c, scalars
from relax_tune.schedules.cost.vectorized import compile_numpy

NUMBERS = (-7, -2, -1, 0, 1, 2, 3, 8)
ON_HOST = [o for o in SCALAR_OPS.values() if o.on_host]
FUNCTIONS = [o for o in SCALAR_OPS.values() if o.kind == "function"]


def points(o: ScalarOp) -> list[tuple[int, ...]]:
    """Operands of an operation on whole numbers; conditions are 0 and 1, divisors positive."""
    spread = [NUMBERS] * o.arity
    if o.kind == "logic":
        spread = [(0, 1)] * o.arity
    elif o.kind == "choice":
        spread[0] = (0, 1)
    elif o.kind == "integer":
        spread[1] = (1, 2, 3)
    return list(itertools.product(*spread))


def expected(o: ScalarOp, point: tuple[int, ...]) -> int:
    assert o.evaluate is not None
    return int(o.evaluate(*(bool(x) if o.kind == "logic" else x for x in point)))


def test_runtime_opcodes_equal_the_host_operations() -> None:
    computed = set(scalars.Opcode) - {scalars.Opcode.CONST, scalars.Opcode.SYMBOL}
    assert {o.name.upper(): o.arity for o in ON_HOST} == {x.name: scalars.ARITY[x] for x in computed}
    assert set(plan_c._TEXT) == computed and computed < set(scalars._TEXT)


@pytest.mark.parametrize("o", ON_HOST, ids=lambda o: o.name)
def test_runtime_evaluation_equals_the_table(o: ScalarOp) -> None:
    builder = scalars.ScalarBuilder()
    slot = builder.op(scalars.Opcode[o.name.upper()], *(builder.symbol(i) for i in range(o.arity)))
    run = scalars.compile_scalars(builder.code, o.arity)
    for point in points(o):
        assert run(point)[slot] == expected(o, point), point


@pytest.mark.parametrize("o", [o for o in ON_HOST if o.column_text], ids=lambda o: o.name)
def test_closed_form_text_equals_the_table(o: ScalarOp) -> None:
    names = [Var(f"x{k}") for k in range(o.arity)]
    result = op(o.name, tuple(names), bool_ if o.gives_bool else i64)
    compiled, _ = compile_numpy([result])
    columns = {v.name: np.array(c, np.float64) for v, c in zip(names, zip(*points(o), strict=True), strict=True)}
    assert compiled(columns)[0].tolist() == [expected(o, point) for point in points(o)]


@pytest.mark.parametrize("o", [o for o in SCALAR_OPS.values() if o.interval is not None], ids=lambda o: o.name)
def test_interval_holds_every_value(o: ScalarOp) -> None:
    assert o.interval is not None
    for ends in itertools.product(((-3, -1), (-2, 3), (1, 4), (2, None)), repeat=o.arity):
        if o.kind == "integer" and ends[1][0] < 1:
            continue
        low, high = o.interval(*ends)
        for point in itertools.product(*(range(a, 9 if b is None else b + 1) for a, b in ends)):
            value = expected(o, point)
            assert (low is None or low <= value) and (high is None or value <= high), (ends, point)


def python_value(text: str, scope: dict[str, int]) -> object:
    try:
        return eval(text, dict(scope))
    except ZeroDivisionError:
        return None


@pytest.mark.parametrize("o", [o for o in SCALAR_OPS.values() if o.infix], ids=lambda o: o.name)
def test_infix_text_reads_as_grouped(o: ScalarOp) -> None:
    x, y, z = (Var(n) for n in "xyz")
    dtype = bool_ if o.gives_bool else i64
    inner = op(o.name, (x, y), dtype)
    whole = {
        op(o.name, (inner, z), dtype): f"(x {o.infix} y) {o.infix} z",
        op(o.name, (z, inner), dtype): f"z {o.infix} (x {o.infix} y)",
    }
    for e, grouped in whole.items():
        for values in itertools.product((1, 2, 3), repeat=3):
            scope = dict(zip("xyz", values, strict=True))
            assert python_value(format_expr(e), scope) == python_value(grouped, scope)


@pytest.mark.parametrize("o", FUNCTIONS, ids=lambda o: o.name)
def test_interpreter_rounds_functions_once(o: ScalarOp) -> None:
    assert o.evaluate is not None
    x = [Var(f"x{k}", f32) for k in range(o.arity)]
    tape = Tape([op(o.name, tuple(x), f32)], {})
    numbers = np.array([0.25, 0.75, 1.0, 1.5], np.float32)
    with np.errstate(all="ignore"):
        (result,) = tape.run(dict.fromkeys(x, numbers))
        wide = np.asarray(o.evaluate(*[numbers.astype(np.float64)] * o.arity))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, wide.astype(np.float32))
