"""Any legal trace keeps the meaning of a function, and replays from its JSON to the same function."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ir import zoo
from tests.schedules import functions as make
from tests.schedules.meaning import assert_same_meaning
from tests.schedules.random_steps import TUNABLES, random_step

from relax_tune.errors import ScheduleError
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.structural import structural_equal
from relax_tune.schedules.schedule import PRIMITIVES, Schedule, replay
from relax_tune.schedules.trace import Trace

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9)


@cache
def functions() -> tuple[PrimFunc, ...]:
    own = (
        make.chain(), make.stencil(), make.reverse(), make.two_outputs(), make.dot(), make.matmul(5, 6),
        make.softmax_mask(2), make.mean_over_middle(5), make.context(2, 3), make.scaled_rows(), make.flipped(),
    )  # fmt: skip
    names = {"softmax", "layer_norm", "gather", "concat_blocks", "transpose_0213", "reshape"}
    return (*own, *(c.func for c in zoo.cases() if c.name in names))


def random_schedule(func: PrimFunc, rng: random.Random, steps: int) -> Schedule:
    """A function after those of `steps` random steps that it does not refuse."""
    s = Schedule(func)
    for _ in range(steps):
        primitive, args = random_step(s.func, rng)
        try:
            s.apply(primitive, **args)
        except ScheduleError:
            continue
    return s


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False), st.integers(0, 16), st.integers(1, 14))
def test_legal_traces_keep_the_meaning(rng: random.Random, number: int, steps: int) -> None:
    func = functions()[number % len(functions())]
    s = random_schedule(func, rng, steps)
    for _ in range(2):
        dims = {v.name: rng.choice(SIZES) for v in func.symbols}
        assert_same_meaning(func, s.func, dims, tunables={t: rng.choice(t.domain) for t in TUNABLES})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False), st.integers(0, 16))
def test_traces_replay_from_json(rng: random.Random, number: int) -> None:
    func = functions()[number % len(functions())]
    s = random_schedule(func, rng, 10)
    text = s.trace.to_json()
    read = Trace.from_json(text)
    assert read.to_json() == text
    # tunables are values: their names, not their identities, tie the copy to the original
    values = {t.name: rng.choice(t.domain) for t in s.trace.tunables}
    by_number = replay(read.with_values(values), func).func
    assert structural_equal(by_number, replay(s.trace.with_values(values), func).func)


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_random_steps_reach_every_primitive(primitive: str) -> None:
    # mark_prepare and tree_reduce want a special shape; what random traces cannot reach has tests of its own
    rng = random.Random(5)
    func = make.matmul(4, 6)
    for _ in range(4000):
        name, args = random_step(func, rng)
        if name == primitive:
            assert set(args) <= set(PRIMITIVES[primitive].__annotations__)
            return
    raise AssertionError(f"no random step applies {primitive}")
