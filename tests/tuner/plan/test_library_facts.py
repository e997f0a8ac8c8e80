"""Times of a library count where it is what it was when they were taken; a build says what it could not use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.tuner_models import (
    PAPER_DEVICE,
    QUICK,
    RecordedRunner,
    add_environment,
    add_records,
    feed_forward,
    ok_record,
    paper_job,
)

from relax_tune.database.records import Measurement
from relax_tune.database.store import MemoryStore, Store
from relax_tune.tuner.job.job import Job
from relax_tune.tuner.task.task import Choices

OTHER = "core Elder; threads 2"


def without_libraries(store: Store) -> Job:
    """The paper's device where nothing is installed."""
    return Job(feed_forward(), replace(PAPER_DEVICE, libraries=()), store, QUICK)


def with_product() -> tuple[Job, Choices]:
    """A job whose store knows its target, and its first task that a library can take."""
    job = paper_job(feed_forward)
    job.store.add_target(job.target)
    choices = next(c for c in job.choices.values() if c.library_variants())
    return job, choices


def timed(job: Job, choices: Choices, library: float, tuned: float, environment: str) -> Sequence[Measurement]:
    """Records of every library form in an environment, and of one kernel, at all anchors."""
    task, here = choices.task, add_environment(job)
    kernel = choices.tuned(choices.seeds(1)[0])
    rows = [(v, library, environment) for v in choices.library_variants()] + [(kernel, tuned, here)]
    records = [ok_record(task, job.target.key, v, p, s, environment=e) for v, s, e in rows for p in task.domain.points]
    add_records(job.store, task, records)
    return records


def kinds(job: Job, choices: Choices) -> set[str]:
    plan = job.build().plans[choices.task.name]
    return {plan.variants[k].kind for k in plan.plan.variants}


def notes(job: Job, choices: Choices, word: str) -> list[str]:
    return [n for n in job.build().notes if n.startswith(f"{choices.task.name}:") and word in n]


def test_times_of_present_library_count_without_note() -> None:
    job, choices = with_product()
    timed(job, choices, library=1e-6, tuned=1.0, environment=add_environment(job))
    assert kinds(job, choices) == {"library"} and not notes(job, choices, "openblas")


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_times_of_changed_library_do_not_count_until_retimed(known: bool) -> None:
    job, choices = with_product()
    environment = add_environment(job, openblas=OTHER) if known else ""
    stale = timed(job, choices, library=1e-9, tuned=1.0, environment=environment)
    assert kinds(job, choices) == {"tuned"}
    (note,) = notes(job, choices, "openblas")
    assert ("core Elder (here core Paper)" if known else "not recorded (here core Paper; threads 2)") in note
    assert "relax-tune tune" in note and not [
        r for r in job.records(choices.task.key, choices.task.regime) if r.variant.kind == "library"
    ]
    runner = RecordedRunner(lambda program, symbols: 1e-6 if program.calls[0].variants[0].label == "library" else 1.0)
    job.tune(runner)
    again = [r for r in job.records(choices.task.key, choices.task.regime) if r.variant.kind == "library"]
    assert again and not {r.id for r in again} & {r.id for r in stale}
    assert all(job.facts.recorded(r) == job.libraries for r in again)
    assert kinds(job, choices) == {"library"} and not notes(job, choices, "openblas")
    measured = len(runner.batches)
    job.tune(runner)
    assert len(runner.batches) == measured


def test_a_failure_of_another_state_of_the_library_is_forgiven() -> None:
    job, choices = with_product()
    records = timed(job, choices, library=1e-6, tuned=1.0, environment=add_environment(job))
    failure = Measurement(
        *("f", choices.task.key, job.target.key, choices.library_variants()[0], {}, "failed", "crash", "died"),
        environment=add_environment(job, openblas=OTHER),
    )
    job.store.add_measurements([failure])
    assert kinds(job, choices) == {"library"}
    job.store.add_measurements([replace(failure, id="g", environment=records[0].environment)])
    assert choices.library_variants()[0].key not in job.build().plans[choices.task.name].plan.variants


@pytest.mark.parametrize(("library", "gain"), [(0.75, "25 %"), (0.999, None), (2.0, None)])
def test_missing_library_is_noted_if_faster(library: float, gain: str | None) -> None:
    job, choices = with_product()
    timed(job, choices, library=library, tuned=1.0, environment=add_environment(job))
    bare = without_libraries(job.store)
    assert kinds(bare, choices) == {"tuned"}
    found = notes(bare, choices, "openblas")
    assert len(found) == (gain is not None)
    assert all(gain in n and "pip install 'relax-tune[openblas]'" in n for n in found if gain)


def test_library_notes_without_library_records_are_empty() -> None:
    job = without_libraries(MemoryStore())
    job.store.add_target(job.target)
    assert not [n for n in job.build().notes if "library" in n]


@pytest.mark.slow
def test_records_name_the_libraries_of_the_job() -> None:
    job = paper_job(feed_forward)
    job.tune(RecordedRunner())
    (environment,) = job.store.environments()
    assert dict(environment.facts) == job.libraries
    assert {r.environment for r in job.store.query(job.target.key)} == {environment.key}
