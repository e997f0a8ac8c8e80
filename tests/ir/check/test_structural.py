"""Equality, hashes and workload keys look through names and see everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support import zoo

from relax_tune.ir.check.structural import first_difference, structural_equal, structural_hash, workload_key
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f16, f32
from relax_tune.ir.core.expr import Expr, Load, Tunable, Var, const, load, lt, substitute, transform
from relax_tune.ir.core.function import Bound, IRModule, PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IfThenElse, Seq, map_exprs, rewrite, seq


def renamed(f: PrimFunc) -> PrimFunc:
    """`f` with another identity and another name for everything in it."""
    fresh: dict[Var | Buffer, Var | Buffer] = {}

    def var(v: Var) -> Var:
        if v not in fresh:
            name = f"other{len(fresh)}"
            fresh[v] = Tunable(name, v.domain) if isinstance(v, Tunable) else Var(name, v.dtype)
        return fresh[v]  # type: ignore[return-value]

    def buffer(b: Buffer) -> Buffer:
        if b not in fresh:
            fresh[b] = Buffer(f"buf{len(fresh)}", tuple(map(expr, b.shape)), b.dtype, b.scope)
        return fresh[b]  # type: ignore[return-value]

    def leaf(e: Expr) -> Expr | None:
        return var(e) if isinstance(e, Var) else load(buffer(e.buffer), e.indices) if isinstance(e, Load) else None

    def expr(e: Expr) -> Expr:
        return transform(e, leaf)

    def visit(s):  # type: ignore[no-untyped-def]
        if isinstance(s, For):
            return replace(s, var=var(s.var))
        if isinstance(s, BufferStore):
            return replace(s, buffer=buffer(s.buffer))
        if isinstance(s, Block):
            iters = tuple(replace(i, var=var(i.var)) for i in s.iters)
            init = s.init and replace(s.init, buffer=buffer(s.init.buffer))
            return replace(
                s, name="z" + s.name, iters=iters, init=init, body=replace(s.body, buffer=buffer(s.body.buffer))
            )
        return s

    body = rewrite(map_exprs(f.body, expr), visit)
    params = tuple(buffer(p) if isinstance(p, Buffer) else var(p) for p in f.params)
    return PrimFunc("g" + f.name, params, f.outputs, body, tuple(map(buffer, f.allocs)), tuple(map(buffer, f.consts)))


@pytest.mark.parametrize("index", range(len(zoo.functions())))
def test_names_and_identities_do_not_matter(index: int) -> None:
    f = zoo.functions()[index]
    g = renamed(f)
    assert not set(f.params) & set(g.params)
    assert structural_equal(f, g)
    assert structural_hash(f) == structural_hash(g)
    assert workload_key(f) == workload_key(g)


def test_the_zoo_is_all_different() -> None:
    functions = zoo.functions()
    assert len({structural_hash(f) for f in functions}) == len(functions)
    assert len({workload_key(f) for f in functions}) == len(functions)
    assert not any(structural_equal(f, g) for i, f in enumerate(functions) for g in functions[:i])


N = Var("n")
A, B, C = (Buffer(s, (N, const(4)), f32) for s in "ABC")
VI, VJ = Var("i"), Var("j")


def add(left: Buffer = A, right: Buffer = B, **loop: object) -> PrimFunc:
    store = BufferStore(C, (VI, VJ), load(left, (VI, VJ)) + load(right, (VI, VJ)))
    return PrimFunc("add", (A, B, C), 1, For(VI, N, replace(For(VJ, const(4), store), **loop)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda f: add(B, A), "body.body.body.value"),
        (lambda f: add(A, A), "body.body.body.value"),
        (lambda f: add(kind="parallel"), "body.body"),
        (lambda f: add(tail="pow2"), "body.body"),
        (lambda f: add(axis=1), "body.body"),
        (lambda f: add(extent=const(5)), "body.body.extent"),
        (lambda f: replace(f, outputs=2), "params"),
        (lambda f: replace(f, consts=(B,)), "params[1]"),
        (lambda f: replace(f, allocs=(Buffer("t", (N,), f32),)), "params"),
        (lambda f: replace(f, body=seq(f.body, f.body)), "body"),
        (lambda f: replace(f, body=IfThenElse(lt(N, 3), f.body)), "body"),
        (lambda f: replace(f, params=(A, B, Buffer("C", (N, const(4)), f16))), "params[2]"),
        (lambda f: replace(f, params=(A, B, Buffer("C", (Var("n"), const(4)), f32))), "params[2].shape[0]"),
    ],
)
def test_every_change_is_seen_and_located(change: Callable[[PrimFunc], PrimFunc], path: str) -> None:
    f = add()
    g = change(f)
    assert not structural_equal(f, g) and not structural_equal(g, f)
    result, back = first_difference(f, g), first_difference(g, f)
    assert result is not None and back is not None
    assert result.path == path == back.path
    assert (result.left, result.right) == (back.right, back.left)
    assert workload_key(f) != workload_key(g) and structural_hash(f) != structural_hash(g)


def test_nesting_of_sequences_means_nothing() -> None:
    s = add().body
    assert structural_equal(Seq((s, Seq((s, Seq(()))))), Seq((s, s)))
    assert structural_equal(Seq((s,)), s)


def test_free_variables_are_renamed_consistently() -> None:
    a, b = Var("a"), Var("b")
    assert structural_equal(a + b, b + a)
    assert not structural_equal(a + a, a + b)
    assert not structural_equal(a + b, a + a)
    assert structural_equal(substitute(a * (a + 1), {a: b}), a * (a + 1))
    assert not structural_equal(a, Tunable("a", (1, 2)))
    assert not structural_equal(Tunable("a", (1, 2)), Tunable("a", (1, 3)))


def test_one_variable_bound_twice_is_two_variables() -> None:
    store = lambda v: BufferStore(A, (v, const(0)), const(0.0))
    i, j, k = Var("i"), Var("j"), Var("k")
    shared = seq(For(i, N, store(i)), For(i, N, store(i)))
    separate = seq(For(j, N, store(j)), For(k, N, store(k)))
    assert structural_equal(shared, separate)
    assert not structural_equal(seq(For(i, N, store(i)), store(i)), seq(For(i, N, store(i)), For(k, N, store(k))))


def test_shared_subexpressions_are_walked_once() -> None:
    def deep() -> Expr:
        e: Expr = Var("x")
        for _ in range(300):
            e = e * e + 1
        return e

    a, b = deep(), deep()
    assert structural_equal(a, b)
    assert structural_hash(a) == structural_hash(b)
    assert not structural_equal(a, b + 1)


def test_modules() -> None:
    w = np.arange(3.0)
    f, g = add(), zoo.scaled()
    one = IRModule({"f": f, "g": g}, {"w": w}, (Bound(N, 1, 8),))
    assert structural_equal(one, IRModule({"g": g, "f": f}, {"w": w.copy()}, (Bound(N, 1, 8),)))
    assert structural_hash(one) == structural_hash(IRModule({"g": g, "f": f}, {"w": w.copy()}, (Bound(N, 1, 8),)))
    assert not structural_equal(one, IRModule({"f": f, "g": g}, {"w": w + 1}, (Bound(N, 1, 8),)))
    assert not structural_equal(one, IRModule({"f": f, "g": g}, {"w": w}, (Bound(N, 1, 9),)))
    assert not structural_equal(one, IRModule({"f": f, "h": g}, {"w": w}, (Bound(N, 1, 8),)))
    assert not structural_equal(one, IRModule({"f": f, "g": g}, {"w": w}, (Bound(Var("n"), 1, 8),)))
    difference = first_difference(one, IRModule({"f": f, "g": g}, {"w": w + 1}, (Bound(N, 1, 8),)))
    assert difference is not None and difference.path == "constants['w']"


@pytest.mark.process
def test_keys_do_not_depend_on_the_process() -> None:
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.support import zoo\n"
        "from relax_tune.ir.check.structural import structural_hash, workload_key\n"
        "for f in zoo.functions(): print(workload_key(f), structural_hash(f))"
    )
    here = [f"{workload_key(f)} {structural_hash(f)}" for f in zoo.functions()]
    root = str(Path(__file__).parents[3])
    for seed in ("1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True
        )
        assert done.stdout.split("\n")[:-1] == here


def test_keys_are_frozen(golden: Callable[[str, str], None]) -> None:
    """Databases know workloads by these keys: they change only together with FORMAT_VERSION."""
    golden("workload_keys.txt", "\n".join(f"{workload_key(f)} {f.name}" for f in zoo.functions()))
