"""Marks of charts: a name with a meaning has one colour, dash and shape in every chart."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from relax_tune.tuner.report.charts import COLOURS, MEANINGS, bars, lines, marks_of
from relax_tune.tuner.report.subject import MakeSpec


def colours(chart: MakeSpec) -> dict[str, Any]:
    """Return the colour of every series or part of a chart's specification."""
    spec = chart(False)
    encodings = [spec.get("encoding", {}), *(layer["encoding"] for layer in spec.get("layer", ()))]
    scales = [encoding["color"]["scale"] for encoding in encodings if "color" in encoding]
    return {name: colour for s in scales for name, colour in zip(s["domain"], s["range"], strict=True)}


def test_series_of_one_meaning_have_one_colour_in_all_charts() -> None:
    rows = [{"x": 1, "y": 1.0, "series": "best library"}]
    both = lines(rows, x="n", y="t", series=["best tuned", "best library", "best generic"])
    alone = lines(rows, x="n", y="t", series=["best library"])
    other = lines(rows, x="n", y="t", series=["best generic", "best library"])
    for chart in (alone, other):
        assert colours(chart).items() <= colours(both).items()
    assert len(set(colours(both).values())) == 3


def test_failures_have_one_colour_in_stacked_and_plain_bars() -> None:
    rows = [{"name": "w", "value": 1, "part": "failed"}]
    stacked = colours(bars(rows, x="count", name="worker", parts=("with a time", "failed")))
    assert bars(rows, x="count", name="stage", meaning="failed")(False)["mark"]["color"] == stacked["failed"]


@given(st.lists(st.sampled_from(["t1", "t2", "t3", "best tuned", "best library", "failed"]), unique=True))
def test_marks_of_names_are_distinct_and_by_meaning(names: list[str]) -> None:
    marks = marks_of(names)
    assert list(marks) == names and len(set(marks.values())) == len(names)
    assert all(marks[name] == MEANINGS[name] for name in names if name in MEANINGS)
    assert all(0 <= number < len(COLOURS) for number in marks.values())
