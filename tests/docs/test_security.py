"""SECURITY.md and the page of the findings: each promise and finding names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = r"`(tests/[\w/]+\.py)::(test_\w+)`"
NAMED = re.findall(NAME, (ROOT / "SECURITY.md").read_text())
PAGE = (ROOT / "docs" / "design" / "security.md").read_text()


@pytest.mark.parametrize("path, name", NAMED + re.findall(NAME, PAGE))
def test_promise_names_a_test(path: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / path).read_text()


def test_every_promise_has_a_test() -> None:
    section = (ROOT / "SECURITY.md").read_text().partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(NAMED) and all("`tests/" in row for row in rows)


def test_every_finding_has_a_test() -> None:
    found = re.findall(rf"^\| ([HML]\d+) .* \| {NAME} \|$", PAGE, re.M)
    assert [one for one, _, _ in found] == [
        f"{kind}{n}" for kind, most in (("H", 5), ("M", 9), ("L", 10)) for n in range(1, most + 1)
    ]


def test_reach_of_hostile_holders_names_tests() -> None:
    section = PAGE.partition("## What a hostile job reaches")[2].partition("## Findings")[0]
    rows = [line.rpartition(" | `")[2] for line in section.splitlines() if line.startswith("| ") and "`test_" in line]
    assert len(rows) == 17
    for row in rows:
        name, _, path = row.strip(" |`").partition("` of `")
        assert f"def {name}(" in (ROOT / (path or "tests/tuner/measure/cluster/test_hostile.py")).read_text()
