"""Processor time of builds without records, of two checkouts: in Python, in gcc, and the source that gcc reads.

    python -m experiments.families.build_costs --before CHECKOUT [--only 'silero.*|rxnmap']

The files are those of `wild.py`, which says what they need. Both checkouts build a file at the same time, each in a process of its own
with an empty cache of kernels, so that other work on the machine stretches both alike. The first file of a fresh checkout compiles its
modules of Python, too. Processor time is that of the process and of its children. A script in front of gcc counts its calls, its time and
its sources. `open` is the first time that an artifact is opened, which compiles its kernels for the user's cache, and `again` the second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.families.wild import cache_folder, listed, processor_seconds
from experiments.harness.pages import ROOT, environment, write_page

SIDES = ("before", "after")
GCC = """#!/bin/bash
case "$*" in *unit.c*) ;; *) exec /usr/bin/env gcc "$@" ;; esac
TIMEFORMAT='%U %S'
{ time gcc "$@" 2>&3 ; } 3>&2 2>time.txt
code=$?
echo "$(tail -1 time.txt) $(wc -c < unit.c)" > ../costs.$$
exit $code
"""
"""Writes seconds and bytes next to the compiled libraries, where a process in the sandbox may write."""
Costs = dict[str, Any]


def child(path: Path) -> None:
    """Build one file and print its costs as JSON."""
    from relax_tune.tuner.measure import scratch

    start = processor_seconds()
    import relax_tune as rt

    imported = processor_seconds() - start
    calls: list[list[float]] = []

    def collect(folder: Path) -> None:
        calls.extend([float(x) for x in f.read_text().split()] for f in folder.rglob("costs.*"))

    removed = scratch._remove

    def remove(folder: Path, lock: int) -> None:  # the folder of the self-test
        collect(folder)
        removed(folder, lock)

    scratch._remove = remove
    module = rt.load_model(path)
    start, own = processor_seconds(), time.process_time()
    artifact = rt.build(module, target="c", db="memory://")
    total, own = processor_seconds() - start, time.process_time() - own
    collect(Path(os.environ["RELAX_TUNE_CACHE"]))
    costs = {
        "import_secs": imported,
        "total_secs": total,
        "python_secs": own,
        "gcc_secs": sum(user + system for user, system, _ in calls),
        "gcc_calls": len(calls),
        "source_bytes": int(sum(size for _, _, size in calls)),
        "kernels": sum(len(p.kernels) for p in artifact.programs),
    }
    for name in ("open_secs", "again_secs"):
        start = processor_seconds()
        with artifact.open():
            costs[name] = processor_seconds() - start
    print(json.dumps(costs), flush=True)


def started(checkout: Path, path: Path, folder: Path) -> subprocess.Popen[str]:
    """Start the build of a file by a checkout."""
    compiler = folder / "gcc-with-costs"
    compiler.write_text(GCC)
    compiler.chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    variables = {
        **inherited,
        "CC": str(compiler),
        "PYTHONPATH": os.pathsep.join((str(checkout / "src"), str(ROOT))),
        "RELAX_TUNE_CACHE": str(folder / "cache"),
    }
    call = [sys.executable, "-W", "ignore", "-m", "experiments.families.build_costs", "--child", str(path)]
    return subprocess.Popen(call, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def compared(path: Path, checkouts: Mapping[str, Path]) -> dict[str, Costs]:
    """Return the costs of a file by side. Raises RuntimeError if a build fails."""
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        for side, checkout in checkouts.items():
            Path(folder, side).mkdir()
            processes[side] = started(checkout, path, Path(folder, side))
        costs = {}
        for side, process in processes.items():
            out, err = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{path.name}, {side}: {err.strip()[-600:]}")
            costs[side] = json.loads(out.splitlines()[-1])
    return costs


def row(name: str, costs: Mapping[str, Costs]) -> str:
    def pair(field: str, form: str = ".1f", unit: float = 1.0) -> str:
        return " → ".join(format(costs[side][field] / unit, form) for side in SIDES)

    cells = [name, pair("total_secs"), pair("python_secs"), pair("gcc_secs"), pair("gcc_calls", ".0f"),
             pair("source_bytes", ".0f", 1e3), pair("kernels", ".0f"), pair("open_secs"), pair("again_secs", ".2f")]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def page(results: Mapping[str, Mapping[str, Costs]]) -> list[str]:
    """Return the lines of the page."""
    about = [" ".join(p.split()) for p in (__doc__ or "").split("\n\n")]
    totals = {side: median(c[side]["total_secs"] for c in results.values()) for side in SIDES}
    imports = {side: median(c[side]["import_secs"] for c in results.values()) for side in SIDES}
    return [
        "# Builds without records", "", about[2], "",
        f"* median of the processor time of a build: {totals['before']:.1f} s before, {totals['after']:.1f} s after",
        f"* `import relax_tune`: {imports['before']:.2f} s before, {imports['after']:.2f} s after", "",
        "| file | processor s | in Python s | in gcc s | calls of gcc | source kB | kernels | open s | again s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(row(name, costs) for name, costs in results.items()),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--only", default="", help="a regular expression that a file's path contains")
    parser.add_argument("--folder", type=Path, default=None, help="folder of downloaded wheels")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        child(args.child)
        return 0
    if args.before is None:
        parser.error("--before expects a checkout")
    facts = environment()
    results: dict[str, dict[str, Costs]] = {}
    for name, _wheel, path, problem in listed(args.folder or cache_folder()):
        if not re.search(args.only, name):
            continue
        if path is None:
            print(problem)
            continue
        results[name] = compared(path, {"before": args.before.resolve(), "after": ROOT})
        print(row(name, results[name]), flush=True)
        # a long run that is stopped has its results
        write_page("build_costs", page(results), {"environment": facts, "results": results}, facts, quiet=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
