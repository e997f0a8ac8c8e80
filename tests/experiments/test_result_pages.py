"""Result pages: their heads, and the runs that they refuse."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from experiments.harness import pages

FACTS = {"cpu": "a processor, 2 cores", "date": "2026-01-02", "commit": "abc1234", "load": "0.10 0.20 0.30"}


def test_page_states_machine_date_commit_and_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages.write_page("one", ["# Title", "", "Text."], {"x": 1}, FACTS | {"python": "3.12"}, tmp_path / "results")
    page = (tmp_path / "results" / "one.md").read_text()
    head = "Measured on a processor, 2 cores; 2026-01-02; commit abc1234; load 0.10 0.20 0.30; python 3.12."
    assert page == f"# Title\n\n{head}\n\nText.\n"
    assert json.loads((tmp_path / "results" / "one.json").read_text()) == {"x": 1}
    assert capsys.readouterr().out == page


def test_page_of_several_runs_describes_each(tmp_path: Path) -> None:
    runs = {"first": FACTS, "second": FACTS | {"commit": "def5678"}}
    lines = pages.write_page("two", ["# Title", "Text."], None, runs, tmp_path, quiet=True)
    assert [line[:17] for line in lines] == ["# Title", "", "Measured (first) ", "", "Measured (second)", "", "Text."]
    assert not (tmp_path / "two.json").exists()


@pytest.mark.parametrize("fact", pages.REQUIRED)
def test_page_without_a_required_fact_is_refused(tmp_path: Path, fact: str) -> None:
    for incomplete in ({k: v for k, v in FACTS.items() if k != fact}, FACTS | {fact: ""}):
        with pytest.raises(ValueError, match=f"page one.*lacks {fact}"):
            pages.write_page("one", ["# Title"], {}, incomplete, tmp_path)
        with pytest.raises(ValueError, match=f"of second lacks {fact}"):
            pages.write_page("one", ["# Title"], {}, {"first": FACTS, "second": incomplete}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_page_without_environment_or_title_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks cpu"):
        pages.write_page("one", ["# Title"], {}, {}, tmp_path)
    with pytest.raises(ValueError, match="title"):
        pages.write_page("one", ["Text."], {}, FACTS, tmp_path)


def test_environment_has_every_required_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pages.COMMIT_VARIABLE, "abc1234")
    facts = pages.environment()
    assert all(facts[fact] for fact in pages.REQUIRED) and facts["commit"] == "abc1234"


def test_commit_names_changes_and_is_refused_outside_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(pages.COMMIT_VARIABLE, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match=pages.COMMIT_VARIABLE):
        pages.commit()

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    (tmp_path / "a").write_text("")
    git("init", "-q")
    git("add", "a")
    git("commit", "-q", "-m", "a")
    assert re.fullmatch("[0-9a-f]{4,}", pages.commit())
    (tmp_path / "a").write_text("changed")
    assert pages.commit().endswith(" with changes")


def test_every_page_is_written_by_the_harness() -> None:
    """No script writes a page of results by itself."""
    scripts = [p for p in (pages.ROOT / "experiments").glob("*/*.py") if p.name != "pages.py"]
    writers = [str(p) for p in scripts if re.search(r"\.md\"\)\.write_|with_suffix\(\"\.md\"\)\.write_", p.read_text())]
    assert len(scripts) > 80 and not writers


def test_pages_name_commits_in_the_history() -> None:
    """A page written before a rebase names a commit that nobody else can check out."""

    def git(*arguments: str, text: str = "") -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=pages.ROOT, input=text, capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("this checkout lacks the history")
    named = re.compile(r"\bcommit ([0-9a-f]{7,40})\b")
    columns = re.compile(
        r"^\| \| ((?:[0-9a-f]{7,40} \| )+)", re.MULTILINE
    )  # the head of a table that compares revisions
    places: dict[str, str] = {}
    for page in sorted((pages.ROOT / "experiments" / "results").glob("*.md")):
        text = page.read_text()
        heads = [h for row in columns.findall(text) for h in row.rstrip("| ").split(" | ")]
        places |= dict.fromkeys([*named.findall(text), *heads], page.name)
    assert len(places) > 8
    answers = git("cat-file", "--batch-check", text="".join(f"{commit}\n" for commit in places)).splitlines()
    unknown = {c: places[c] for c, answer in zip(places, answers, strict=True) if " commit " not in f"{answer} "}
    assert not unknown
