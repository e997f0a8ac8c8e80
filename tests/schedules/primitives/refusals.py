"""Cases of refusals: steps that pass, then one that must be refused, and the words of its error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.text.printer import print_text
from relax_tune.schedules.schedule import Schedule

Step = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Refusal:
    """`message` is searched (as a regular expression) in the error's text."""

    what: str
    func: Callable[[], PrimFunc]
    steps: tuple[Step, ...]
    step: Step
    message: str


def refuse(what: str, func: Callable[[], PrimFunc], *steps: Step, message: str) -> Refusal:
    return Refusal(what, func, steps[:-1], steps[-1], message)


def step(primitive: str, **args: Any) -> Step:
    return primitive, args


def check(case: Refusal) -> None:
    s = Schedule(case.func())
    for primitive, args in case.steps:
        s.apply(primitive, **args)
    before, trace = print_text(s.func), s.trace
    primitive, args = case.step
    with pytest.raises(ScheduleError, match=case.message):
        s.apply(primitive, **args)
    assert print_text(s.func) == before and s.trace == trace, "a refused step must leave nothing behind"
