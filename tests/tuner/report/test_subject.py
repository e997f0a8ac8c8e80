"""Subjects as JSON, and one subject in all three renderers."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from tests.tuner.report.tuned_database import check_accessible

from relax_tune.tuner.cli.report.console import print_sections
from relax_tune.tuner.report.page import dashboard_page, report_page
from relax_tune.tuner.report.subject import Figure, PageLink, Section, Subject, TrialCount, listing, table

ROWS = table(
    ("job", "progress", "state"), [[PageLink("aa11", ("jobs", "a/b")), TrialCount(3, 8), "failed"]], (), "Jobs"
)
SUBJECT = Subject(
    "Everything",
    (
        Section("one", "First", (("user", "ann"),), ("a note",), (Figure("f", "Picture", "A summary.", None, ROWS),)),
        Section("two", "", tables=(ROWS,), texts=("program\n  text",)),
    ),
)
CONTENT = ("ann", "a note", "Picture", "A summary.", "aa11", "failed", "program\n  text")


def test_subject_without_document_gives_sections_in_json() -> None:
    row = {"job": "aa11", "progress": "3/8", "state": "failed"}
    document = json.loads(json.dumps(SUBJECT.to_json()))
    assert document["title"] == "Everything"
    first, second = document["sections"]
    assert first["facts"] == {"user": "ann"} and first["notes"] == ["a note"]
    assert first["figures"] == [{"id": "f", "title": "Picture", "summary": "A summary.", "rows": [row]}]
    assert second["tables"] == [[row]] and second["texts"] == ["program\n  text"]


def test_listing_has_a_document_and_a_sentence_when_empty() -> None:
    assert listing("Jobs", ROWS, "No jobs.", [1]).to_json() == [1]
    (section,) = listing("Jobs", table(("job",), []), "No jobs.", []).sections
    assert section.notes == ("No jobs.",) and section.tables == ()


def test_terminal_prints_every_part_of_a_subject() -> None:
    console = Console(width=120, record=True)
    print_sections(console, *SUBJECT.sections)
    text = console.export_text()
    assert all(part in text for part in (*CONTENT, "First", "3/8", "Jobs"))


def test_pages_show_every_part_and_link_only_in_the_dashboard() -> None:
    pytest.importorskip("jinja2", reason="Jinja2 is not installed (extra report)")
    file, page = report_page(SUBJECT, "Written today."), dashboard_page(SUBJECT, "now")
    for text in (file, page):
        check_accessible(text)
        assert all(part in text for part in (*CONTENT, "First", "3 of 8", 'value="3" max="8"', 'class="bad"'))
    assert 'href="/jobs/a%2Fb"' in page and "/jobs/" not in file
