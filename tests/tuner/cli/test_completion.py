"""Shell completion, by the protocol the shells speak: a process of its own with words in its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from relax_tune.tuner.cli.app import COMMANDS
from relax_tune.tuner.cli.report.model_view import stage_names
from relax_tune.tuner.search.registry import strategy_names
from relax_tune.tuner.settings import EFFORTS, Policy

pytestmark = pytest.mark.process

SCRIPT = "from relax_tune.tuner.cli.start import main; main()"
# What must not be imported to list the commands.
HEAVY = "{'numpy', 'sqlalchemy', 'xgboost', 'optuna', 'pyopencl'}"


def program(arguments: list[str], script: str = SCRIPT, **variables: str) -> str:
    environment = {**os.environ, **variables, "HOME": variables.get("HOME", os.environ.get("HOME", "/"))}
    script = f"import sys; sys.argv[0] = 'relax-tune'\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def bash(line: str) -> list[str]:
    """What bash would be offered for the last word of a line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return program([], **words, _RELAX_TUNE_COMPLETE="complete_bash").split()


def test_commands_are_listed_without_importing_any() -> None:
    check = f"import atexit; atexit.register(lambda: print(*({HEAVY} & set(sys.modules)))); {SCRIPT}"
    found = program([], check, COMP_WORDS="relax-tune ", COMP_CWORD="1", _RELAX_TUNE_COMPLETE="complete_bash").split(
        "\n"
    )
    assert found[:-2] == list(COMMANDS) and found[-2:] == ["", ""]


OFFERS = {
    "relax-tune d": ["dashboard", "db", "devices", "doctor"],
    "relax-tune tune m --strategy ": list(strategy_names()),
    "relax-tune tune m --effort ": list(EFFORTS),
    "relax-tune tune --target o": ["opencl"],
    "relax-tune build --policy ": list(get_args(Policy)),
    "relax-tune show m --after ": list(stage_names()),
    "relax-tune show m --what s": ["sketches", "source"],
    "relax-tune db ex": ["export"],
    "relax-tune db top --co": ["--count"],
    "relax-tune db export --format ": ["jsonl", "t4"],
}


def test_completion_offers_known_words() -> None:
    script = (
        "import os\n"
        "from relax_tune.tuner.cli.app import main\n"
        "for line in sys.argv[1:]:\n"
        "    os.environ |= {'COMP_WORDS': line, 'COMP_CWORD': str(len(line.split(' ')) - 1)}\n"
        "    try:\n        main()\n    except SystemExit:\n        print('--')\n"
    )
    answers = program(list(OFFERS), script, _RELAX_TUNE_COMPLETE="complete_bash").split("--\n")
    assert dict(zip(OFFERS, (a.split() for a in answers))) == OFFERS


def test_options_are_offered() -> None:
    assert {"--target", "--db", "--bound", "--strategy", "--json"} <= set(bash("relax-tune tune --"))


def test_zsh_and_fish_get_descriptions_too() -> None:
    zsh = program([], _TYPER_COMPLETE_ARGS="relax-tune b", _RELAX_TUNE_COMPLETE="complete_zsh")
    assert zsh.startswith("_arguments") and '"build":' in zsh and '"bench":' in zsh and '"run"' not in zsh
    fish = program(
        [],
        _TYPER_COMPLETE_ARGS="relax-tune tune m --effort ",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
        _RELAX_TUNE_COMPLETE="complete_fish",
    )
    assert fish.split() == list(EFFORTS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_can_be_shown(shell: str) -> None:
    text = program([], _RELAX_TUNE_COMPLETE=f"source_{shell}")
    assert "relax-tune" in text and f"complete_{shell}" in text


def test_bash_itself_completes_with_the_script(tmp_path: Path) -> None:
    tool = tmp_path / "relax-tune"
    tool.write_text(f"#!{sys.executable}\n{SCRIPT}\n")
    tool.chmod(0o755)
    script = program([], _RELAX_TUNE_COMPLETE="source_bash")
    asked = (
        f"{script}\nCOMP_WORDS=(relax-tune db st); COMP_CWORD=2\n"
        "_relax_tune_completion relax-tune\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "--norc", "-c", asked], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["stats"], done.stderr
