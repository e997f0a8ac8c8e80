"""The settings page: its table is made from the declarations, and its example is read as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relax_tune.tuner.allowed_files import allow
from relax_tune.tuner.settings import FILE, OPTIONS, describe, load_settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
TABLE = re.compile(r"^\| Setting .*?(?=^[^|]|\Z)", re.M | re.S)
EXAMPLE = re.compile(r"^```toml\n(.*?)^```", re.M | re.S)


def example() -> str:
    found = EXAMPLE.search(PAGE.read_text())
    assert found, f"expected an example of {FILE} in {PAGE.name}"
    return found[1]


def test_settings_page_has_the_table_of_the_declarations(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text()
    if request.config.getoption("--update-golden"):
        PAGE.write_text(TABLE.sub(lambda _: describe(), page))
        return
    assert TABLE.findall(page) == [describe()], "docs/settings.md is not of today; run this test with --update-golden"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's example as a settings file that the user allowed."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / FILE).write_text(example())
    allow(tmp_path / FILE, example().encode())


def test_settings_page_example_is_read(tmp_path: Path) -> None:
    settings = load_settings({}, {}, tmp_path)
    given = {name for name in OPTIONS if re.search(rf"^{name} = ", example(), re.M)}
    assert given == set(re.findall(r"^(\w+) =", example(), re.M))
    assert (settings.target, settings.effort, settings.seed) == ("c", "full", 7)


def test_settings_page_names_the_settings_to_allow() -> None:
    wanted = [f"`{name}`" for name, declared in OPTIONS.items() if declared.reaches_out]
    assert f"{', '.join(wanted[:-1])} and {wanted[-1]}" in " ".join(PAGE.read_text().split())


def test_settings_page_precedence_holds(tmp_path: Path) -> None:
    variables = {"RELAX_TUNE_EFFORT": "normal", "RELAX_TUNE_SEED": "3"}
    settings = load_settings({"effort": "quick", "seed": None}, variables, tmp_path)
    assert (settings.effort, settings.seed, settings.target, settings.qkv) == ("quick", 3, "c", "separate")
