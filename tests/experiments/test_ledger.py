"""The account of lines: every line has one kind, and every module of the product one subject."""

from __future__ import annotations

from experiments.code import ledger
from experiments.harness.pages import ROOT

TEXT = '''"""A module.

With a second paragraph.
"""

# a comment
import os  # why


def f() -> str:
    """Do."""

    return os.sep
'''


def test_composition_counts_each_line_once() -> None:
    counts = ledger.composition({"a.py": TEXT})
    assert counts.pop("all lines with a comment") == 2
    assert counts == {
        "docstrings": 5,
        "blank lines outside of docstrings": 4,
        "comments on lines without code": 1,
        "imports": 1,
        "code": 2,
    }
    assert counts.total() == ledger.lines_of({"a.py": TEXT})


def test_subjects_divide_the_product() -> None:
    paths = [p.relative_to(ROOT) for folder in ("ir", "tuner", "database") for p in (ROOT / folder).rglob("*.py")]
    texts = {str(path): "" for path in paths}
    parts = ledger.by_subject(texts)
    assert sum(map(len, parts.values())) == len(texts) > 500
    assert "database/store.py" in parts["stores"]


def test_items_leave_out_modules_added_since() -> None:
    texts = {"ir/op/base.py": "a\n", "ir/op/reduction/trees.py": "b\n", "ir/arith/prove.py": "c\n"}
    item = next(i for i in ledger.LEDGER if i.paths == ("ir/op/*",))
    assert ledger.matching(texts, item.paths, item.added) == {"ir/op/base.py": "a\n"}
