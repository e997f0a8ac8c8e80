"""The suite for a machine with an NVIDIA GPU: tests, limits of the card, kernels, whole models, in under nine minutes.

    python -m experiments.gpu.suite --work FOLDER [--target cuda:0] [--only PART,...] [--again PART,...] [--secs SECS]

Each part has a process and a share of the time (see PARTS): `pytest -m cuda`; sampled candidates under compute-sanitizer; rates of
copies, products and launches; memory-bound kernels, tuned, compared with the copy; products of 16-bit floats at (M, 4096, N): our
kernels alone, cuBLAS or cuBLASLt, what the build dispatches, and torch; on Hopper, whether products by `wgmma` are right, and their
time next to the selected ones; a decoder layer and a small model in tokens per second, with torch; one kernel measured by a scheduler
and a worker on loopback; one kernel on NVIDIA's OpenCL. A part reports what it needs and does not find. A part that fails or runs out
of time affects no other, and its rows stay in the folder; a later call on a GPU of the same name continues. `--again` discards the
rows of a part. Time that a part leaves unused goes to the others, so `--only` gives a part all of the time. The results are written
after each part.

torch, for the peers, is that of `--peer-python` (by default this Python). `--tiny` takes tiny sizes, as a check of the script.
Times are medians of launches recorded together, with weights taken in turns from copies that the last cache cannot hold.
Writes gpu_suite.json and gpu_suite.md to `--results`, by default this folder's results/. Exit status 3: there is no GPU; 1: no part
has rows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.harness.pages import RESULTS, environment, write_page

RUN_PART = [sys.executable, "-m", "experiments.gpu.parts"]
TOTAL_SECS = 530.0
CARD_SECS = 60.0  # the first process of ours on the machine, and what it loads
# Shares of the time, which are seconds where all have one, in the order in which parts run.
PARTS: Mapping[str, float] = {
    "tests": 50,
    "sanitizer": 45,
    "ceilings": 15,
    "memory": 55,
    "gemm": 90,
    "gemm_torch": 35,
    "warpgroups": 35,
    "decoder": 100,
    "decoder_torch": 50,
    "cluster": 25,
    "opencl": 20,
}
TITLES = {
    "tests": "Tests with the marker `cuda`",
    "sanitizer": "Sampled candidates under compute-sanitizer",
    "ceilings": "What the card does at most",
    "memory": "Kernels that memory binds, tuned",
    "gemm": "Products (M, 4096) x (4096, N), ours and cuBLAS",
    "gemm_torch": "The same products by torch",
    "warpgroups": "Products by four warps at once (`wgmma`)",
    "decoder": "A decoder layer and a small model, ours",
    "decoder_torch": "The same models by torch",
    "cluster": "Measured by a scheduler and a worker on loopback",
    "opencl": "NVIDIA's OpenCL",
}
GRACE_SECS = 4.0  # for a part to end by itself
NO_GPU = 3

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """The state and the rows of a part. state: `done`, or why it is not; rows: new and earlier ones."""

    state: str
    rows: Sequence[Row]
    secs: float


def rows_of(path: Path) -> list[Row]:
    """Return the rows of complete lines: the last line may have been cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def run_part(name: str, work: Path, secs: float, passed: Sequence[str]) -> Found:
    """Run a part in a process group, which is ended when the time is over."""
    path, log, began = work / f"{name}.jsonl", work / f"{name}.log", time.monotonic()
    command = [*RUN_PART, name, "--work", str(work), "--secs", str(secs), *passed]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(secs)
            if status is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECS)
        finally:
            with suppress(ProcessLookupError):  # what it started ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1][:300]
    state = "done" if status == 0 else f"out of time after {secs:.0f} s" if status is None else f"failed: {last}"
    rows = rows_of(path)
    if status == 0 and any(row.get("unfinished") for row in rows):
        state = "out of time"
    return Found(state, rows, time.monotonic() - began)


def table(rows: Sequence[Row]) -> list[str]:
    """A line a row; columns in the order in which they are met."""
    columns = list(dict.fromkeys(c for row in rows for c in row if c != "unfinished"))
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(c)) for c in columns) + " |")
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def report(card: Row, found: Mapping[str, Found]) -> list[str]:
    """The page: the card, then a section a part."""
    lines = ["# On a GPU", "", "Written by `experiments/gpu/suite.py`.", ""]
    lines += [f"* {key}: {value}" for key, value in card.items() if key != "key"]
    for name, part in found.items():
        lines += ["", f"## {TITLES[name]}", ""]
        kept = [row for row in part.rows if not row.get("unfinished")]
        lines += table(kept) if kept else ["Nothing was found."]
        if part.state != "done":
            lines += ["", f"{name}: {part.state}."]
    return lines


def write(results: Path, card: Row, found: Mapping[str, Found], measured: Mapping[str, str]) -> list[str]:
    """Both files; the lines of the page."""
    record = {"card": card} | {n: {"state": p.state, "rows": p.rows} for n, p in found.items()}
    return write_page("gpu_suite", report(card, found), record, measured, results, quiet=True)


def forget(work: Path, parts: Sequence[str]) -> None:
    for name in parts:
        (work / f"{name}.jsonl").unlink(missing_ok=True)
        (work / f"{name}.done").unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--only", default=",".join(TITLES))
    parser.add_argument("--again", default="")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--secs", type=float, default=TOTAL_SECS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    only, again = args.only.split(","), [p for p in args.again.split(",") if p]
    if unknown := sorted({*only, *again} - TITLES.keys()):
        parser.error(f"expected parts among {', '.join(TITLES)}, got {', '.join(unknown)}")
    args.work.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.secs
    measured = environment()
    before = rows_of(args.work / "card.jsonl")
    forget(args.work, ["card", *again])
    passed = ["--target", args.target, "--peer-python", args.peer_python, *["--tiny"] * args.tiny]
    card = run_part("card", args.work, CARD_SECS, passed)
    if not card.rows:
        print(f"gpu_suite: expected a GPU at {args.target!r}, {card.state}", file=sys.stderr)
        print("experiments/README.md says what such a machine needs", file=sys.stderr)
        return NO_GPU
    if before and before[-1].get("device") != card.rows[-1]["device"]:
        print(f"gpu_suite: what {before[-1].get('device')} did is forgotten, this is another GPU", file=sys.stderr)
        forget(args.work, list(TITLES))
    wanted = [p for p in TITLES if p in only]
    found = {p: Found("not begun", rows_of(args.work / f"{p}.jsonl"), 0.0) for p in wanted}
    to_do = []
    for name in wanted:
        if (args.work / f"{name}.done").exists():
            found[name] = replace(found[name], state="done")
        else:
            to_do.append(name)
    lines = write(args.results, card.rows[-1], found, measured)
    for at, name in enumerate(to_do):
        left = until - time.monotonic() - GRACE_SECS
        secs = left * PARTS[name] / sum(PARTS[p] for p in to_do[at:])
        if secs < GRACE_SECS:
            continue
        print(f"{name} ...", file=sys.stderr, end=" ", flush=True)
        found[name] = run_part(name, args.work, secs, passed)
        print(f"{found[name].state} ({found[name].secs:.0f} s)", file=sys.stderr, flush=True)
        if found[name].state == "done":
            (args.work / f"{name}.done").touch()
        lines = write(args.results, card.rows[-1], found, measured)
    print("\n".join(lines))
    return 0 if any(part.rows for part in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
