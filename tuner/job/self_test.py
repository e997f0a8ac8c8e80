"""The self-test of a build: every dispatched variant runs against the reference before it ships."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from relax_tune.errors import BuildError, RelaxTuneError, VerifyError, left_out
from relax_tune.tuner.emit.build import BuildResult, Refused
from relax_tune.tuner.job.footprint import point_bytes
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.messages import CheckCase, MeasureRequest
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.plan.task_rows import variant_text
from relax_tune.tuner.task.check import CheckCases, check_elements, check_work
from relax_tune.tuner.task.domain import Point
from relax_tune.tuner.task.task import Task
from relax_tune.tuner.task.variants import TaskVariants

# Most loop iterations of the reference and bytes of its arrays at a shape of the plan. The smaller shape of `check_case` always runs,
# unless it has more elements than `STANDARD_ELEMENTS` and a shape of the plan has fewer.
WORK, BYTES = 1 << 22, 1 << 28
# Most elements (`check_elements`) at a shape of `check_case`: with large fixed dims, 19 of another dim took minutes (an encoder of speech:
# 19 times 400 rows of 1,536).
STANDARD_ELEMENTS = 1 << 22
# The same at a shape of the plan, if the plan dispatches the variant at a shape with fewer. Threads take part from about 2,048 vectors on.
PLAN_ELEMENTS = 1 << 19
DEADLINE_SECS = 60.0
BATCH = 8  # variants that are compiled together: two units of four on a machine of two processors


@dataclass(frozen=True, slots=True)
class FailedVariant:
    """A variant whose outputs were wrong or missing.

    Attributes:
        key: The variant's key in the plan.
        variant: Description for people.
        why: Stage and message.
    """

    function: str
    key: str
    variant: str
    why: str


@dataclass
class SelfTest:
    """The results of a self-test so far.

    Attributes:
        passed: (function, key) of the variants with correct outputs.
        failures: Variants with wrong outputs.
        unchecked: Functions for which no check could be computed; their kernels were only compiled.
    """

    passed: set[tuple[str, str]] = field(default_factory=set)
    failures: list[FailedVariant] = field(default_factory=list)
    unchecked: set[str] = field(default_factory=set)

    @property
    def failed(self) -> dict[str, dict[str, str]]:
        """By function, why each failed variant failed."""
        reasons: dict[str, dict[str, str]] = {}
        for f in self.failures:
            reasons.setdefault(f.function, {})[f.key] = f"it failed the self-test: {f.why}"
        return reasons

    def known(self, function: str, key: str) -> bool:
        return (function, key) in self.passed or key in self.failed.get(function, ())

    def notes(self) -> list[str]:
        """Return one sentence for each failure, and for each function without checks."""
        failed = (
            f"{f.function}: {f.variant} failed the self-test and is not dispatched ({f.why})" for f in self._sorted()
        )
        return [
            *failed,
            *(f"{f}: no check could be computed, so its results are not tested" for f in sorted(self.unchecked)),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the plain values for the manifest of an artifact."""
        failed = [{"function": f.function, "variant": f.variant, "why": f.why} for f in self._sorted()]
        return {"passed": len(self.passed), "failed": failed}

    def _sorted(self) -> list[FailedVariant]:
        return sorted(self.failures, key=lambda f: (f.function, f.key))


def tested(
    build: Callable[[Refused], BuildResult], task_variants: Mapping[str, TaskVariants], runner: Runner
) -> tuple[BuildResult, SelfTest]:
    """Build, run each dispatched variant at a few sizes, and build again without the variants that failed, until none does.

    Args:
        build: Builds without the given variants.

    Raises:
        BuildError: No form of a function has correct results.
        MeasureError: The device is lost.
    """
    results = SelfTest()
    plain, exact = CheckCases(slack=False), CheckCases()
    while True:
        built = build(results.failed)
        requests: dict[str, tuple[MeasureRequest, str, str]] = {}
        answers = []
        generated = _requests(built.plans, task_variants, results, plain)
        # the references of the next variants are computed while the runner compiles these
        while batch := dict(islice(generated, BATCH)):
            requests |= batch
            answers.append(runner.submit([r for r, _, _ in batch.values()]))
        outcomes = {r.id: r for answer in answers for r in answer.result()}
        doubtful = {(f, key) for i, (_, f, key) in requests.items() if outcomes[i].stage == "wrong-result"}
        if doubtful:  # a right kernel of a function that amplifies rounding may differ by more than the plain tolerance
            again = dict(_requests(built.plans, task_variants, results, exact, doubtful))
            outcomes |= {r.id: r for r in runner.submit([r for r, _, _ in again.values()]).result()}
        right = True
        for result in outcomes.values():
            _, function, key = requests[result.id]
            if result.ok:
                results.passed.add((function, key))
            else:
                right = False
                why = f"{result.stage}: {_first_line(result.message)}"
                variant = variant_text(built.plans[function].variants[key])
                results.failures.append(FailedVariant(function, key, variant, why))
        if right:
            return built, results


def _requests(
    plans: Mapping[str, TaskPlan],
    task_variants: Mapping[str, TaskVariants],
    results: SelfTest,
    checks: CheckCases,
    only: Collection[tuple[str, str]] | None = None,
) -> Iterator[tuple[str, tuple[MeasureRequest, str, str]]]:
    """Yield the request of each dispatched variant that has not run yet, by id, with its function and key.

    Args:
        only: Functions and keys; None: all.
    """
    for function, plan in plans.items():
        variants = task_variants[function]
        keys = [
            k for k in plan.plan.variants if not results.known(function, k) and (only is None or (function, k) in only)
        ]
        standard: Sequence[CheckCase] = ()
        if keys:
            with left_out("every check", function, VerifyError):
                standard = checks.standard(variants.task, STANDARD_ELEMENTS)
            if not standard:
                results.unchecked.add(function)
        for key in keys:
            try:
                program = variants.program(plan.variants[key])
            except RelaxTuneError as error:
                raise BuildError(
                    f"{function}: {variant_text(plan.variants[key])} cannot be generated: {error}"
                ) from error
            identity = hashlib.blake2b(f"{variants.task.key}:{function}:{key}".encode(), digest_size=16).hexdigest()
            dispatched = checks.all_at(variants.task, _dispatched(variants.task, plan, key))
            cases = (*standard, *(c for c in dispatched if all(c is not other for other in standard)))
            yield (
                identity,
                (MeasureRequest(identity, program.to_json(), cases, (), deadline_secs=DEADLINE_SECS), function, key),
            )


def _dispatched(task: Task, plan: TaskPlan, key: str) -> list[Point]:
    """Return the largest cheap shape at which a plan dispatches a variant, if there is one."""
    points = [p for p in (*task.domain.points, *task.domain.others) if plan.plan.choose(p) == key]
    work = {p: check_work(task, p) for p in points}
    cheap = sorted((p for p in points if work[p] <= WORK and point_bytes(task, p) <= BYTES), key=lambda p: (work[p], p))
    small = [p for p in cheap if check_elements(task, p) <= PLAN_ELEMENTS]
    return small[-1:] or cheap[:1]


def _first_line(message: str) -> str:
    return next(iter(message.splitlines()), "no message")[:200]
