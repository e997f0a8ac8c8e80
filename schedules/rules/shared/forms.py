"""Try the forms of a rule and leave out the forms that raise ScheduleError."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from relax_tune.errors import ScheduleError
from relax_tune.schedules.schedule import Schedule


def try_forms(forms: Iterable[tuple[str, Callable[[], Schedule]]]) -> Iterator[tuple[str, Schedule]]:
    """Yield the name and schedule of every form that neither a primitive nor the rule refuses."""
    for name, make in forms:
        try:
            schedule = make()
        except ScheduleError:
            continue
        yield name, schedule


def first_applicable(name: str, ways: Iterable[Callable[[], Schedule]]) -> Iterator[tuple[str, Schedule]]:
    """Yield the first of several schedules of one form that no primitive refuses, if any."""
    yield from islice(try_forms((name, make) for make in ways), 1)
