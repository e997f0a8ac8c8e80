"""The page of conventions: its rows name tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "conventions.md").read_text()
FOLLOWED, OTHERS = PAGE.split("## Not followed")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


@pytest.mark.parametrize("row", rows(FOLLOWED), ids=lambda row: row[0][:40])
def test_convention_names_tests_of_the_suite(row: list[str]) -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row[2])
    assert len(row) == 3 and tests
    for path, name in tests:
        names = {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}
        assert not name or name in names, f"{path} has no test {name}"


def test_convention_without_a_test_has_a_reason() -> None:
    assert len(rows(OTHERS)) > 8 and all(len(row) == 2 and len(row[1]) > 10 for row in rows(OTHERS))
