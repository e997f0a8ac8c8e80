"""Compare two checkouts of this repository in turns: seconds from import to tasks, and the throughput of the search.

    git worktree add /tmp/old 8560d24; git worktree add /tmp/new HEAD
    python -m experiments.code.compare_trees /tmp/old /tmp/new --old-db sqlite:////tmp/old.db --new-db sqlite:////tmp/new.db

Each round runs `compile_time.py` and `search/search_throughput.py` of each checkout in a new process; the order changes from round to
round. Both databases hold the same records of MiniLM; the new one is an upgraded copy. The scripts write into the checkouts, so remove
these afterwards. Writes experiments/results/compare_trees.md: medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments.harness.pages import environment, write_page

SEARCH = "search, million rows/s"


def run_script(tree: Path, script: str, *arguments: str) -> dict[str, Any]:
    """Run a script of a checkout with the modules of that checkout; return its output."""
    paths = os.pathsep.join(map(str, (tree / "src", tree, tree / "experiments")))
    (file,) = tree.glob(f"experiments/**/{script}.py")  # older checkouts have it in another folder
    module = ".".join(file.relative_to(tree).with_suffix("").parts)
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": paths}, check=True, stdout=subprocess.DEVNULL)
    found = max((tree / "experiments" / "results").glob(f"{script}*.json"), key=lambda p: p.stat().st_mtime)
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def figures(tree: Path, db: str | None) -> dict[str, float]:
    """Row name -> figure of one run of both scripts."""
    compiled = run_script(tree, "compile_time", "--repeats", "3")
    rows = {
        f"{name}: {part}, s": row[part] for name, row in compiled["median_secs"].items() for part in ("lower", "total")
    }
    if db is not None:
        search = run_script(tree, "search_throughput", "--db", db)
        rows |= {f"{SEARCH}: {part}": x for part, x in search["million_rows_per_second"].items()}
        rows["search, trials/s"] = search["trials"]["trials_per_second"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--old-db")
    parser.add_argument("--new-db")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sides = [(args.old.resolve(), args.old_db), (args.new.resolve(), args.new_db)]
    names = [
        subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True, text=True, check=True)
        .stdout.strip()
        for tree, _ in sides
    ]  # fmt: skip
    before = environment()
    samples: list[dict[str, list[float]]] = [defaultdict(list), defaultdict(list)]
    for number in range(args.rounds):
        for k in (0, 1) if number % 2 else (1, 0):
            for row, x in figures(*sides[k]).items():
                samples[k][row].append(x)
    lines = [
        "# Two checkouts: import and search",
        "",
        "Written by `experiments/code/compare_trees.py`; medians (least - most).",
        "",
    ]
    lines += [f"| | {names[0]} | {names[1]} | new / old |", "|---|---|---|---|"]
    for row, old in samples[0].items():
        new = samples[1][row]
        shown = [f"{statistics.median(s):.3g} ({min(s):.3g} - {max(s):.3g})" for s in (old, new)]
        lines.append(f"| {row} | {' | '.join(shown)} | {statistics.median(new) / statistics.median(old):.2f} |")
    write_page("compare_trees", lines, None, before)


if __name__ == "__main__":
    main()
