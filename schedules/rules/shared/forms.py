"""Try the forms of a rule and leave out the forms that raise ScheduleError.

Tests: `tests/tuner/job/test_unexpected_errors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from relax_tune.errors import ScheduleError, left_out
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.schedule import Schedule


def try_forms(func: PrimFunc, forms: Iterable[tuple[str, Callable[[], Schedule]]]) -> Iterator[tuple[str, Schedule]]:
    """Yield the name and schedule of every form of a function that neither a primitive nor the rule refuses.

    A form that raises another error than ScheduleError is left out with a warning.
    """
    for name, make in forms:
        schedule = None
        with left_out(f"the schedule {name}", func.name, ScheduleError):
            schedule = make()
        if schedule is not None:
            yield name, schedule


def first_applicable(
    func: PrimFunc, name: str, options: Iterable[Callable[[], Schedule]]
) -> Iterator[tuple[str, Schedule]]:
    """Yield the first of several schedules of one form that no primitive refuses, if any."""
    yield from islice(try_forms(func, ((name, make) for make in options)), 1)
