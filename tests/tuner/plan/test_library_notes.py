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
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.task.variants import TaskVariants

OTHER = "core Elder; threads 2"


def without_libraries(store: Store) -> DeviceJob:
    """The paper's device where nothing is installed."""
    return device_job(feed_forward(), replace(PAPER_DEVICE, libraries=()), store, QUICK)


def with_product() -> tuple[DeviceJob, TaskVariants]:
    """A job whose store knows its target, and its first task that a library can take."""
    job = paper_job(feed_forward)
    job.store.add_target(job.target)
    task_variants = next(c for c in job.task_variants.values() if c.library.variants)
    return job, task_variants


def timed(
    job: DeviceJob, task_variants: TaskVariants, library: float, tuned: float, environment: str
) -> Sequence[Measurement]:
    """Records of every library form in an environment, and of one kernel, at all anchors."""
    task, here = task_variants.task, add_environment(job)
    kernel = task_variants.sketch_set.record_of(task_variants.sketch_set.seeds(1)[0])
    rows = [(v, library, environment) for v in task_variants.library.variants] + [(kernel, tuned, here)]
    records = [ok_record(task, job.target.key, v, p, s, environment=e) for v, s, e in rows for p in task.domain.points]
    add_records(job.store, task, records)
    return records


def kinds(job: DeviceJob, task_variants: TaskVariants) -> set[str]:
    plan = job.build().plans[task_variants.task.name]
    return {plan.variants[k].kind for k in plan.plan.variants}


def notes(job: DeviceJob, task_variants: TaskVariants, word: str) -> list[str]:
    return [n for n in job.build().notes if n.startswith(f"{task_variants.task.name}:") and word in n]


def test_times_of_present_library_count_without_note() -> None:
    job, task_variants = with_product()
    timed(job, task_variants, library=1e-6, tuned=1.0, environment=add_environment(job))
    assert kinds(job, task_variants) == {"library"} and not notes(job, task_variants, "openblas")


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_times_of_changed_library_do_not_count_until_retimed(known: bool) -> None:
    job, task_variants = with_product()
    environment = add_environment(job, openblas=OTHER) if known else ""
    stale = timed(job, task_variants, library=1e-9, tuned=1.0, environment=environment)
    assert kinds(job, task_variants) == {"tuned"}
    (note,) = notes(job, task_variants, "openblas")
    assert ("core Elder (here core Paper)" if known else "not recorded (here core Paper; threads 2)") in note
    assert "relax-tune tune" in note and not [
        r for r in job.records(task_variants.task.key, task_variants.task.regime) if r.variant.kind == "library"
    ]
    runner = RecordedRunner(lambda program, symbols: 1e-6 if program.calls[0].variants[0].label == "library" else 1.0)
    job.tune(runner)
    again = [r for r in job.records(task_variants.task.key, task_variants.task.regime) if r.variant.kind == "library"]
    assert again and not {r.id for r in again} & {r.id for r in stale}
    assert all(job.device_records.recorded_libraries(r) == job.libraries for r in again)
    assert kinds(job, task_variants) == {"library"} and not notes(job, task_variants, "openblas")
    measured = len(runner.batches)
    job.tune(runner)
    assert len(runner.batches) == measured


def test_a_failure_of_another_state_of_the_library_is_forgiven() -> None:
    job, task_variants = with_product()
    records = timed(job, task_variants, library=1e-6, tuned=1.0, environment=add_environment(job))
    failure = Measurement(
        *(
            "f",
            task_variants.task.key,
            job.target.key,
            task_variants.library.variants[0],
            {},
            "failed",
            "crash",
            "died",
        ),
        environment=add_environment(job, openblas=OTHER),
    )
    job.store.add_measurements([failure])
    assert kinds(job, task_variants) == {"library"}
    job.store.add_measurements([replace(failure, id="g", environment=records[0].environment)])
    assert task_variants.library.variants[0].key not in job.build().plans[task_variants.task.name].plan.variants


@pytest.mark.parametrize(("library", "gain"), [(0.75, "25 %"), (0.999, None), (2.0, None)])
def test_missing_library_is_noted_if_faster(library: float, gain: str | None) -> None:
    job, task_variants = with_product()
    timed(job, task_variants, library=library, tuned=1.0, environment=add_environment(job))
    bare = without_libraries(job.store)
    assert kinds(bare, task_variants) == {"tuned"}
    found = notes(bare, task_variants, "openblas")
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
