"""Untrusted traces: replaying a wrong one raises ScheduleError with the step and its loops, and no other error."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.primitives.test_golden import CASES
from tests.schedules.traces.test_symbolic_factors import padded, sliced
from tests.support import schedule_functions as make
from tests.support.effort import examples

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules import schedule
from relax_tune.schedules.schedule import Schedule, replay
from relax_tune.schedules.sketch import simplify_func
from relax_tune.schedules.symbols import slot
from relax_tune.schedules.trace import Step, Trace

NOWHERE = "nothing_called_so"
# by kind of argument, what is never right there
WRONG: dict[type, tuple[Any, ...]] = {
    str: (NOWHERE, "", 3, None, True, ("x",)),
    int: (0, -1, 1 << 31, "two", slot(9), slot(0) - 1),
    bool: ("yes", 1, None),
    tuple: (NOWHERE, (NOWHERE,), 7, (True,), ((1,),)),
}


@cache
def traces() -> dict[str, tuple[PrimFunc, Trace]]:
    """Of every primitive, and with symbolic factors."""
    by_name: dict[str, tuple[PrimFunc, Trace]] = {}
    for name, case in CASES.items():
        s = Schedule(case.func())
        for primitive, args in case.steps:
            s.apply(primitive, **args)
        by_name[name] = case.func(), s.trace
    by_name["sliced"] = make.chain(), sliced().trace
    by_name["padded"] = make.matmul(None, 6, epilogue=False, const_weight=False), padded().trace
    return by_name


def broken(trace: Trace) -> Iterator[tuple[int, Trace]]:
    """The trace with one argument of one step that is wrong, and that step's number; or with a primitive nobody has."""
    for at, step in enumerate(trace.steps):
        options = [
            replace(step, primitive="explode"),
            replace(step, args=()),
            replace(step, args=(*step.args, ("more", 1))),
        ]
        for number, (key, value) in enumerate(step.args):
            kind = type(value) if type(value) in WRONG else int
            for wrong in WRONG[kind]:
                if wrong in {"at": (0, None), "dim": (0,), "axis": (0,), "offset": (0,)}.get(key, ()):
                    continue  # right for these
                options.append(replace(step, args=(*step.args[:number], (key, wrong), *step.args[number + 1 :])))
        for option in options:
            yield at + 1, Trace((*trace.steps[:at], option, *trace.steps[at + 1 :]), trace.tunables)


@pytest.mark.slow
@pytest.mark.parametrize("name", traces())
def test_replay_with_wrong_argument_marks_nest(name: str) -> None:
    func, trace = traces()[name]
    tried = 0
    for number, wrong in broken(trace):
        with pytest.raises(ScheduleError) as error:
            replay(wrong, func)
        first, *rest = str(error.value).split("\ns.apply(")
        assert first.startswith(f"step {number} of the trace does not apply: "), first
        assert len(rest) == 1
        lines = rest[0].splitlines()
        # the step, with carets or without; then the nest, as numbered lines, with carets or without
        nest = [line for line in lines[1:] if "|" in line[:7]]
        carets = [line for line in lines[1:] if line.replace("|", "").strip(" ^") == "" and "^" in line]
        assert nest and carets, str(error.value)
        tried += 1
    assert tried >= 5 * len(trace.steps)


def test_replay_of_doubling_steps_stops_at_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MAX_STATEMENTS", 100)
    steps, names = list[Step](), ["inc_i"]
    for _ in range(8):
        steps.append(Step("split", (("loop", names[-1]), ("factors", (None, 2)))))
        names.append(f"{names[-1]}_1")
    steps += [Step("partition", (("loop", f"{n}_0"), ("factor", 2))) for n in reversed(names[:-1])]
    with pytest.raises(ScheduleError, match="expected at most 100 loops and blocks"):
        replay(Trace(tuple(steps)), make.chain())


def test_replay_of_deep_nest_stops_at_bound() -> None:
    """Each split makes a loop inside the last one; what reads the nest afterwards would take for ever."""
    steps = [Step("split", (("loop", "inc_i" + "_1" * k), ("factors", (None, 2)))) for k in range(100)]
    with pytest.raises(ScheduleError, match=f"{schedule.MAX_DEPTH} of them nested.*got"):
        replay(Trace(tuple(steps)), make.chain())


def test_replay_of_many_steps_stops_at_bound() -> None:
    steps = [Step("parallel", (("loop", "inc_i"),))] * (schedule.MAX_STEPS + 1)
    with pytest.raises(ScheduleError, match="at most 400 steps, got 401"):
        replay(Trace(tuple(steps)), make.chain())


def test_replay_of_much_work_stops_at_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MAX_WORK", 50)
    steps = [Step("split", (("loop", "inc_i" + "_1" * k), ("factors", (None, 2)))) for k in range(10)]
    with pytest.raises(ScheduleError, match="50 after all steps together"):
        replay(Trace(tuple(steps)), make.chain())


_ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.just(1 << 40), st.just(0.5),
    st.sampled_from([NOWHERE, "", "inc_i", "B", "mm", "parallel", "local"]),
    st.sampled_from(["s0 // 4 + 1", "s0", "T", "s0 % T + 1", "s7", "max(s0, 1) * T", "0", "s0 - 1", "T // s0"]).map(lambda e: {"expr": e}),
    st.just({"tunable": "T"}), st.just({}),
)  # fmt: skip
_VALUES = st.one_of(_ATOMS, st.lists(_ATOMS, max_size=3))


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(sorted(traces())), st.randoms(use_true_random=False), st.data())
def test_damaged_traces_are_refused_or_keep_meaning(name: str, rng: random.Random, data: st.DataObject) -> None:
    func, trace = traces()[name]
    damaged = json.loads(trace.to_json())
    damaged["tunables"].setdefault("T", [2, 4])
    steps = damaged["steps"]
    for _ in range(rng.randrange(1, 3)):
        match rng.randrange(5):
            case 0:
                rng.shuffle(steps)
            case 1:
                steps.append(rng.choice(steps))
            case _:
                args = rng.choice(steps)[1]
                args[rng.choice(sorted(args))] = data.draw(_VALUES)
    with suppress(ScheduleError):
        simplify_func(replay(Trace.from_json(json.dumps(damaged)), func).func)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(sorted(traces())),
    st.integers(0, 10_000),
    st.text(alphabet='{}[]":,0x1sT +-*/%()e\\u\n', max_size=4),
)
def test_scrambled_text_is_refused_or_reads(name: str, at: int, put: str) -> None:
    text = traces()[name][1].to_json()
    at %= len(text)
    with suppress(ScheduleError):
        read = Trace.from_json(text[:at] + put + text[at + len(put) :])
        assert Trace.from_json(read.to_json()).to_json() == read.to_json()
        read.as_python()
