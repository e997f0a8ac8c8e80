"""The solver behind the extra: right where it answers, asked only where nothing else decides, limited by its own measure."""

from __future__ import annotations

import sys
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.arith.arith_worlds import SLOW, conditions, evaluate, worlds
from tests.support.effort import examples

from relax_tune.errors import RelaxTuneError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.solver import Z3, installed_solver
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64, u8
from relax_tune.ir.core.expr import Expr, Var, and_, cast, const, eq, le, load, lt, ne, select

n, m, k = Var("n"), Var("m"), Var("k")
BOTH = (Proof.YES, Proof.NO)


@pytest.fixture(scope="module")
def z3() -> Z3:
    pytest.importorskip("z3", reason="needs the package z3-solver (extra `solver`)")
    result = installed_solver()
    assert result is not None and result.name.startswith("z3-solver ")
    return result


@pytest.mark.slow
@pytest.mark.solver
@settings(SLOW, max_examples=examples(25))
@given(data=st.data())
def test_solver_never_wrong(data: st.DataObject, z3: Z3) -> None:
    env, variables, points = data.draw(worlds())
    cond = data.draw(conditions(variables, 2))
    answer = z3.decide(cond, env, BOTH)
    values = {v for p in points if (v := evaluate(cond, p)) is not None}
    assert answer is not Proof.YES or False not in values, f"{cond} under {env}"
    assert answer is not Proof.NO or True not in values, f"{cond} under {env}"


@pytest.mark.solver
@pytest.mark.parametrize(
    ("cond", "env"),
    [
        (le(2 * n * m, n * n + m * m), Env()),
        (eq(n % 2 * (n % 2), n % 2), Env()),
        (ne(n * n % 4, 2), Env()),
        (eq(k, m), Env().with_fact(eq(k * n, m * n)).with_bound(n, 1, None)),
        (eq((n - 7) // -2 * -2 + (n - 7) % -2, n - 7), Env()),
        (and_(le(-1, (n - 7) % -2), le((n - 7) % -2, 0)), Env()),
    ],
    ids=repr,
)
def test_solver_decides_open_questions(cond: Expr, env: Env, z3: Z3) -> None:
    assert prove(cond, Env(env.bounds, env.facts, z3)) is Proof.YES
    assert z3.decide(cond, env, (Proof.NO,)) is Proof.UNKNOWN


@pytest.mark.solver
def test_solver_treats_loads_as_unknown(z3: Z3) -> None:
    a = Buffer("a", (n,), u8)
    x = load(a, (n,))
    assert z3.decide(lt(cast(x, i64), 256), Env(), BOTH) is Proof.YES
    assert z3.decide(eq(x + 200, x + 200), Env(), BOTH) is Proof.YES
    assert z3.decide(le(x, cast(x + 200, i64)), Env(), BOTH) is Proof.UNKNOWN  # it wraps around
    assert z3.decide(le(select(lt(x, 3), n, m), n + m), Env(), BOTH) is Proof.YES


@pytest.mark.solver
def test_solver_effort_bounded_by_resources(z3: Z3) -> None:
    cubes = eq(n * n * n + m * m * m, k * k * k + const(3) * n * m * k + 33)
    assert z3.decide(cubes, Env(), BOTH) is Proof.UNKNOWN


class Asked:
    """A solver that knows nothing and remembers what it was asked."""

    name = "asked"

    def __init__(self) -> None:
        self.questions: list[tuple[Expr, Collection[Proof]]] = []

    def decide(self, cond: Expr, env: Env, goals: Collection[Proof]) -> Proof:
        self.questions.append((cond, tuple(goals)))
        return Proof.UNKNOWN


def test_solver_asked_once_and_last() -> None:
    asked = Asked()
    env = Env(solver=asked)
    assert prove(le(n, n * n), env) is Proof.YES
    assert prove(le(n, m), env) is Proof.UNKNOWN  # true here, false there
    assert not asked.questions
    square = le(2 * n * m, n * n + m * m)
    for known in (env, env.with_fact(le(1, n)), env.with_bound(n, 2, None), env.with_loop(m, n)):
        assert prove(square, known) is prove(square, known) is Proof.UNKNOWN
    assert asked.questions == [(square, (Proof.YES,))] * 4


def test_solver_broken_installation_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "z3", None)
    with pytest.raises(RelaxTuneError, match=r"z3-solver 4.*reinstall 'relax-tune\[solver\]', or uninstall"):
        Z3("z3-solver 4").decide(le(n, m), Env(), BOTH)
