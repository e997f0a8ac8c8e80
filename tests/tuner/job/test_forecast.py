"""An effort that ends by itself, and what a job reports of its progress, with times from a function."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.support.tuner_models import QUICK, RecordedRunner, feed_forward, paper_job, row_scale

from relax_tune.runtime.program.program import Program
from relax_tune.tuner.job.progress import TuningProgress
from relax_tune.tuner.settings import Settings

AUTO = replace(QUICK, trials=None, effort="auto")


def drawn(program: Program, spread: float) -> float:
    """A time that the text of a program decides, up to `spread` above the fastest."""
    text = "".join(k.source for k in program.kernels)
    digest = hashlib.blake2b(text.encode(), digest_size=4, salt=b"drawn").digest()
    return 1e-3 * (1 + spread * int.from_bytes(digest, "little") / 2**32)


def test_auto_is_the_default_and_a_stated_number_of_trials_is_tried() -> None:
    assert Settings().ends_early and Settings().effort == "auto"
    assert not Settings(trials=20).ends_early and not Settings(effort="normal").ends_early


@pytest.mark.slow
def test_auto_ends_soon_where_candidates_hardly_differ() -> None:
    def answer(program: Program, symbols: Mapping[str, int]) -> float | str:
        return drawn(program, 1e-6)

    job = paper_job(row_scale, settings=AUTO)
    result = job.tune(RecordedRunner(answer))
    assert 8 <= result.trials <= 24 < AUTO.candidates
    assert result.expected_gain is not None and result.expected_gain < 0.01
    again = RecordedRunner(answer)
    assert paper_job(row_scale, job.store, AUTO).tune(again).measurements == 0 and not again.batches


@pytest.mark.slow
def test_auto_ends_where_each_doubling_of_the_candidates_saves_the_same() -> None:
    def answer(program: Program, symbols: Mapping[str, int]) -> float | str:
        return 1e-3 * (drawn(program, 1.0) * 1e3 - 1 + 1e-9) ** 0.1

    assert paper_job(row_scale, settings=AUTO).tune(RecordedRunner(answer)).trials < AUTO.candidates


@pytest.mark.slow
def test_auto_tries_more_where_candidates_differ() -> None:
    def trials(spread: float) -> int:
        first: list[str] = []

        def answer(program: Program, symbols: Mapping[str, int]) -> float | str:
            first.append(program.kernels[0].source)
            generic = program.kernels[0].source == first[0]
            return 1.0 if generic else drawn(program, spread)

        return paper_job(row_scale, settings=AUTO).tune(RecordedRunner(answer)).trials

    flat, steep = trials(1e-6), trials(3.0)
    assert steep > flat


@pytest.mark.slow
def test_task_without_a_share_of_the_time_is_not_searched() -> None:
    job = paper_job(feed_forward, settings=AUTO)
    heavy = max(job.tasks, key=lambda t: len(t.text)).name

    def answer(program: Program, symbols: Mapping[str, int]) -> float | str:
        return drawn(program, 0.5) * (1e4 if program.name == heavy else 1)

    job.tune(RecordedRunner(answer))
    tried = {t.name: len(job.store.query(job.target.key, t.key, kinds=("tuned",))) for t in job.tasks}
    assert len(tried) > 1 and tried[heavy] > 0
    assert all(count == 0 for name, count in tried.items() if name != heavy)
    assert job.build().plans.keys() == tried.keys(), "what is measured without a search is dispatched"


@pytest.mark.slow
def test_progress_names_tasks_done_speed_and_time_left() -> None:
    reports: list[TuningProgress] = []
    job = paper_job(feed_forward, settings=replace(QUICK, trials=16))
    job.tune(RecordedRunner(lambda program, _: drawn(program, 1.0)), reports.append)
    tasks = len(job.tasks)
    known = [r for r in reports if r.model_secs is not None]
    assert reports[0].model_secs is None or tasks == 1, "a task without a time has an unknown share"
    assert len({r.first_secs for r in known}) == 1
    assert [r.model_secs for r in known] == sorted((r.model_secs or 0.0 for r in known), reverse=True)
    assert all(r.share is not None and 0 < r.share <= 1 for r in known)
    last = reports[-1]
    assert last.done == last.tasks == tasks and last.left == 0 and last.left_secs == pytest.approx(0.0)
    assert max(r.left for r in reports) > 0
