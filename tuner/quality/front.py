"""Choice of an option per group under a bound: a greedy walk along the Pareto front of time and loss.

The problem is the multiple-choice knapsack problem. With losses that add, the walk is the greedy algorithm for its linear
relaxation (Sinha and Zoltners 1979), which is at most one step from the optimum. Losses of a model do not add, so each step is
measured before it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TypeOption:
    """A type for a group.

    Attributes:
        secs: Seconds of the group in one run.
        loss: Measured loss of the model if only this group changes, as a share of the allowed loss.
    """

    kind: str
    secs: float
    loss: float


@dataclass(frozen=True, slots=True)
class TypeChange:
    """A change of one group.

    Attributes:
        saved: Seconds that it saves.
        lost: Loss that it adds, if losses add.
    """

    group: int
    option: TypeOption
    saved: float
    lost: float


@dataclass(frozen=True, slots=True)
class Point(Generic[T]):
    """A choice for all groups that was measured and satisfies the bound.

    Attributes:
        kinds: Type of each group that does not have its exact type.
        saved: Predicted seconds that it saves in one run.
        quality: Measured quality.
    """

    kinds: Mapping[int, str]
    saved: float
    quality: T


def lower_hull(exact_secs: float, options: Sequence[TypeOption]) -> list[TypeOption]:
    """Return the options on the lower convex hull of time over loss, without the exact one.

    Each option is faster and loses more than its predecessor, at a lower rate of time saved per loss. None exceeds the allowed loss.
    """
    hull = [TypeOption("", exact_secs, 0.0)]
    for option in sorted((o for o in options if o.loss <= 1), key=lambda o: (max(o.loss, 0.0), o.secs, o.kind)):
        if option.secs >= hull[-1].secs:
            continue
        # An option above the line between its neighbours saves less per loss than a mixture of them, so it is left
        # out.
        while len(hull) > 1 and _rate(hull[-2], hull[-1]) <= _rate(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull[1:]


def _rate(before: TypeOption, after: TypeOption) -> float:
    """Return the seconds that a change saves per unit of added loss."""
    lost = max(after.loss, 0.0) - max(before.loss, 0.0)
    return (before.secs - after.secs) / lost if lost > 0 else float("inf")


def steps_of(exact_secs: Sequence[float], options: Sequence[Sequence[TypeOption]]) -> list[TypeChange]:
    """Return the steps of all groups, in order of time saved per loss."""
    rated: list[tuple[float, TypeChange]] = []
    for group, (secs, group_options) in enumerate(zip(exact_secs, options, strict=True)):
        before = TypeOption("", secs, 0.0)
        for option in lower_hull(secs, group_options):
            step = TypeChange(group, option, before.secs - option.secs, max(option.loss, 0.0) - max(before.loss, 0.0))
            rated.append((_rate(before, option), step))
            before = option
    return [step for _, step in sorted(rated, key=lambda f: (-f[0], -f[1].saved, f[1].group))]


def walk(
    exact_secs: Sequence[float],
    options: Sequence[Sequence[TypeOption]],
    measure: Callable[[Mapping[int, str]], T],
    holds: Callable[[T], bool],
    loss: Callable[[T], float],
) -> list[Point[T]]:
    """Return the Pareto front of measured choices that satisfy the bound: the exact one, then each faster than its predecessor.

    A step that violates the bound is undone, and its group takes no further step of the hull. At the end the remaining faster
    options are tried in order of the time they save.
    """
    chosen: dict[int, TypeOption] = {}
    points = [Point({}, 0.0, measure({}))]

    def take(group: int, option: TypeOption) -> bool:
        tried = {**chosen, group: option}
        kinds = {p: o.kind for p, o in sorted(tried.items())}
        quality = measure(kinds)
        if not holds(quality):
            return False
        chosen[group] = option
        points.append(Point(kinds, sum(exact_secs[p] - o.secs for p, o in chosen.items()), quality))
        return True

    stopped: set[int] = set()
    refused: set[tuple[int, str]] = set()
    for step in steps_of(exact_secs, options):
        if step.group not in stopped and not take(step.group, step.option):
            stopped.add(step.group)
            refused.add((step.group, step.option.kind))
    # A step too large for the bound ends its group above. A smaller saving in another group, or an option off the hull, may
    # still fit: a second pass tries the largest savings first.
    left = [(secs - o.secs, p, o) for p, secs in enumerate(exact_secs) for o in options[p]]
    for saved, group, option in sorted(left, key=lambda f: (-f[0], f[1], f[2].kind)):
        now = exact_secs[group] - chosen[group].secs if group in chosen else 0.0
        if saved > now and option.loss <= 1 and (group, option.kind) not in refused:
            take(group, option)
    front: list[Point[T]] = []
    for point in reversed(points[1:]):
        if not front or loss(point.quality) < loss(front[-1].quality):
            front.append(point)
    return [points[0], *reversed(front)]
