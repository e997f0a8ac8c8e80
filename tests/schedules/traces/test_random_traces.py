"""Any legal trace keeps the meaning of a function, and replays from its JSON to the same function."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.primitives.test_golden import CASES, Case, T
from tests.schedules.traces.random_steps import TUNABLES, random_step
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.effort import examples
from tests.support.meaning import assert_same_meaning

from relax_tune.errors import ScheduleError
from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.core.expr import free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.schedule import PRIMITIVES, Schedule, replay
from relax_tune.schedules.trace import Trace

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9)


@cache
def functions() -> tuple[PrimFunc, ...]:
    own = (
        make.chain(), make.stencil(), make.reverse(), make.two_outputs(), make.dot(), make.matmul(5, 6),
        make.softmax_mask(2), make.mean_over_middle(5), make.context(2, 3), make.scaled_rows(), make.flipped(),
        make.windows(), make.prefix_sums(), make.prefix_sums(0, True, True), make.top_places(), make.scattered_rows(),
    )  # fmt: skip
    names = {"softmax", "layer_norm", "gather", "concat_blocks", "transpose_0213", "reshape"}
    return (*own, *(c.func for c in zoo.cases() if c.name in names))


def random_schedule(func: PrimFunc, rng: random.Random, steps: int) -> Schedule:
    """A function after `steps` random steps, without the steps that it refuses."""
    return further(Schedule(func), rng, steps)


def further(s: Schedule, rng: random.Random, steps: int) -> Schedule:
    for _ in range(steps):
        primitive, args = random_step(s.func, rng)
        try:
            s.apply(primitive, **args)
        except ScheduleError:
            continue
    return s


TILES: list[tuple[str, dict[str, Any]]] = [
    ("split", {"loop": "inc_i", "factors": [None, 4]}),
    ("split", {"loop": "inc_j", "factors": [None, T]}),
    ("reorder", {"names": ["inc_j_0", "inc_i_1"]}),
    ("compute_at", {"block": "double", "loop": "inc_j_0"}),
    ("set_scope", {"buffer": "B", "scope": "local"}),
]
# what makes each primitive apply, for those whose golden case no language has code for: a local buffer of any size
STARTS: dict[str, Case] = {
    **CASES,
    "set_scope": Case(make.chain, TILES),
    "storage_align": Case(make.chain, [*TILES, ("storage_align", {"buffer": "B", "factor": 8, "offset": 1})]),
    "swizzle": Case(
        make.chain,
        [*TILES[:-1], ("set_scope", {"buffer": "B", "scope": "shared"}), ("swizzle", {"buffer": "B", "vector": 4})],
    ),
    "software_pipeline": Case(
        CASES["software_pipeline"].func,
        [
            ("cache_read", {"block": "mm", "buffer": "W", "scope": "local"}),
            ("split", {"loop": "mm_k", "factors": [None, T]}),
            ("reorder", {"names": ["mm_j", "mm_k_0", "mm_i", "mm_k_1"]}),
            ("compute_at", {"block": "W_cache_copy", "loop": "mm_k_0"}),
            ("software_pipeline", {"block": "W_cache_copy", "loop": "mm_k_0", "stages": 3}),
        ],
    ),
    "cache_write": Case(make.chain, [("cache_write", {"block": "double", "scope": "global", "readers": ["inc"]})]),
}


def sizes_in_scope(func: PrimFunc) -> bool:
    """Whether no buffer's size depends on a loop."""
    known = {*func.symbols, *TUNABLES, T}
    return all(v in known for b in func.allocs for d in b.shape for v in free_vars(d))


def started(primitive: str, rng: random.Random, steps: int) -> tuple[PrimFunc, Schedule]:
    """A function, and its schedule by a primitive (after what that needs) and random steps that it does not refuse."""
    func = STARTS[primitive].func()
    s = Schedule(func)
    for name, args in STARTS[primitive].steps:
        s.apply(name, **args)
    return func, further(s, rng, steps)


@pytest.mark.slow
@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_every_primitive_keeps_the_meaning_among_others(primitive: str) -> None:
    rng = random.Random(f"among others: {primitive}")
    for steps in (3, 9):
        func, s = started(primitive, rng, steps)
        assert any(step.primitive == primitive for step in s.trace.steps)
        assert sizes_in_scope(s.func)
        for size in (0, 1, rng.choice(SIZES), rng.choice(SIZES)):
            dims = {v.name: rng.choice((size, rng.choice(SIZES))) for v in func.symbols}
            assert_same_meaning(func, s.func, dims, tunables={t: rng.choice(t.domain) for t in (T, *TUNABLES)})


@settings(max_examples=examples(100))
@given(st.randoms(use_true_random=False), st.integers(0, 17), st.integers(1, 14))
def test_legal_traces_keep_the_meaning(rng: random.Random, number: int, steps: int) -> None:
    func = functions()[number % len(functions())]
    s = random_schedule(func, rng, steps)
    assert sizes_in_scope(s.func)
    for _ in range(2):
        dims = {v.name: rng.choice(SIZES) for v in func.symbols}
        assert_same_meaning(func, s.func, dims, tunables={t: rng.choice(t.domain) for t in TUNABLES})


@settings(max_examples=examples(40))
@given(st.randoms(use_true_random=False), st.integers(0, 17))
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
    rng = random.Random(5)
    func = make.matmul(4, 6)
    for _ in range(4000):
        name, args = random_step(func, rng)
        if name == primitive:
            assert set(args) <= set(PRIMITIVES[primitive].__annotations__)
            return
    raise AssertionError(f"no random step applies {primitive}")
