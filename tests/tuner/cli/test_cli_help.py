"""Help: every command and option says what it does, what it is by default, and how to write it."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.database.records_made import ZEN, filled, timing
from typer.testing import CliRunner

from relax_tune.database.store import open_store
from relax_tune.tuner.cli.app import COMMANDS, app, load_command

RUNNER = CliRunner()
# They run until they are interrupted, or only write files.
WITHOUT_JSON = {
    "worker",
    "dashboard",
    "serve",
    "web",
    "scheduler",
    "sign",
    "verify",
    "certificate authority",
    "certificate issue",
    "certificate renew",
    "certificate revoke",
    "certificate show",
}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    for name in COMMANDS:
        command = load_command(name)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {sub}", inner[sub]) for sub in inner)


ALL = dict(commands())


@pytest.mark.parametrize("words", ALL)
def test_option_help_has_meaning_and_default(words: str) -> None:
    command = ALL[words]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        text = parameter.help or ""
        assert text.endswith((".", "]")) and len(text) > 10, (parameter.name, text)
        flag = getattr(parameter, "is_flag", False)
        if not parameter.required and not flag:
            assert "[default: " in text or parameter.default is not None, (parameter.name, text)
        assert re.search(r"\[/?[a-z]+\](?!\w)", text) is None, (parameter.name, "looks like markup")
        shown = parameter.metavar or ""
        assert flag or shown.isupper() or any(c in shown for c in "|=.:"), (parameter.name, "has no telling metavar")
    if words not in WITHOUT_JSON:
        assert "--json" in {option for p in command.params for option in p.opts}


@pytest.mark.parametrize("words", ALL)
def test_command_help_has_summary_and_parsable_examples(words: str) -> None:
    done = RUNNER.invoke(app, [*words.split(), "--help"])
    assert done.exit_code == 0 and "\x1b" not in done.stdout
    text = done.stdout
    first = inspect.cleandoc(ALL[words].help).split("\n\n")[0]
    assert first.endswith(".") and len(first) < 90 and "..." not in first
    _, _, shown = text.partition("Example")
    lines = [line.strip() for line in shown.splitlines()[1:] if line.strip()]
    assert lines and all(line.startswith(f"relax-tune {words.split()[0]}") for line in lines), lines
    for line in lines:
        _parse(shlex.split(line)[1:])


def _parse(arguments: list[str]) -> None:
    """Parse, without running, what would be run. Raises for what the command would refuse."""
    command = load_command(arguments[0])
    rest = arguments[1:]
    if hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    with command.make_context(arguments[0], rest):
        pass


def test_lists_of_commands_are_not_cut() -> None:
    for arguments in (["--help"], ["db", "--help"]):
        text = RUNNER.invoke(app, arguments, env={"COLUMNS": "80"}).stdout
        listed = text.partition("Commands:")[2].partition("\n\n")[0]
        assert len(listed.strip().splitlines()) >= 9 and "..." not in listed, listed
    assert "130" in RUNNER.invoke(app, ["--help"]).stdout


@pytest.mark.slow
def test_db_commands_answer_scripts_with_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("r.db", "other.db"):
        with open_store(f"sqlite:///{tmp_path / name}") as store:
            filled(store).add_measurements([timing(f"{name}-{n}", 1e-3, n=n) for n in (1, 2)])
    here = ("--db", "r.db", "--json")
    expected: dict[tuple[str, ...], Any] = {
        ("export", "all.jsonl"): lambda d: d["file"] == "all.jsonl" and d["records"] > 2,
        ("export", "t4.json", "--format", "t4", "--on", ZEN.key): lambda d: d["measurements"] == 2,
        ("import", "all.jsonl"): lambda d: d["measurements"] == 0 and d["problems"] == [] and d["left_out"] == 0,
        ("merge", "other.db"): lambda d: d["measurements"] == 2 and d["source"].endswith("other.db"),
        ("prune", "--older-than", "1", "--on", ZEN.key, "--dry-run"): lambda d: d["removed"] is False,
        ("upgrade",): lambda d: d["before"] == d["after"],
        ("check",): lambda d: d["problems"] == [],
        ("units", "--on", ZEN.key): lambda d: sum(u["measurements"] for u in d) == 4,
        ("stats",): lambda d: sum(s["measurements"] for s in d) == 4,
        ("top", "--on", ZEN.key): lambda d: len(d) > 0,
        ("show", ZEN.key): lambda d: d[0]["target"] == ZEN.key,
    }
    for arguments, holds in expected.items():
        done = RUNNER.invoke(app, ["db", *arguments, *here])
        assert done.exit_code == 0 and done.stderr == "", (arguments, done.stderr, done.exception)
        assert holds(json.loads(done.stdout)), (arguments, done.stdout)
