"""Factors that are expressions over shape symbols and tunables: what they mean, how traces hold them, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.schedules.test_trace import other_symbols
from tests.support import schedule_functions as make
from tests.support.meaning import assert_same_meaning

from relax_tune.errors import ScheduleError
from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.core.expr import Expr, Tunable, Var, free_vars, maximum, minimum
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.schedule import Schedule, replay
from relax_tune.schedules.symbols import slot
from relax_tune.schedules.trace import Trace

T = Tunable("T", (1, 2, 4))
N, M, ROWS = slot(0), slot(1), slot(0)


def sliced() -> Schedule:
    """Slices whose number or length the shapes say, over all primitives that take factors but pad."""
    s = Schedule(make.chain())
    n, m = s.func.symbols
    i_0, i_1 = s.split("inc_i", [None, n // 4 + 1])
    s.compute_at("double", i_0)
    s.apply("partition", loop=i_1, at=minimum(s.extent(i_1), T * 2 - 1))
    s.apply("partition", loop="inc_j", at=m - m % T)
    s.split("inc_j", [None, T])
    s.apply("transform_layout", buffer="B", index_map="i, j -> j // f0, i, j % f0", factors=[m // 2 + 1])
    s.apply("storage_align", buffer="B", factor=maximum(n, T), offset=1)
    return s


def padded() -> Schedule:
    """A product over whole multiples of what the number of rows says, a third of its columns at a time."""
    s = Schedule(make.matmul(None, 6, epilogue=False, const_weight=False))
    m, n = s.func.symbols
    s.apply("pad", block="mm", factors=[T, n % 3 + 1, m // 2 + 1])
    s.apply("cache_read", block="mm", buffer="W_pad", scope="global")
    s.apply("tile_layout", buffer="W_pad_cache", dim=1, factor=n // 3 + 1, order=[1, 0, 2])
    s.split("mm_k", [m // 2 + 1, None])
    return s


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [sliced, padded])
def test_symbolic_factors_keep_meaning(schedule: Callable[[], Schedule]) -> None:
    s = schedule()
    start = make.chain() if schedule is sliced else make.matmul(None, 6, False, False)
    for at, size in enumerate((0, 1, 2, 3, 5, 7, 8, 9, 13)):
        for tile in T.domain:
            dims = {v.name: size if number == at % 2 else 5 for number, v in enumerate(start.symbols)}
            assert_same_meaning(start, s.func, dims, tunables={T: tile})


def test_a_main_loop_up_to_a_multiple_splits_without_a_predicate() -> None:
    guards = {b.name: free_vars(b.predicate) for b in blocks(sliced().func.body)}
    assert T not in guards["inc"] and T in guards["inc_tail"]


@pytest.mark.parametrize("schedule", [sliced, padded])
def test_traces_record_slots_independent_of_symbol_names(schedule: Callable[[], Schedule]) -> None:
    s = schedule()
    text = s.trace.to_json()
    read = Trace.from_json(text)
    assert read.to_json() == text
    start = make.chain() if schedule is sliced else make.matmul(None, 6, False, False)
    copy = other_symbols(start)
    for tile in T.domain:
        replayed = replay(read.with_values({"T": tile}), copy)
        assert structural_equal(replayed.func, replay(s.trace.with_values({"T": tile}), start).func)
        assert replayed.trace.to_json() == read.with_values({"T": tile}).to_json()


@pytest.mark.parametrize("schedule", [sliced, padded])
def test_traces_with_slots_print_as_running_python(
    schedule: Callable[[], Schedule], golden: Callable[[str, str], None]
) -> None:
    s = schedule()
    golden(f"schedules/symbolic_{schedule.__name__}.txt", s.trace.as_python())
    start = make.chain() if schedule is sliced else make.matmul(None, 6, False, False)
    free, fixed = Schedule(other_symbols(start)), Schedule(start)
    exec(s.trace.as_python(), {"s": free})
    assert free.trace.to_json() == s.trace.to_json()
    exec(s.trace.as_python({"T": 2}), {"s": fixed})
    assert structural_equal(fixed.func, replay(s.trace.with_values({"T": 2}), start).func)


def test_trace_with_values_evaluates_expressions_of_tunables() -> None:
    s = Schedule(make.chain())
    s.split("inc_i", [None, T * 2 + 1])
    assert '{"expr":"T * 2 + 1"}' in s.trace.to_json()
    assert json.loads(s.trace.with_values({"T": 4}).to_json())["steps"][0][1]["factors"] == [None, 9]


def split_by(factor: Expr | int, loop: str = "inc_i") -> tuple[str, dict[str, object]]:
    return step("split", loop=loop, factors=[None, factor])


PREPARED = (
    step("cache_read", block="mm", buffer="W"),
    step("mark_prepack", block="W_cache_copy"),
)


def product() -> object:
    return make.matmul(8, 6, epilogue=False)


REFUSALS = [
    refuse("what may be zero", make.chain, split_by(N), message=r"positive factor, got n, which may be zero; max"),
    refuse("what a tunable may make zero", make.chain, split_by(T - 1), message="positive factor, got T - 1"),
    refuse("a division by what may be zero", make.chain, split_by(M // N + 1), message="that n is positive"),
    refuse(
        "a variable from nowhere",
        make.chain, split_by(Var("q") + 1),
        message="shape symbols .n, m., .* got q in",
    ),
    refuse(
        "a third symbol of two",
        make.chain, split_by(slot(2) + 1),
        message="3 or more shape symbols, got n, m",
    ),
    refuse("a number of more than 31 bits", make.chain, split_by(1 << 31), message="factors below"),
    refuse(
        "factors of more than 31 bits",
        make.chain, step("split", loop="inc_i", factors=[1 << 16, None, 1 << 16]),
        message="product of factors below",
    ),
    refuse(
        "shapes that may not divide",
        make.chain, step("split", loop="inc_i", factors=[None, 4], divides=True),
        message="4 may not divide the extent n",
    ),
    refuse(
        "a cut behind the end",
        make.chain, step("partition", loop="inc_i", at=N + 1),
        message=r"extent n, which min\(n \+ 1, n\)",
    ),
    refuse(
        "a cut before the start",
        make.chain, step("partition", loop="inc_i", at=N - 3),
        message="from 0 to the extent",
    ),
    refuse(
        "two ways to cut",
        make.chain, step("partition", loop="inc_i", factor=2, at=N // 2),
        message="either a factor or where to cut",
    ),
    refuse("no way to cut", make.chain, step("partition", loop="inc_i"), message="either a factor or where to cut"),
    refuse(
        "pad to what may be zero",
        make.chain, step("pad", block="inc", factors=[N, None]),
        message="positive factor",
    ),
    refuse(
        "rows of tiles",
        make.chain, step("set_scope", buffer="B", scope="local"), step("storage_align", buffer="B", factor=N + 1),
        message="without shape symbols for local",
    ),
    refuse(
        "split what runs once",
        product, *PREPARED, split_by(ROWS + 1, "W_cache_copy_i"),
        message="'W_cache_copy', which runs once",
    ),
    refuse(
        "tile what is filled once",
        product, *PREPARED, step("tile_layout", buffer="W_cache", dim=0, factor=ROWS + 1, order=[0, 1, 2]),
        message="which runs once",
    ),
    refuse(
        "align what is filled once",
        product, *PREPARED, step("storage_align", buffer="W_cache", factor=ROWS + 1),
        message="which runs once",
    ),
    refuse(
        "fill once what is aligned so",
        product, PREPARED[0], step("storage_align", buffer="W_cache", factor=ROWS + 1), PREPARED[1],
        message="depends on a shape symbol",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_symbolic_factors_of_unfit_step_are_refused(case: Refusal) -> None:
    check(case)


@pytest.mark.parametrize("name", ["s", "s0", "s12", "max", "Tunable", "not a name", "def", "x);import os#"])
def test_tunable_names_exclude_keywords_and_slots(name: str) -> None:
    with pytest.raises(ScheduleError, match="expected a tunable's name"):
        Schedule(make.chain()).tunable(name, (1, 2))
    with pytest.raises(ScheduleError, match="expected a tunable's name"):
        Schedule(make.chain()).split("inc_i", [None, Tunable(name, (1, 2))])
    with pytest.raises(ScheduleError, match="expected a schedule trace"):
        Trace.from_json(json.dumps({"tunables": {name: [1, 2]}, "steps": []}))
