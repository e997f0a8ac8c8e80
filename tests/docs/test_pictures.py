"""The pictures of the pages are what the script makes of the recorded results, and have alternative texts."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.docs.test_pages import PAGES, named

pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")


@pytest.mark.slow
def test_pictures_are_of_today(request: pytest.FixtureRequest) -> None:
    from docs import pictures

    made = pictures.pictures()
    if request.config.getoption("--update-golden"):
        for name, svg in made.items():
            (pictures.PICTURES / f"{name}.svg").write_text(svg)
    assert {p.stem for p in pictures.PICTURES.glob("*.svg")} == set(made)
    for name, svg in made.items():
        assert (pictures.PICTURES / f"{name}.svg").read_text() == svg, "run this test with --update-golden"
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label") and {e.tag.rpartition("}")[2] for e in root.iter()} <= {
            "svg", "g", "path", "line", "rect", "text", "title", "style",
        }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_pictures_of_pages_exist_and_have_texts(page: Path) -> None:
    for text, path in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
        assert len(text) > 20 and (page.parent / path).is_file(), f"{path}: say what it shows"
