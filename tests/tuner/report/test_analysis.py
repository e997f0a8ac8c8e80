"""Importance of parameters, rooflines and two sets of records side by side."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tuner.report.test_report import GENERIC, TUNED, inside, place, report, times  # noqa: F401

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.database.store import open_store
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.tuner.report.analysis import comparison, importance, importances, omega_squared, roofline, work_of
from relax_tune.tuner.report.charts import drawn
from relax_tune.tuner.report.recorded import RecordedTask


def candidates(effect: dict[int, float]) -> list[Measurement]:
    """Candidates over a parameter T with these factors, and one without effect, U."""
    rows = []
    for t, factor in effect.items():
        for u in (1, 2, 4):
            variant = VariantRecord("tuned", "tiles", "[]", json.dumps({"T": t, "U": u}))
            rows += times(f"m{t}.{u}", variant, {8: 1e-5 * factor * (1 + 0.001 * u)})
    return rows


def test_importance_of_a_deciding_parameter_is_high() -> None:
    task = RecordedTask("w", "w", candidates({1: 1.0, 2: 2.0, 4: 8.0}))
    shares = {i.parameter: i for i in importances(task)}
    assert shares["T"].share > 0.99 and shares["T"].best == 1 and shares["T"].candidates == 9
    assert shares["U"].share < 0.01
    figure = importance([task], "x")
    assert figure.summary.startswith("T of tiles explains 100 %") and figure.table is not None
    assert len(figure.table.rows) == 2


def test_omega_squared_of_noise_is_near_zero_and_of_groups_is_one() -> None:
    generator = np.random.default_rng(0)
    groups = generator.integers(0, 5, 400)
    assert omega_squared(groups, generator.standard_normal(400)) < 0.05
    assert omega_squared(groups, groups.astype(float)) == pytest.approx(1)
    # eta squared, which is not corrected, would be .5 and more here
    few = generator.integers(0, 10, 20)
    assert omega_squared(few, generator.standard_normal(20)) < 0.4


def test_importance_without_candidates_is_a_sentence() -> None:
    figure = importance([RecordedTask("w", "w", times("m", TUNED, {8: 1e-5}))], "x")
    assert figure.chart is None and "candidates" in figure.summary


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_report_has_hover_texts_links_to_variants_and_a_roofline(inside: Path) -> None:  # noqa: F811
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    document = json.loads(report("--db", "r.db", "--out", "more.html", "--json"))
    page = (inside / "more.html").read_text()
    titles = re.findall(r"<title>([^<]*)</title>", page)
    assert any(re.search(r"best generic; .*; time of a call \(\w+, log scale\): [\d.e-]+$", t) for t in titles)
    places = set(re.findall(r'id="([^"]+)"', page))
    jumps = re.findall(r'<a href="#(device1-task\d+-\w+)"', page)
    assert jumps and set(jumps) <= places
    variants = next(s for s in document["sections"] if s["title"].startswith("Variants on"))
    rows = [row for table in variants["tables"] for row in table]
    assert any("s." in row["steps"] for row in rows) and all(":" in row["median times"] for row in rows)
    figures = {f["title"]: f for s in document["sections"] for f in s["figures"]}
    for row in figures["Roofline"]["rows"]:
        rate, band = float(row["billion operations a second"]), float(row["billion bytes a second"])
        assert rate == pytest.approx(band * float(row["operations a byte"]), rel=0.02)


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_work_of_a_matmul_counts_operations_and_bytes_once(inside: Path) -> None:  # noqa: F811
    with open_store("sqlite:///r.db", read_only=True) as store:
        text = next(w.text for w in store.workloads(None) if w.hint.startswith("fused_matmul"))
    func = parse_prim_func(text)
    (rows, inner), (_, columns) = (b.shape for b in func.buffers[:2])
    work = work_of(func, [10])
    assert work is not None
    products = 2 * 10 * int(str(inner)) * int(str(columns))
    assert products < work.operations < 1.2 * products, "the products, and few operations on their sums"
    assert work.nbytes == sum(
        math.prod([10 if str(d) == str(rows) else int(str(d)) for d in b.shape]) * 4 for b in func.buffers
    )


def test_comparison_of_runs_reads_records_of_each() -> None:
    slow, fast = times("a", GENERIC, {8: 4e-5}, job="one"), times("b", TUNED, {8: 1e-5}, job="two")
    one, two = (RecordedTask("w", "w", [*slow, *fast], runs=frozenset({run})) for run in ("one", "two"))
    figure = comparison([two], [one], "one", "x")
    assert figure.table is not None and figure.table.rows == (("w", "10.0 us", "40.0 us", "4.00x", "1"),)
    assert figure.summary.startswith("These records are 4.00x as fast as one over 1 tasks")
    assert comparison([two], [], "one", "x").chart is None


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_report_compares_databases_and_leaves_tasks_out(inside: Path) -> None:  # noqa: F811
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    document = json.loads(
        report("--db", "r.db", "--compare", "plain.db", "--task", "matmul", "--out", "compared.html", "--json")
    )
    figures = {f["title"]: f for s in document["sections"] for f in s["figures"]}
    rows = figures["Compared with plain.db"]["rows"]
    assert rows and all(row["as fast"] == "1.00x" and "matmul" in row["task"] for row in rows)
    assert all("matmul" in title for title in figures if title.startswith("Time over shape"))
    assert "--compare expects a database or the start of the id" in report("--db", "r.db", "--compare", "zz", code=2)


def test_titles_of_points_are_text_and_narrow_pictures_have_none() -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    task = RecordedTask("w", "<b>", candidates({1: 1.0, 2: 2.0, 4: 8.0}))
    wide, narrow = drawn(importance([task], "x"))
    assert (
        "&lt;b&gt;" in wide
        and "<title>&lt;b&gt;: tiles T; explained variance of log times (%): 100</title>" in wide
        and "<title>" not in narrow
    )
    assert roofline([task], "x").chart is None


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_calls_of_an_artifact_read_results_of_earlier_calls(inside: Path) -> None:  # noqa: F811
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    document = json.loads(report("small.rta", "--db", "plain.db", "--out", "calls.html", "--json"))
    (figure,) = next(s for s in document["sections"] if s["title"] == "Calls")["figures"]
    rows = figure["rows"]
    assert [row["call"] for row in rows] == [str(n) for n in range(len(rows))] and len(rows) >= 2
    assert rows[0]["reads"] == "inputs" and rows[1]["reads"] == "0"
    times = figures_of(document)["Where the model's time goes"]["rows"]
    assert {row["task"]: row["time"] for row in rows} == {row["task"]: row["time of a call"] for row in times}
    page = (inside / "calls.html").read_text()
    assert all(re.search(rf"<title>{n}: {row['task']}; time of a call", page) for n, row in enumerate(rows))


def figures_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f["title"]: f for section in document["sections"] for f in section["figures"]}
