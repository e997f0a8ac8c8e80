"""What a rule tries of a function: several forms, of which those that do not fit it are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from relax_tune.errors import ScheduleError
from relax_tune.schedules.schedule import Schedule


def try_forms(forms: Iterable[tuple[str, Callable[[], Schedule]]]) -> Iterator[tuple[str, Schedule]]:
    """The schedule of every form by its name, without those that a primitive, or the rule itself, refuses."""
    for name, make in forms:
        try:
            schedule = make()
        except ScheduleError:
            continue
        yield name, schedule


def first_applicable(name: str, ways: Iterable[Callable[[], Schedule]]) -> Iterator[tuple[str, Schedule]]:
    """The first of several schedules of one form that fits, if one does."""
    yield from islice(try_forms((name, make) for make in ways), 1)
