"""Decisions and simplifications that users of the arithmetic rely on, one by one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.arith.prove import Proof, prove, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32, i32, u8
from relax_tune.ir.core.expr import (
    FALSE,
    TRUE,
    Expr,
    Tunable,
    Var,
    add,
    and_,
    call,
    cast,
    ceildiv,
    const,
    eq,
    floordiv,
    floormod,
    ge,
    gt,
    le,
    load,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    not_,
    or_,
    select,
)

YES, NO, UNKNOWN = Proof.YES, Proof.NO, Proof.UNKNOWN
n, m, k, b, f = (Var(x) for x in "nmkbf")
i, j, i0, i1, i2 = (Var(x) for x in ("i", "j", "i0", "i1", "i2"))
T, U = Tunable("T", (1, 2, 4, 8, 16)), Tunable("U", (2, 4))
N = const(1000)

tiles = Env().with_loop(i0, ceildiv(n, T)).with_loop(i1, T)
fixed_tiles = Env().with_loop(i0, ceildiv(N, T)).with_loop(i1, T)
fused = Env().with_loop(f, b * n)
eights = Env().with_loop(i0, ceildiv(n, 8)).with_loop(i1, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cond", "env", "expected"),
    [
        # algebra of whole numbers
        (eq(2 * (2 * n), 4 * n), None, YES),
        (eq((4 * n) // 4, n), None, YES),
        (eq(n % 8 + n // 8 * 8, n), None, YES),
        (eq(n * m, m * n), None, YES),
        (eq((n + 1) * (n - 1), n * n - 1), None, YES),
        (eq(2 * (n // 2), n), None, UNKNOWN),
        (eq(n // 8 * 8, n), Env().with_fact(eq(n % 8, 0)), YES),
        (eq(n * m, n + m), None, UNKNOWN),
        (ge(maximum(n, m), minimum(n, m)), None, YES),
        (le(n * m, 6), Env({n: (0, 2), m: (0, 3)}), YES),
        (lt(n * m, 6), Env({n: (0, 2), m: (0, 3)}), UNKNOWN),
        (eq((n + 1) * (n + 1), n * n + 2 * n), None, NO),
        (eq(n + n, 2 * n), None, YES),
        (eq(n + 1, n), None, NO),
        (ne(n + 1, n), None, YES),
        (eq(2 * n, 2 * m + 1), None, NO),
        (eq(n * (m + 1) - n * m, n), None, YES),
        (eq((n + m) * (n + m), n * n + 2 * n * m + m * m), None, YES),
        (eq((6 * n + 3) // 3, 2 * n + 1), None, YES),
        (eq((4 * n + 2) // 8, n // 2), None, YES),
        (eq(n // 4 // 2, n // 8), None, YES),
        (eq((n + 8) // 8, n // 8 + 1), None, YES),
        (eq(ceildiv(n, 8), (n - 1) // 8 + 1), None, YES),
        (eq((n * m) // m, n), None, YES),
        (eq((n * m + m) % m, 0), None, YES),
        (eq(n, m), None, UNKNOWN),
        (le(2 * (n // 2), n), None, YES),
        (lt(n, 2 * (n // 2) + 2), None, YES),
        (lt(n, 0), None, NO),
        (ge(n, 1), None, UNKNOWN),
        (ge(T, 1), None, YES),
        (gt(T, 16), None, NO),
        (lt(n % 8, 8), None, YES),
        (lt(n % m, m), None, YES),
        (ge(ceildiv(n, T) * T, n), None, YES),
        (lt(ceildiv(n, T) * T, n + T), None, YES),
        (le(n // T * T, n), None, YES),
        (le(n - n // T * T, T - 1), None, YES),
        (eq(n // T * T, n), None, UNKNOWN),
        # a reshape (n, 4) -> (n, 5): false once n >= 1 is known
        (eq(n * 4, n * 5), None, UNKNOWN),
        (eq(n * 4, n * 5), Env().with_bound(n, 1, None), NO),
        (eq(n * 2 * 2, n * 4), None, YES),
        # loops
        (lt(i0 * 8 + i1, 1024), Env({i0: (0, 127), i1: (0, 7)}), YES),
        (lt(i0 * 8 + i1, 1023), Env({i0: (0, 127), i1: (0, 7)}), UNKNOWN),
        (lt(i0 * 8 + i1, 0), Env({i0: (0, 127), i1: (0, 7)}), NO),
        (lt(i0 * 8 + i1, n), eights, UNKNOWN),
        (lt(i0 * 8 + i1, ceildiv(n, 8) * 8), eights, YES),
        (lt(i0 * 8 + i1, n + 7), eights, YES),
        (lt(i0 * 8 + i1, n), eights.with_fact(eq(n % 8, 0)), YES),
        (ge(minimum(8, n - i0 * 8), 1), eights, YES),
        (lt(i0 * T + i1, N), fixed_tiles, UNKNOWN),
        (lt(i0 * T + i1, N), fixed_tiles.with_fact(eq(floormod(N, T), 0)), YES),
        (lt(i0 * T + i1, n), tiles, UNKNOWN),
        (lt(i0 * T + i1, n), tiles.with_fact(eq(n % T, 0)), YES),
        (lt(i0 * T + i1, ceildiv(n, T) * T), tiles, YES),
        (lt(f // n, b), fused, YES),
        (lt(f % n, n), fused, YES),
        (eq(f // n * n + f % n, f), None, YES),
        (lt(i * n + j, b * n), Env().with_loop(i, b).with_loop(j, n), YES),
        (lt((i0 * T + i1) * U + i2, n * T * U), Env().with_loop(i0, n).with_loop(i1, T).with_loop(i2, U), YES),
        (le(i + j, n - 1), Env().with_loop(i, n).with_loop(j, n - i), YES),
        # facts
        (le(n + n // m + n // (n + m), m + n // (n + m)), Env().with_fact(le(n + n // m, m)), YES),
        (le(n * 4, 2048), Env().with_fact(le(n, 512)), YES),
        (gt(n, 512), Env().with_fact(le(n, 512)), NO),
        (eq(k * n, n * m), Env().with_fact(eq(k, m)), YES),
        (ne(k, m), Env().with_fact(eq(k, m)), NO),
        (eq(ceildiv(n, T) * T, n), Env().with_fact(eq(n % T, 0)), YES),
        (eq(floordiv(N, T) * T, 1000), Env().with_fact(eq(floormod(N, T), 0)), YES),
        (le(n, k), Env().with_fact(le(n, m)).with_fact(le(m, k)), YES),
        (lt(n, 8), Env().with_fact(and_(lt(n, m), le(m, 8))), YES),
        (lt(i0 * T + i1, n + 1), tiles.with_fact(lt(i0 * T + i1, n)), YES),
        (lt(i0 * T, n), tiles.with_fact(lt(i0 * T + i1, n)), YES),
        (le(n * m * 4, 16384), Env().with_fact(le(n * m, 4096)), YES),
        # storage reuse: a freed 4n-byte storage holds n bytes
        (le(n, 4 * n), None, YES),
        (le(n, n * m), None, UNKNOWN),
        (le(n, n * m), Env().with_bound(m, 1, None), YES),
        # nested minima and maxima
        (le(maximum(minimum(k, n - k), 0), k), None, YES),
        (le(minimum(minimum(n, 8), m), 8), None, YES),
        (eq(minimum(n, maximum(n, m)), n), None, YES),
        (eq(minimum(n, m), minimum(m, n)), None, YES),
        (eq(minimum(n + 1, m + 1), minimum(n, m) + 1), None, YES),
        (le(minimum(n, m) + maximum(n, m), 2 * n), None, UNKNOWN),
        (le(select(lt(n, m), n, m), maximum(n, m)), None, YES),
        # logic
        (and_(le(0, n), eq(n + n, 2 * n)), None, YES),
        (and_(lt(n, m), lt(n, 0)), None, NO),
        (or_(lt(n, m), le(0, n)), None, YES),
        (or_(lt(n, m), lt(n, 0)), None, UNKNOWN),
        (not_(lt(n, 0)), None, YES),
        (TRUE, None, YES),
        (FALSE, None, NO),
    ],
    ids=repr,
)
def test_prove(cond: Expr, env: Env | None, expected: Proof) -> None:
    assert prove(cond, env) is expected


@pytest.mark.parametrize(
    ("e", "env", "expected"),
    [
        (n * m - m * n + k, None, k),
        (n + n, None, n * 2),
        (n - (n - 1), None, const(1)),
        (f // n * n * 4 + f % n * 4 + k, None, f * 4 + k),
        (((i0 * 8 + i1) * n + j) // n, Env().with_loop(j, n), i0 * 8 + i1),
        (((i0 * 8 + i1) * n + j) % n, Env().with_loop(j, n), j),
        ((i0 * T + i1) // T, Env().with_loop(i1, T), i0),
        ((i0 * T + i1) % T, Env().with_loop(i1, T), i1),
        ((i0 * T * U + i1 * U + i2) // (T * U), Env().with_loop(i1, T).with_loop(i2, U), i0),
        ((i * 32 + j) // 4, Env().with_loop(j, 4), i * 8),
        ((i * 8 + j) // 32, Env().with_loop(j, 8), i // 4),
        ((f % n * 4 + k) // (4 * n), Env().with_loop(k, 4), const(0)),
        (n // T // 8, None, n // (T * 8)),
        (i % 8, Env().with_loop(i, 8), i),
        (i // 8, Env().with_loop(i, 8), const(0)),
        (i % n, Env().with_loop(i, n), i),
        (i, Env().with_loop(i, 1), const(0)),
        (ceildiv(n, T) * T, Env().with_fact(eq(n % T, 0)), n),
        (n % T, Env().with_fact(eq(n % T, 0)), const(0)),
        (minimum(i0 * 8 + i1, n), Env().with_loop(i0, 4).with_loop(i1, 8).with_fact(le(31, n)), i0 * 8 + i1),
        (maximum(n, 0), None, n),
        (maximum(n - 1, 0), Env().with_bound(n, 1, None), n - 1),
        (maximum(n - 1, 0), None, maximum(n - 1, 0)),
        (minimum(3, n), None, minimum(3, n)),
        (select(lt(i, n), i + i, 0), Env().with_loop(i, n), i * 2),
        (lt(i0 * 8 + i1, 64), Env().with_loop(i0, 8).with_loop(i1, 8), TRUE),
        (and_(lt(i, n), lt(i + 0, m)), Env().with_loop(i, n), lt(i, m)),
        (le(n, 512), Env().with_fact(le(n, 512)), TRUE),
        (maximum(minimum(ceildiv(n, 3), n), 0), None, ceildiv(n, 3)),
        # dividends stay >= 0
        (ceildiv(ceildiv(n, 4), 8), None, ceildiv(n, 32)),
        (ceildiv(n * 384, T * 384), None, (n + T - 1) // T),
        ((f // 384 // n * n + f // 384 % n) * 384 + f % 384, None, f),
    ],
    ids=repr,
)
def test_simplify(e: Expr, env: Env | None, expected: Expr) -> None:
    actual = simplify(e, env)
    assert actual is expected, f"{e} -> {actual}, expected {expected}"


def test_simplify_factored_sum_unchanged() -> None:
    e = ((i0 * T + i1) * U + i2) * n + j
    assert simplify(e) is e


def test_simplify_literal_factors_one_form() -> None:
    assert simplify((i0 * 64 + i1) * 4 + i2) is simplify(i0 * 256 + (i1 * 4 + i2)) is i0 * 256 + i1 * 4 + i2
    assert simplify(4 * n * m) is simplify(n * m * 4) is n * m * 4


def test_simplify_expanded_sum_factored() -> None:
    assert simplify(i0 * 8 + i1 * 8 + i0 * 8) is (i0 * 2 + i1) * 8


def test_simplify_floats_not_reordered() -> None:
    x, y = Var("x", f32), Var("y", f32)
    e = (x + y) - y
    assert simplify(e) is e
    assert simplify(mul(x, const(0.0)) + y) is mul(x, const(0.0)) + y
    assert simplify(call("exp", x)) is call("exp", x)


def test_simplify_indices_inside_floats() -> None:
    a = Buffer("a", (n, n), f32)
    e = load(a, ((i * 8 + j) // 8, n * 2 - n)) + load(a, (i + 0, n))
    result = simplify(e, Env().with_loop(j, 8))
    assert result is load(a, (i, n)) + load(a, (i, n))


def test_simplify_narrow_integers_unchanged() -> None:
    a = Buffer("a", (n,), u8)
    x = load(a, (i,))
    e = (x + 200) - 200
    assert simplify(e) is e
    assert interval(x // 16, Env()) == (0, 15)
    wide = cast(x, i32)
    assert prove(lt(wide // 16, 16)) is YES
    assert prove(lt(wide + 1, wide)) is not YES


def test_prove_loaded_index_unknown() -> None:
    table = Buffer("table", (n,), i32)
    x = load(table, (i,))
    assert prove(ge(x, 0)) is UNKNOWN
    assert prove(lt(x % 8, 8)) is YES


def test_simplify_wrapping_int32_unchanged() -> None:
    x = Var("x", i32)
    e = (x + 3) - 3 + x
    assert simplify(e) is e and e.dtype is i32
    assert prove(lt(x, x + 3)) is UNKNOWN


def test_interval_of_expressions() -> None:
    env = Env().with_loop(i0, ceildiv(m, 8)).with_bound(m, 1, 512).with_loop(i1, 8)
    assert interval(i0 * 8 + i1, env) == (0, 511)
    assert interval(i1 - i0, env) == (-63, 7)
    assert interval(n, Env()) == (0, None)
    assert interval(n % 8, Env()) == (0, 7)
    assert interval(T * U, Env()) == (2, 64)
    assert interval(n, Env().with_fact(le(n * 4 + 3, 43))) == (0, 10)
    assert interval(n, Env().with_fact(le(1, n * m))) == (1, None)


def test_env_with_contradictions_unchanged() -> None:
    env = Env()
    inner = env.with_loop(i, n)
    assert i not in env.bounds and inner.bounds[i][1] is n - 1
    nothing = Env().with_fact(lt(n, 0)).with_fact(gt(m, n * n))
    assert simplify(n * m + 1, nothing).dtype is n.dtype
    assert isinstance(prove(le(n, m), nothing), Proof)


def test_prove_cyclic_bounds_terminates() -> None:
    env = Env({i: (0, j), j: (0, i)})
    assert prove(lt(i, n), env) is UNKNOWN
    assert prove(ge(i + j, 0), env) is YES


def test_proof_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match="three answers"):
        bool(prove(eq(n, n + 1)))
    assert prove_equal(n + n, 2 * n) is YES


def test_prove_equal_of_a_truth_value_open_by_samples_asks_no_solver() -> None:
    class Refusing:
        name = "refusing"

        def decide(self, cond: Expr, env: Env, goals: object) -> Proof:
            raise AssertionError(cond)

    env = Env(solver=Refusing())
    assert prove_equal(True, le(n, 1), env) is UNKNOWN and prove_equal(lt(n, m), False, env) is UNKNOWN
    assert prove_equal(lt(n, n + 1), True) is YES and prove_equal(False, lt(n, n + 1)) is Proof.NO


@pytest.mark.slow
def test_arith_deep_and_wide_expressions() -> None:
    deep: Expr = n
    for _ in range(1000):
        deep = add(minimum(deep, m), 1) if deep.dtype is n.dtype else deep
    assert simplify(deep).dtype is n.dtype
    total: Expr = const(0)
    for v in [Var(f"v{x}") for x in range(400)]:
        total = total + v * v
    assert simplify(total) is total
    power: Expr = const(1)
    for v in [Var(f"v{x}") for x in range(12)]:
        power = power * (v + 1)
    assert simplify(power) is power


def test_prove_too_many_terms_unknown() -> None:
    power: Expr = const(1)
    for v in [Var(f"v{x}") for x in range(12)]:
        power = power * (v + 1)
    assert prove(eq(power, power + n)) is UNKNOWN


_SCRIPT = """
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import *
from relax_tune.ir.core.expr_text import format_expr
junk = [Var("n") for _ in range({junk})]
n, m, f = Var("n"), Var("n"), Var("n")
T, U = Tunable("T", (1, 2, 4)), Tunable("T", (2, 4))
i, j = Var("i"), Var("i")
env = Env().with_loop(i, ceildiv(n, T)).with_loop(j, T).with_fact(eq(m % U, 0)).with_fact(le(n, m))
names = {{v: f"v{{x}}" for x, v in enumerate((n, m, f, T, U, i, j))}}
for e in (
    f * T * U + i * U * T + j * U + n * m + m * f, (f // n) * n * T + (f % n) * T + m, minimum(n + f + 1, m + f + n),
    (i * T * U + j * U + f) // (U * T), maximum(minimum(ceildiv(n, 3), n - f), m), (n + m) % U + (m + n) // U * U,
    (n * f + m * f + T * f) * (m + U) - m * f * n,
):
    print(format_expr(simplify(e, env), names.__getitem__))
for c in (lt(i * T + j, m), le(i * T + j, n + T), eq(ceildiv(m, U) * U, m), lt(minimum(n, f), m + 1)):
    print(prove(c, env).value)
"""


@pytest.mark.process
def test_results_do_not_depend_on_hashes_or_addresses() -> None:
    texts = set()
    for seed, junk in (("0", 0), ("1", 17), ("4242", 3), ("random", 101)):
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT.format(junk=junk)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        texts.add(done.stdout)
    assert len(texts) == 1, texts
    assert len(next(iter(texts)).splitlines()) == 11


def test_results_independent_of_history() -> None:
    def fresh() -> tuple[str, str]:
        env = Env().with_loop(i, n).with_fact(le(n, m))
        return repr(simplify((m * i + n * i + j * m) // m, env)), repr(simplify(minimum(i, m) * n + n * m, env))

    before = fresh()
    for e in (m * n + i, (j + m) // n, minimum(m, n) * i):
        simplify(e)
    assert fresh() == before


def test_simplify_equation_between_widths() -> None:
    x = Var("x", i32)
    env = Env().with_fact(eq(n, cast(x, n.dtype))).with_fact(eq(m, x))
    result = simplify((n + m) - n, env)
    assert result.dtype is n.dtype and prove(eq(result, m), env) is YES
    assert prove(eq(n, m), env) is YES
