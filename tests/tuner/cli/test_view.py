"""Commands that show a subject: text, `--json` and `--html` of the same content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.database.records_made import ZEN, filled, timing
from tests.tuner.report.tuned_database import check_accessible
from typer.testing import CliRunner, Result

from relax_tune.database.store import open_store
from relax_tune.tuner.cli.app import app


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store(f"sqlite:///{tmp_path / 'r.db'}") as store:
        filled(store).add_measurements([timing(f"m{n}", 1e-3, n=n, worker="gpu1") for n in (1, 2)])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--db", "r.db"])


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (("db", "stats"), ZEN.key[:12]),
        (("db", "units", "--on", ZEN.key), "gpu1"),
        (("db", "top", "--on", ZEN.key), "1.00 ms"),
        (("db", "show", "matmul"), "def matmul(): ..."),
    ],
)
def test_view_shows_the_same_as_text_and_as_page(command: tuple[str, ...], part: str) -> None:
    pytest.importorskip("jinja2", reason="Jinja2 is not installed (extra report)")
    done = run(*command, "--html", "view.html")
    assert done.exit_code == 0 and part in done.stdout
    page = Path("view.html").read_text()
    check_accessible(page)
    assert part in page and "Written " in page


def test_view_with_json_and_html_writes_both() -> None:
    pytest.importorskip("jinja2", reason="Jinja2 is not installed (extra report)")
    done = run("db", "stats", "--json", "--html", "stats.html")
    assert sum(s["measurements"] for s in json.loads(done.stdout)) == 2
    assert "zen4" in Path("stats.html").read_text()


def test_view_refuses_an_unwritable_page() -> None:
    pytest.importorskip("jinja2", reason="Jinja2 is not installed (extra report)")
    done = run("db", "stats", "--html", "r.db/x.html")
    assert done.exit_code == 2 and "--html r.db/x.html" in done.stderr and done.stdout == ""
