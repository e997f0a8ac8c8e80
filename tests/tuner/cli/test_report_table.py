"""The tables of a report, from records made up for the real tasks of a tiny model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.support.effort import examples
from tests.tuner.cli.cli_model import LAYERS, make_bert

from relax_tune.database.memory_store import MemoryStore
from relax_tune.database.records import Measurement, Target, VariantRecord, Workload
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.cli.report.console import rich_table
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.plan.select import GuardTest, PlanEntry
from relax_tune.tuner.plan.task_rows import TaskRow, dispatch_ranges, symbol_labels, task_rows, variant_text
from relax_tune.tuner.report.builds import dispatch_table, task_table
from relax_tune.tuner.report.texts import ratio_text, seconds_text
from relax_tune.tuner.settings import Settings

LIMITS = (("max_vector_lanes", 8), ("registers", 16), ("vector_bits", 256), ("workers", 2))
DEVICE = DeviceInfo("c", "made up", (("kind", "c"),), LIMITS)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> DeviceJob:
    """A job on a device nobody has, with made-up records: generic 4 ms everywhere; one tuned candidate of 1 ms up to the
    middle anchor and 9 ms above; one failed candidate."""
    folder = make_bert(tmp_path_factory.mktemp("bert"))
    store = MemoryStore()
    made = device_job(load_model(folder, {"b": (1, 4), "n": (1, 32)}), DEVICE, store, Settings(target="c"))
    target = store.add_target(made.target)
    for task_variants in made.task_variants.values():
        task = task_variants.task
        store.add_workload(Workload(task.key, task.text, 1, task.name))
        candidates = [task_variants.sketch_set.record_of(c) for c in task_variants.sketch_set.seeds(2)]
        records = []
        for number, binding in enumerate(task.bindings()):
            small = number < len(task.bindings()) // 2
            records.append(_timed(task.key, target, task_variants.sketch_set.generic(), binding, 4e-3))
            if candidates:
                records.append(_timed(task.key, target, candidates[0], binding, 1e-3 if small else 9e-3))
        for failed in candidates[1:]:
            mark = f"{task.key}-{failed.key}"
            records.append(
                Measurement(mark, task.key, target, failed, status="failed", stage="compile", message="refused")
            )
        store.add_measurements(records)
    return made


def _timed(task: str, target: str, variant: VariantRecord, binding: dict[str, int], secs: float) -> Measurement:
    where = ",".join(f"{k}{v}" for k, v in binding.items())
    return Measurement(
        f"{task}-{variant.key}-{where}", task, target, variant, binding, samples_secs=(secs,), checked=True
    )


@pytest.fixture(scope="module")
def rows(job: DeviceJob) -> tuple[TaskRow, ...]:
    records = {name: job.store.query(job.target.key, c.task.key) for name, c in job.task_variants.items()}
    return task_rows(job.task_variants, job.build().plans, records)


@pytest.mark.slow
def test_every_task_has_a_row_and_shares_add_up(job: DeviceJob, rows: tuple[TaskRow, ...]) -> None:
    assert {r.name for r in rows} == set(job.task_variants)
    assert sum(r.calls for r in rows) == sum(len(t.sites) for t in job.tasks) > 10 * LAYERS
    assert math.isclose(sum(r.share or 0 for r in rows), 1.0)
    assert [r.secs for r in rows] == sorted((r.secs for r in rows), key=lambda s: -(s or 0))


@pytest.mark.slow
def test_task_row_costs_follow_the_plan(job: DeviceJob, rows: tuple[TaskRow, ...]) -> None:
    plans = job.build().plans
    for row in rows:
        domain = job.task_variants[row.name].task.domain
        chosen = [plans[row.name].variants[plans[row.name].plan.choose(p)].kind for p in domain.points]
        small = len(domain.points) // 2
        costs = [(1e-3 if a < small else 9e-3) if kind == "tuned" else 4e-3 for a, kind in enumerate(chosen)]
        assert row.secs == pytest.approx(row.calls * sum(w * c for w, c in zip(domain.weights, costs, strict=True)))


def test_shapes_are_the_smallest_a_middle_and_the_largest(job: DeviceJob, rows: tuple[TaskRow, ...]) -> None:
    for row in rows:
        sizes = [math.prod(s.shape.values()) for s in row.shapes]
        everything = [math.prod(p) for p in job.task_variants[row.name].task.domain.points]
        assert (sizes[0], sizes[-1]) == (min(everything), max(everything)) and sizes == sorted(sizes)
        assert all(s.generic == 4e-3 and s.library is None for s in row.shapes)
        assert row.shapes[-1].dispatched == "generic"


@pytest.mark.slow
def test_trials_count_failures_too(job: DeviceJob, rows: tuple[TaskRow, ...]) -> None:
    for row in rows:
        wanted = len(list(job.task_variants[row.name].sketch_set.seeds(2)))
        assert (row.trials, row.failed) == (wanted, max(0, wanted - 1))
    assert any(r.failed for r in rows)


def test_dispatch_table_shows_range_of_each_variant(rows: tuple[TaskRow, ...]) -> None:
    split = [r for r in rows if len(r.dispatch) > 1]
    assert split
    for row in split:
        assert row.dispatch[-1] == ("else", "generic")
        assert " <= " in row.dispatch[0][0] and row.dispatch[0][1].startswith("tuned ")


def test_tables_print_every_task(rows: tuple[TaskRow, ...]) -> None:
    for table in (task_table(rows), dispatch_table(rows)):
        console = Console(width=200)
        with console.capture() as captured:
            console.print(rich_table(table))
        text = captured.get()
        assert all(row.name in text for row in rows)


def test_symbol_labels_are_model_expressions(job: DeviceJob) -> None:
    labels = {label for task_variants in job.task_variants.values() for label in symbol_labels(task_variants.task)}
    assert "b*n" in labels and "n" in labels


@pytest.mark.slow
def test_without_records_nothing_is_claimed(job: DeviceJob) -> None:
    empty = device_job(
        job.module, DeviceInfo("c", "another", (("kind", "d"),), LIMITS), MemoryStore(), Settings(target="c")
    )
    found = task_rows(empty.task_variants, empty.build().plans, {name: [] for name in empty.task_variants})
    assert all(r.secs is None and r.share is None and r.trials == 0 for r in found)
    assert all(r.dispatch[0][0] == "always" and r.dispatch[0][1].startswith("predicted, tuned ") for r in found)


LABELS = ("b*n", "m+1")
TESTS = st.tuples(
    st.builds(
        GuardTest,
        st.sampled_from([(0,), (1,), (0, 1)]),
        st.integers(1, 99),
        st.sampled_from([1, 8]),
        st.sampled_from([0, 3]),
    ),
    st.booleans(),
)
POINTS = st.tuples(st.integers(0, 120), st.integers(0, 120))


@settings(max_examples=examples(80), deadline=None)
@given(tests=st.lists(TESTS, min_size=1, max_size=5), point=POINTS)
def test_dispatch_ranges_agree_with_guards(tests: list[tuple[GuardTest, bool]], point: tuple[int, int]) -> None:
    entries = (PlanEntry(tuple(tests), "x"), PlanEntry((), "y"))
    (where, name), last = dispatch_ranges(entries, LABELS, {"x": "tuned x", "y": "generic"})
    assert (name, last) == ("tuned x", ("else", "generic"))
    # b*n stands for the first symbol, m+1 for the second
    text = where.replace("b*n*(m+1)", "(P*Q)").replace("b*n", "P").replace("m+1", "Q")
    assert eval(text, {"P": point[0], "Q": point[1]}) == all(t.holds(point) == wanted for t, wanted in tests)


def test_variants_in_words() -> None:
    assert (
        variant_text(VariantRecord("tuned", "matmul.data_parallel", "[]", '{"MR":4,"NR":16}'))
        == "tuned matmul.data_parallel (MR=4,NR=16)"
    )
    assert (
        variant_text(VariantRecord("library", "openblas.sgemm+rows", "[]", '{"V":8}')) == "library openblas.sgemm+rows"
    )
    assert variant_text(VariantRecord("generic", "fallback")) == "generic"


@pytest.mark.parametrize(
    ("secs", "text"),
    [
        (1.5, "1.50 s"),
        (0.0123, "12.3 ms"),
        (1.5e-4, "150 us"),
        (2.34e-6, "2.34 us"),
        (4e-8, "0.04 us"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_seconds_in_words(secs: float | None, text: str) -> None:
    assert seconds_text(secs) == text


def test_ratios_in_words() -> None:
    assert ratio_text(3.0, 2.0) == "1.50x"
    assert ratio_text(None, 2.0) == ratio_text(1.0, math.nan) == ratio_text(1.0, 0.0) == "-"


def test_targets_of_other_devices_are_not_mixed_in(job: DeviceJob) -> None:
    other = Target("c", "another", (("kind", "c"),))
    assert job.store.target(other.key) is None
    job.store.add_target(other)
    assert not any(job.store.query(other.key, c.task.key) for c in job.task_variants.values())
