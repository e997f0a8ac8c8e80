"""SECURITY.md: each promise names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "SECURITY.md").read_text())


@pytest.mark.parametrize("path, name", NAMED)
def test_promise_names_a_test(path: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / path).read_text()


def test_every_promise_has_a_test() -> None:
    section = (ROOT / "SECURITY.md").read_text().partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(NAMED) and all("`tests/" in row for row in rows)
