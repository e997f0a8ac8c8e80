"""Result pages: the facts that measurements depend on, and the one function that writes a page.

Every page of `experiments/results` states below its title the machine, the date, the commit and the load of its measurement.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
REQUIRED = ("cpu", "date", "commit", "load")
"""Facts without which no page is written."""
COMMIT_VARIABLE = "RELAX_TUNE_COMMIT"
"""Names the commit in a copy of the repository without Git's data."""


def commit() -> str:
    """Return the short hash of the checkout, followed by ` with changes` where tracked files differ from it.

    Raises:
        RuntimeError: this is no Git checkout, and the environment does not name the commit.
    """
    if named := os.environ.get(COMMIT_VARIABLE):
        return named

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Results are left out: a script that writes its page after every part would change the tree it describes.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!experiments/results")
        return git("rev-parse", "--short", "HEAD") + " with changes" * bool(changed)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"the commit of {ROOT} is unknown ({error}): set {COMMIT_VARIABLE}") from error


def environment() -> dict[str, str]:
    """Return what the measurements depend on. Call it before they start: `load` is the load at this moment."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    return {
        "cpu": f"{model or platform.machine()}, {os.cpu_count()} cores",
        "load": " ".join(f"{x:.2f}" for x in os.getloadavg()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def _describe(name: str, label: str, facts: Mapping[str, Any]) -> str:
    """Return the line of a page's head that describes one run."""
    missing = [fact for fact in REQUIRED if not facts.get(fact)]
    if missing:
        run = f" of {label}" if label else ""
        raise ValueError(f"page {name}: the environment{run} lacks {', '.join(missing)}: measure again")
    first = f"{facts['cpu']}; {facts['date']}; commit {facts['commit']}; load {facts['load']}"
    others = "".join(f"; {fact} {text}" for fact, text in facts.items() if fact not in REQUIRED and text)
    return f"Measured {f'({label}) ' * bool(label)}on {first}{others}."


def with_head(name: str, lines: Sequence[str], measured: Mapping[str, Any]) -> list[str]:
    """Return the lines of a page with the environment below the title.

    Args:
        name: the page, for errors.
        lines: the page; the first line is its title.
        measured: the facts of `environment`, or such facts by the name of a run where a page shows several runs.

    Raises:
        ValueError: the page has no title, no run is described, or a run lacks one of the `REQUIRED` facts.
    """
    if not lines or not lines[0].startswith("# "):
        raise ValueError(f"page {name}: expected a title as the first line, got {lines[0] if lines else 'no line'!r}")
    runs = measured if measured and all(isinstance(x, Mapping) for x in measured.values()) else {"": measured}
    head = [_describe(name, label, facts) for label, facts in runs.items()]
    rest = lines[1:] if len(lines) > 1 and not lines[1] else ["", *lines[1:]]
    return [lines[0], "", *(line for i, one in enumerate(head) for line in ([""] * bool(i) + [one])), *rest]


def write_page(
    name: str,
    lines: Sequence[str],
    record: Any,
    measured: Mapping[str, Any],
    folder: Path | None = None,
    indent: int | None = 1,
    quiet: bool = False,
) -> list[str]:
    """Write `NAME.md`, and `NAME.json` where there is a record, and print the page.

    Args:
        name: the name of both files, without an ending.
        lines: the page; the first line is its title.
        record: what the page was made from, as JSON holds it; None writes the page alone.
        measured: see `with_head`.
        folder: `experiments/results` by default.
        indent: of the JSON file.
        quiet: do not print the page.

    Returns:
        The lines of the page as written.

    Raises:
        ValueError: the environment is incomplete (see `with_head`); nothing is written.
    """
    page = with_head(name, lines, measured)
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    if record is not None:
        (folder / f"{name}.json").write_text(json.dumps(record, indent=indent, sort_keys=True) + "\n")
    (folder / f"{name}.md").write_text("\n".join(page) + "\n")
    if not quiet:
        print("\n".join(page))
    return page
