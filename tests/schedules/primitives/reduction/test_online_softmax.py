"""Sums of exponentials under a maximum in blocks of keys, and under a running one: same meaning after any steps, hidden rows
included; what is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.schedules.traces.random_steps import TUNABLES, random_step
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.effort import examples
from tests.support.meaning import assert_same_meaning

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    Var,
    and_,
    as_int,
    call,
    const,
    le,
    lt,
    maximum,
    minimum,
    not_,
    or_,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.interp.interp import run_prim
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.schedule import Schedule

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9)
KEYS_FIRST = tuple(
    step("reorder", names=names)
    for names in (["top_k", "top_i"], ["weight_j", "weight_i"], ["total_k", "total_i"], ["context_k", "context_i"])
)


def lone_sum(
    weight: Callable[[Expr, Expr], Expr], term: Callable[[Expr, Expr], Expr], start: float = -math.inf
) -> PrimFunc:
    """L[i] = sum_k term(W[i, k], M[i]) of W[i, k] = weight(A[i, k], M[i]), with M the maxima of rows."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("lone_sum")
    x, y, w, top = b.input("A", (n, m)), b.output("L", (n,)), b.alloc("W", (n, m)), b.alloc("M", (n,))
    b.reduce(top, (m,), const(start), lambda acc, i, k: maximum(acc, x[i, k]), name="top")
    b.compute(w, lambda i, k: weight(x[i, k], top[i]), name="weight")
    b.reduce(y, (m,), const(0.0), lambda acc, i, k: acc + term(w[i, k], top[i]), name="total")
    return b.finish()


def power(x: Expr, top: Expr) -> Expr:
    return call("exp", x - top)


def split(block: str = "top", factor: Any = 4) -> tuple[str, dict[str, Any]]:
    return step("split_k_update", block=block, factor=factor)


PAD_KEYS = step("pad_softmax_axis", block="top", factor=4)
ROLL = step("rolling_update", block="top")
UNMASKED = step("rolling_update", block="top", skip="masked")
# Conditions on rows and keys that hide some of the keys, by what they are.
NEAR: dict[str, Callable[[Expr, Expr], Expr]] = {
    "up to the row": lambda i, k: le(k, i),
    "after others": lambda i, k: le(k, i + 3),
    "two rows at a place": lambda i, k: le(k, i // 2),
    "the last three": lambda i, k: and_(le(k, i), lt(i - 3, k)),
    "no earlier ones": lambda i, k: not_(lt(k, i)),
    "of two limits": lambda i, k: lt(k, minimum(i, 4) + 1),
}
REFUSALS = [
    refuse("by nothing", make.weighted, split(factor=0), message="positive factor"),
    refuse("a sum", make.weighted, split("total"), message="combine by 'max'"),
    refuse("no reduction", make.weighted, split("weight"), message="op"),
    refuse("another start", lambda: lone_sum(power, lambda w, t: w, 0.0), split(), message="from -inf"),
    refuse("other weights", lambda: lone_sum(lambda x, t: x - t, lambda w, t: w), split(), message="exp"),
    refuse("twice the weight", lambda: lone_sum(power, lambda w, t: w * w), split(), message="once as a factor"),
    refuse("more than a factor", lambda: lone_sum(power, lambda w, t: w + 1.0), split(), message="once as a factor"),
    refuse("a sum that reads the maximum", lambda: lone_sum(power, lambda w, t: w * t), split(), message="the same pattern computes"),
    refuse("weights somebody else reads", lambda: zoo.softmax().func, split("row_max"), message="op"),
    refuse("a split nest", make.weighted, step("split", loop="top_i", factors=[None, 2]), split(), message="one loop"),
    refuse("rows first", make.weighted, ROLL, message="around nothing else|one after the other"),
    refuse("split keys", make.weighted, *KEYS_FIRST, step("split", loop="weight_j", factors=[None, 2]), ROLL, message="all keys"),
    refuse("spread keys", make.weighted, *KEYS_FIRST, step("set_kind", loop="weight_j", kind="parallel"), ROLL, message="serial"),
    refuse(
        "something between",
        make.weighted,
        *KEYS_FIRST,
        step("cache_read", block="context", buffer="V"),
        ROLL,
        message="move what is between",
    ),
    refuse("scores that are given", lambda: lone_sum(power, lambda w, t: w), PAD_KEYS, message="of an intermediate"),
    refuse("split scores", make.weighted, step("split", loop="score_i", factors=[None, 2]), PAD_KEYS, message="one loop"),
    refuse("a second time", make.weighted, *KEYS_FIRST, ROLL, ROLL, message="from -inf|expected"),
    refuse(
        "the order of keys",
        make.weighted,
        *KEYS_FIRST,
        ROLL,
        step("set_kind", loop="top_k", kind="parallel"),
        message="reduction iterator",
    ),
    refuse("a mask that is stored", make.weighted, *KEYS_FIRST, UNMASKED, message="every step may be unmasked"),
    refuse("a mask by squares", lambda: make.weighted(near=lambda i, k: le(k * k, i)), *KEYS_FIRST, UNMASKED, message="linear"),
    refuse("a mask by digits", lambda: make.weighted(near=lambda i, k: le(k, i % 3)), *KEYS_FIRST, UNMASKED, message="linear"),
    refuse(
        "hidden by another number",
        lambda: make.weighted(near=lambda i, k: or_(le(k, i), lt(i, 1))), *KEYS_FIRST, UNMASKED, message="every step",
    ),
    refuse("its parts inlined", make.weighted, *KEYS_FIRST, ROLL, step("compute_inline", block="weight"), message="one loop"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_online_softmax_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


def rolled(blocks_of: Any | None, tile: Any | None, whole: Any | None, guarded: bool, near: str = "") -> Schedule:
    """Apply a rolling update to `weighted`, over blocks of keys and tiles of rows.

    near: the mask of `NEAR`; whole: pad the keys to a multiple of it
    """
    s = Schedule(make.weighted(guarded, NEAR.get(near)))
    names = ["top", "weight", "total", "context"]
    if tile is not None:
        s.apply("pad_spatial", block="top", dim=0, factor=tile)
    if whole is not None:
        s.apply("pad_softmax_axis", block="top", factor=whole)
    if blocks_of is not None:
        s.apply("split_k_update", block="top", factor=blocks_of)
        names[1] = "top_scale"
    if tile is not None:
        outer, _ = s.split("divide_i", [None, tile])
        for name in reversed(names):
            s.compute_at(name, outer)
    for name in names:
        keys = next(n for n in s.loops_of(name) if n.endswith(("_b", "_b_1", "_k", "_k_1", "weight_j", "weight_j_1")))
        s.reorder([keys, *(n for n in s.loops_of(name) if n != keys and n.startswith(name))])
    s.apply("rolling_update", block="top", skip="masked" if near and tile is not None else "none")
    return s


FORMS = ((None, None, None), (None, 3, 2), (1, 2, None), (3, 2, 3), (TUNABLES[1], 3, TUNABLES[1]))


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(FORMS),
    st.booleans(),
    st.sampled_from(["", *NEAR]),
    st.integers(0, 8),
)
def test_softmax_updates_after_random_steps_keep_meaning(
    rng: random.Random, form: tuple[Any | None, int | None, Any | None], guarded: bool, near: str, steps: int
) -> None:
    s = rolled(*form, guarded, near)
    for _ in range(steps):
        primitive, args = random_step(s.func, rng)
        try:
            s.apply(primitive, **args)
        except ScheduleError:
            continue
    for _ in range(2):
        dims = {v.name: rng.choice(SIZES) for v in s.func.symbols}
        if not guarded:  # rows without any key are 0 / 0 there
            dims["m"] = 0
        assert_same_meaning(
            make.weighted(guarded, NEAR.get(near)), s.func, dims, tunables={t: rng.choice(t.domain) for t in TUNABLES}
        )


@pytest.mark.parametrize("keys", [None, 2, 3])
@pytest.mark.parametrize("guarded", [True, False])
def test_masked_keys_and_rows_have_zero_weight(keys: int | None, guarded: bool) -> None:
    """Blocks of hidden keys, before others and after; whole rows of them sum up to 0, never to NaN."""
    unmasked = np.array([[0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    rng = np.random.default_rng(0)
    x, v, y = rng.standard_normal((4, 5), np.float32), rng.standard_normal((5, 3), np.float32), np.zeros((4, 3), "f4")
    run_prim(rolled(keys, 2, keys, guarded).func, [x, unmasked, v, y], [])
    e = np.where(unmasked, np.exp(x), 0)
    np.testing.assert_allclose(y, e @ v / np.maximum(e.sum(1, keepdims=True), 1e-9), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("form", [(1, 2), (3, 2), (2, 5)])
def test_rolling_update_skips_blocks_masked_for_all_rows(form: tuple[int, int], near: str) -> None:
    s = rolled(*form, None, True, near)
    (keys,) = (p for p in loops(s.func.body) if p.var.name.startswith("top_b"))
    tiles = s.nest_of("top")[0].var
    node = find_block(s.func, "top")
    (step,) = (b for i, b in zip(node.iters, node.bindings) if i.kind == "reduce")
    for n, m in ((1, 1), (7, 5), (4, 9), (11, 11)):
        for t in range(-(-n // form[1])):
            at = {v: const({"n": n, "m": m}[v.name]) for v in s.func.symbols} | {tiles: const(t), keys.var: const(0)}
            count, first = (as_int(substitute(e, at)) for e in (keys.extent, step))
            assert count is not None and first is not None
            processed = list(range(first, first + count))
            rows = [const(i) for i in range(t * form[1], (t + 1) * form[1])]
            expected = [
                b
                for b in range(-(-m // form[0]))
                if any(NEAR[near](i, const(b * form[0] + k)) is TRUE for i in rows for k in range(form[0]))
            ]
            assert processed == (list(range(expected[0], expected[-1] + 1)) if expected else [])
    s.parallel(tiles.name)  # each has its own rows, for any first key
