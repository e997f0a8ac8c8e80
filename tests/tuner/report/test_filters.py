"""Filters of reports as the page's text has them; `tests/tuner/dashboard/test_browser.py` uses them in a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections import Counter

import pytest
from tests.tuner.report.tuned_database import HOSTILE, check_accessible, two_devices

from relax_tune.tuner.report.collect import of_database
from relax_tune.tuner.report.page import choices_of, report_page
from relax_tune.tuner.report.recorded import operators_of
from relax_tune.tuner.report.sections import Limits
from relax_tune.tuner.report.subject import Facets, Section, Subject, table


def page_of_two_devices() -> str:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    with two_devices() as store:
        return report_page(of_database(store, Limits()), "written by a test")


def test_choices_are_the_facets_of_the_tasks() -> None:
    with two_devices() as store:
        choices = choices_of(of_database(store, Limits()))
    assert choices is not None and choices.tasks == 2
    assert choices.operators == ("add", "matmul", "softmax") and choices.groups == ("tuned", "library", "generic")
    assert [name.partition(" (")[0] for name in choices.devices] == ["c: paper", "c: stone"]
    assert choices.sizes == (("s0", 1, 64),)


def test_script_of_a_report_is_admitted_by_the_policy() -> None:
    page = page_of_two_devices()
    found = check_accessible(page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'; style-src" in html.unescape(page)
    assert found.tags.count("form") == 1 and "form-action 'none'" in html.unescape(page)


def test_marks_and_rows_of_a_picture_have_the_same_facets() -> None:
    page = page_of_two_devices()
    figure = re.search(r'<figure id="device1-task1".*?</figure>', page, re.S)
    assert figure is not None
    wide, narrow = re.findall(r"<svg.*?</svg>", figure[0], re.S)
    for svg in (wide, narrow):
        marks = re.findall(
            r'data-task="fused_matmul_add" data-operators="matmul add" data-groups="(\w+)" data-sizes="s0=(\d+)"', svg
        )
        assert Counter(marks) == {(g, n): 1 for g in ("tuned", "library", "generic") for n in ("1", "8", "64")}
    rows = re.findall(r'<tr data-task="fused_matmul_add" data-operators="matmul add" data-sizes="s0=(\d+)">', figure[0])
    assert rows == ["1", "8", "64"]
    assert re.findall(r'<th scope="col" class="number" data-groups="(\w+)">', figure[0]) == [
        "tuned",
        "library",
        "generic",
    ]
    time = re.search(r'<figure id="device1-time".*?</figure>', page, re.S)
    assert time is not None
    for name in ("fused_matmul_add", "softmax"):
        # two pictures with a bar and a label each, and a row
        assert len(re.findall(f'data-task="{name}"', time[0])) == 5


def test_page_without_a_choice_has_no_script() -> None:
    one = Subject("one", (Section("s", tables=(table(("a",), [["x"]], facets=[Facets("t", ("matmul",))]),)),))
    assert choices_of(one) is None
    page = report_page(one, "written by a test")
    assert "<script" not in page and "<form" not in page and "script-src" not in page


def test_facets_of_hostile_texts_are_escaped() -> None:
    rows = [["x"], ["y"]]
    facets = [Facets(HOSTILE + '"', groups=("tuned",)), Facets("b", groups=("library",))]
    page = report_page(Subject("two", (Section("s", tables=(table(("a",), rows, facets=facets),)),)), "by a test")
    assert HOSTILE not in page and "\x1b" not in page and "\u202e" not in page
    check_accessible(page)


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("fused_matmul_add_1", ("matmul", "add")), ("rms_norm_2", ("rms_norm",)), ("matmul (flushed caches)", ("matmul",)),
        ("fused_add_add", ("add",)), ("main", ("other",)), ("", ("other",)),
    ],
)  # fmt: skip
def test_operators_are_read_from_the_name_of_a_task(name: str, operators: tuple[str, ...]) -> None:
    assert operators_of(name) == operators
