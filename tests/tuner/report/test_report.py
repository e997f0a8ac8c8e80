"""`relax-tune report` over a database of a real job: contents, safety of texts, empty data, wrong arguments."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.tuner_models import feed_forward
from tests.tuner.report import tuned_database
from tests.tuner.report.tuned_database import ESCAPED, HOSTILE, JOB, add_hostile, check_accessible, tune_small
from typer.testing import CliRunner

from relax_tune.database.records import Measurement, PlanRecord, Target, VariantRecord, Workload
from relax_tune.database.store import MemoryStore, open_store
from relax_tune.errors import UserError
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.plan.select import DispatchPlan, GuardTest, PlanEntry
from relax_tune.tuner.report.charts import bars, cleaned, drawn, lines
from relax_tune.tuner.report.collect import of_device
from relax_tune.tuner.report.devices import lent_units
from relax_tune.tuner.report.pictures import convergence, failures, model_time, regret, time_over_shape
from relax_tune.tuner.report.recorded import RecordedTask, all_tasks
from relax_tune.tuner.report.subject import Figure

RUNNER = CliRunner()
TUNED, OTHER = (VariantRecord("tuned", "tiles", "[]", f'{{"T": {n}}}') for n in (8, 16))
GENERIC = VariantRecord("generic", "fallback")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `r.db` and the artifact `small.rta` of a real job, and hostile records beside its own."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAX_TUNE_SELF_TEST", "false")
        tune_small(folder, feed_forward(upper=16))
    shutil.copy(folder / "r.db", folder / "plain.db")
    add_hostile(folder)
    return folder


@pytest.fixture
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TARGET", "DB", "SCHEDULER"):
        monkeypatch.delenv(f"RELAX_TUNE_{name}", raising=False)
    monkeypatch.chdir(place)
    return place


def report(*arguments: str, code: int = 0) -> str:
    done = RUNNER.invoke(app, ["report", *arguments])
    assert done.exit_code == code, f"{done.output}{done.exception!r}"
    return done.stdout if code == 0 else done.stderr


def figures(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f["title"]: f for section in document["sections"] for f in section["figures"]}


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_report_of_database_shows_every_picture_and_loads_nothing(inside: Path) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    document = json.loads(report("--db", "r.db", "--out", "all.html", "--json"))
    page = (inside / "all.html").read_text()
    found = check_accessible(page)
    assert found.loaded == ["data:,"] and found.tags.count("script") == 1 and "iframe" not in found.tags
    assert "default-src 'none'; script-src 'sha256-" in html.unescape(page) and len(page) < 2_000_000
    assert HOSTILE not in page and "\x1b" not in page and "\u202e" not in page
    assert ESCAPED in page
    shown = figures(document)
    with open_store(f"sqlite:///{inside / 'r.db'}", read_only=True) as store:
        (target,) = store.targets()
        total, failed = store.count(target.key), store.count(target.key, status="failed")
        names = [w.hint for w in store.workloads(target.key)]
    assert f"{failed} of {total} measurements failed" in shown["Failures by cause"]["summary"]
    assert {row["stage"] for row in shown["Failures by cause"]["rows"]} >= {"compile", "timeout"}
    assert all(f"Time over shape: {name}" in shown for name in names)
    drawn_figures = [f for f in shown.values() if f["rows"]]
    assert found.images == 2 * len(drawn_figures), "each picture with values is there for wide pages and for phones"
    for figure in shown.values():
        assert figure["summary"].endswith("."), figure
    svgs = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(svgs) == found.images and all("<text" in svg and "var(--" in svg for svg in svgs)


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_report_of_artifact_and_of_job_counts_calls_and_progress(inside: Path) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    shown = figures(json.loads(report("small.rta", "--db", "plain.db", "--out", "a.html", "--json")))
    rows = shown["Where the model's time goes"]["rows"]
    assert sum(float(row["share"].rstrip(" %")) for row in rows) == pytest.approx(100, abs=0.5)
    assert all(int(row["calls"]) >= 1 for row in rows)
    own = [t for t in shown if t.startswith("Time over shape")]
    assert len(own) == len(rows) and all("dispatched" in row for t in own for row in shown[t]["rows"])
    assert all(row["dispatched"] != "-" for t in own for row in shown[t]["rows"])
    with open_store("sqlite:///r.db", read_only=True) as store:
        (run,) = store.jobs()
    shown = figures(json.loads(report(run.id[:12], "--db", "r.db", "--out", "run.html", "--json")))
    steps = shown["Convergence by trials"]["rows"]
    assert {row["task"] for row in steps} >= {"all tasks"} and all(
        float(row["first time over last"]) >= 1 for row in steps
    )
    document = json.loads(report(JOB[:6], "--db", "r.db", "--out", "job.html", "--json"))
    assert document["sections"][0]["facts"]["progress"] == "3/8"
    assert "has not measured yet" in document["sections"][0]["notes"][0]
    check_accessible((inside / "job.html").read_text())


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_report_of_wrong_subject_is_refused(inside: Path) -> None:
    assert "sqlite:///r.db has none" in report("nothing", "--db", "r.db", code=2)
    assert "--bound expects a MODEL" in report("--bound", "n=1:4", "--db", "r.db", code=2)
    assert "--tasks expects" in report("--tasks", "-1", "--db", "r.db", code=2)
    assert "no file exists" in report("none.db", code=2)
    assert "got 'encodr'; there is no such file" in report("encodr", "--db", "none.db", code=2)
    with open_store("sqlite:///empty.db"):
        pass
    assert "give the database it was tuned with" in report("small.rta", "--db", "empty.db", code=2)
    assert "expected to write it" in report("--db", "empty.db", "--out", "r.db/x.html", code=2)
    report("--db", "empty.db", "--out", "empty.html")
    assert "Nothing is on record in this database" in (inside / "empty.html").read_text()


def times(
    name: str, variant: VariantRecord, secs: dict[int, float], at: float = 0.0, job: str = ""
) -> list[Measurement]:
    return [
        Measurement(
            f"{name}{n}", "w", "t", variant, {"s0": n}, samples_secs=(s,), checked=True, measured_at=at, job=job
        )
        for n, s in secs.items()
    ]


def plan(*entries: PlanEntry) -> tuple[DispatchPlan, dict[str, VariantRecord]]:
    return DispatchPlan(entries, 0.0), {v.key: v for v in (TUNED, OTHER, GENERIC)}


def task_of(records: list[Measurement], **more: Any) -> RecordedTask:
    return RecordedTask("w", "task", records, **more)


def test_regret_compares_dispatched_variant_with_best() -> None:
    small = PlanEntry(((GuardTest((0,), 4), True),), GENERIC.key)
    chosen = plan(small, PlanEntry((), TUNED.key))
    records = (
        times("g", GENERIC, {1: 2e-6, 8: 9e-6}) + times("t", TUNED, {1: 1e-6, 8: 4e-6}) + times("o", OTHER, {8: 3e-6})
    )
    found = task_of(records, plan=chosen)
    at_one, at_eight = (("s0", 1),), (("s0", 8),)
    assert found.regret(at_one) == pytest.approx(1.0) and found.regret(at_eight) == pytest.approx(1 / 3)
    assert found.mean_regret == pytest.approx(6 / 4 - 1), "seconds over the anchors, not a mean of ratios"
    assert found.anchors == {at_one: 0.5, at_eight: 0.5}
    (row,) = regret([found], "r").table.rows  # type: ignore[union-attr]
    assert row == ("task", "50.0 %", "100.0 %", "s0=1", "0")
    beyond = task_of(
        records, plan=plan(PlanEntry(((GuardTest((1,), 4), True),), GENERIC.key), PlanEntry((), TUNED.key))
    )
    assert beyond.regret(at_one) is None, "a plan over symbols that the records lack dispatches nothing known"


def test_convergence_counts_candidates_and_seconds_without_pauses() -> None:
    both = {1: 8e-6, 8: 8e-6}
    records = times("g", GENERIC, both, 100.0, "a") + times("t", TUNED, {1: 4e-6, 8: 4e-6}, 103.0, "a")
    records += times("o", OTHER, {1: 2e-6, 8: 4e-6}, 9000.0, "b")
    steps = task_of(records).convergence
    assert [(s.trials, s.secs) for s in steps] == [(0, 0.0), (1, 3.0), (2, 3.0)]
    assert [s.lag for s in steps] == pytest.approx([8 / 3, 4 / 3, 1.0])
    assert [s.trials for s in task_of(records, runs=frozenset("a")).convergence] == [0, 1]
    assert [s.lag for s in all_tasks([task_of(records)])][-1] == 1.0
    unknown = convergence([task_of(times("t", TUNED, both))], "c", "trials")
    assert unknown.chart is None and "do not say when" in unknown.summary


def test_failed_variant_is_no_contender_but_counted() -> None:
    broken = Measurement("f", "w", "t", OTHER, status="failed", stage="wrong-result", message="off by one\nmore")
    found = task_of(times("t", TUNED, {1: 1e-6}) + times("o", OTHER, {1: 1e-7}) + [broken])
    assert list(found.medians) == [TUNED.key]
    (row,) = failures([found], "f").table.rows  # type: ignore[union-attr]
    assert row == ("wrong-result", "1", "1", "off by one", "task (1)")


def test_figures_without_data_are_sentences() -> None:
    empty = task_of([])
    made = [
        time_over_shape(empty, "a"),
        *(convergence([empty], "b", by) for by in ("trials", "seconds")),
        model_time([empty], "c"),
        regret([empty], "d"),
        failures([empty], "e"),
        lent_units([], "f"),
    ]
    for figure in made:
        assert figure.chart is None and figure.table is None and figure.summary.endswith("."), figure


def test_units_lent_show_reference_times_and_quarantine() -> None:
    units = [
        LentDevice("tcp://1", "c", "w1", "h", "u1", "id", "paper", {"add": 1e-3}, 1.5, "", 1.0),
        LentDevice("tcp://2", "c", "w2", "h", "u2", "id", "paper", {"add": 3e-3}, 1.5, "3.0 times slower", 2.0),
    ]
    figure = lent_units(units, "u")
    assert "quarantined: w2" in figure.summary and figure.table is not None
    assert [row[-2] for row in figure.table.rows] == ["lent", "quarantined: 3.0 times slower"]
    assert figure.table.rows[1][5] == "3.00 ms"


def test_report_reads_malformed_plans_as_notes() -> None:
    with MemoryStore() as store:
        key = store.add_target(Target("c", "paper"))
        store.add_workload(Workload("w", "text", 1, "task"))
        records = [Measurement(f"{n}", "w", key, TUNED, {"s0": n}, samples_secs=(1e-6,), checked=True) for n in (1, 2)]
        store.add_measurements(records)
        store.add_plans([PlanRecord("w", key, 1, '{"entries": []}')])
        (target,) = store.targets()
        view = of_device(store, target)
    assert view.tasks[0].plan is None and "left out a plan" in view.notes[0]


def test_flushed_and_warm_times_are_separate_tasks() -> None:
    with MemoryStore() as store:
        key = store.add_target(Target("c", "paper"))
        store.add_workload(Workload("w", "text", 1, "task"))
        for regime, secs in (("warm", 1e-6), ("flushed", 5e-6)):
            store.add_measurements(
                [Measurement(regime, "w", key, TUNED, {"s0": 1}, samples_secs=(secs,), checked=True, regime=regime)]  # type: ignore[arg-type]
            )
        (target,) = store.targets()
        view = of_device(store, target)
    assert [(t.name, t.best((("s0", 1),))) for t in view.tasks] == [("task (flushed caches)", 5e-6), ("task", 1e-6)]


def test_pictures_hold_names_as_text_and_refuse_other_elements() -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    name = tuned_database.HOSTILE
    rows = [{"x": n, "y": 1.0 / n, "series": name} for n in (1, 2, 4)] + [{"x": 1, "y": 2.0, "series": "b"}]
    made = [
        lines(rows, x=name, y="time (s)", series=[name, "b"], log_x=True, log_y=True, thick=name),
        bars([{"name": name, "value": 1.0}], x="count", name="task"),
    ]
    for spec in made:
        for svg in drawn(Figure("f", "t", "s.", spec)):
            assert "<script" not in svg and "\x1b" not in svg and "&lt;script&gt;" in svg
            assert "var(--ink)" in svg and "style=" not in svg and "href" not in svg
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"'
    with pytest.raises(UserError, match="expected a picture of lines"):
        cleaned(f"{head}><script>1</script></svg>")
    assert cleaned(f'{head} onload="x()"><g style="x"/></svg>') == '<svg viewBox="0 0 1 1" />'
