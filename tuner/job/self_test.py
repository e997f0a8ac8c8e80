"""The self-test of a build: every dispatched variant runs against the reference before it ships."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_tune.errors import BuildError, RelaxTuneError
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.job.footprint import point_bytes
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.messages import CheckCase, MeasureRequest
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.plan.task_rows import variant_text
from relax_tune.tuner.task.check import check_at, check_case, check_work
from relax_tune.tuner.task.domain import Point
from relax_tune.tuner.task.task import Choices, Task

# Loop iterations of the reference at a shape of the plan, and bytes of its arrays; the two shapes of `check_case` are always run.
WORK, BYTES = 1 << 22, 1 << 28
DEADLINE_SECS = 60.0

Refused = Mapping[str, Mapping[str, str]]
"""By function, the variants that failed, and why."""


@dataclass(frozen=True, slots=True)
class FailedVariant:
    """A variant whose outputs were wrong or missing.

    key: the variant's key in the plan; variant: the variant in words; why: stage and message
    """

    function: str
    key: str
    variant: str
    why: str


@dataclass
class SelfTest:
    """The results of a self-test so far.

    passed: (function, key) of the variants whose outputs were right
    failures: those of the others
    """

    passed: set[tuple[str, str]] = field(default_factory=set)
    failures: list[FailedVariant] = field(default_factory=list)

    @property
    def failed(self) -> dict[str, dict[str, str]]:
        """By function, why each failed variant failed."""
        found: dict[str, dict[str, str]] = {}
        for f in self.failures:
            found.setdefault(f.function, {})[f.key] = f.why
        return found

    def known(self, function: str, key: str) -> bool:
        return (function, key) in self.passed or key in self.failed.get(function, ())

    def notes(self) -> list[str]:
        """Return one sentence for each failure."""
        return [
            f"{f.function}: {f.variant} failed the self-test and is not dispatched ({f.why})" for f in self._sorted()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the plain values that a manifest keeps."""
        failed = [{"function": f.function, "variant": f.variant, "why": f.why} for f in self._sorted()]
        return {"passed": len(self.passed), "failed": failed}

    def _sorted(self) -> list[FailedVariant]:
        return sorted(self.failures, key=lambda f: (f.function, f.key))


def tested(
    build: Callable[[Refused], BuildResult], choices: Mapping[str, Choices], runner: Runner
) -> tuple[BuildResult, SelfTest]:
    """Build, run each dispatched variant at a few sizes, and build again without the variants that failed, until none does.

    build: builds without the given variants

    Raises BuildError when no form of a function is right, MeasureError when the device is lost."""
    found = SelfTest()
    while True:
        built = build(found.failed)
        requests = dict(_requests(built.plans, choices, found))
        right = True
        for result in runner.submit([r for r, _, _ in requests.values()]).result():
            _, function, key = requests[result.id]
            if result.ok:
                found.passed.add((function, key))
            else:
                right = False
                why = f"{result.stage}: {_first_line(result.message)}"
                variant = variant_text(built.plans[function].variants[key])
                found.failures.append(FailedVariant(function, key, variant, why))
        if right:
            return built, found


def _requests(
    plans: Mapping[str, TaskPlan], choices: Mapping[str, Choices], found: SelfTest
) -> Iterator[tuple[str, tuple[MeasureRequest, str, str]]]:
    """Yield the request of each dispatched variant that has not run yet, by id, with its function and key."""
    for function, plan in plans.items():
        own = choices[function]
        keys = [k for k in plan.plan.variants if not found.known(function, k)]
        standard: Sequence[CheckCase] = _cases(own.task) if keys else ()
        for key in keys:
            try:
                program = own.program(plan.variants[key])
            except RelaxTuneError as error:
                raise BuildError(f"{function}: {variant_text(plan.variants[key])} cannot be made: {error}") from error
            identity = hashlib.blake2b(f"{own.task.key}:{function}:{key}".encode(), digest_size=16).hexdigest()
            cases = (*standard, *(check_at(own.task, p) for p in _dispatched(own.task, plan, key)))
            yield (
                identity,
                (MeasureRequest(identity, program.to_json(), cases, (), deadline_secs=DEADLINE_SECS), function, key),
            )


def _cases(task: Task) -> tuple[CheckCase, ...]:
    """Return the two shapes at which every candidate is checked; one if they are equal."""
    first, second = check_case(task, 0), check_case(task, 1)
    return (first,) if first.symbols == second.symbols else (first, second)


def _dispatched(task: Task, plan: TaskPlan, key: str) -> list[Point]:
    """Return the largest cheap shape at which a plan dispatches a variant, if there is one."""
    points = [p for p in (*task.domain.points, *task.domain.others) if plan.plan.choose(p) == key]
    work = {p: check_work(task, p) for p in points}
    cheap = (p for p in points if work[p] <= WORK and point_bytes(task, p) <= BYTES)
    return sorted(cheap, key=lambda p: (work[p], p))[-1:]


def _first_line(message: str) -> str:
    return next(iter(message.splitlines()), "no message")[:200]
