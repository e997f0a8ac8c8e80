"""What a machine with an NVIDIA GPU is asked first: tests, ceilings of the card, kernels, whole models, in under nine minutes.

    python experiments/gpu_suite.py --work FOLDER [--target cuda:0] [--only PART,...] [--again PART,...] [--secs SECS]

Parts, each in a process of its own with a share of the time (see PARTS): `pytest -m cuda`; sampled candidates under compute-sanitizer;
how fast the card copies, multiplies and launches; kernels that memory binds, tuned, against the copy; products of 16-bit floats at
(M, 4096, N), our kernels alone, cuBLAS or cuBLASLt, and what the build dispatches, beside torch; on Hopper, whether products by four
warps at once are right, beside those that are selected; a decoder layer and a small model,
tokens a second, beside torch; one kernel measured by a scheduler and a worker on loopback; one kernel on NVIDIA's OpenCL. What a part
needs and does not find it says. A part that fails or runs out of time costs no other, and what it had found is kept: the folder holds
it, and calling again on a GPU of the same name goes on from there. `--again` forgets what a part has found. What a part does not need of
its share the others have, and so those that are asked for have all of the time. The results are written after each part.

torch, for the peers, is that of `--peer-python` (by default this Python). `--tiny` takes tiny sizes, to see that everything runs.
Times are medians of launches recorded together, with weights taken in turns from copies that the last cache cannot hold.
Writes gpu_suite.json and gpu_suite.md to `--results`, by default this folder's results/. Exit status 3: there is no GPU; 1: no part found
anything.
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

HERE = Path(__file__).parent
RESULTS = HERE / "results"
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
    "warpgroups": "Products by four warps at once, which nothing selects",
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
    """Of one part. state: `done`, or why it is not; rows: what it found, now or before."""

    state: str
    rows: Sequence[Row]
    secs: float


def rows_of(path: Path) -> list[Row]:
    """Those of whole lines: the last one may have been cut."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def run_part(name: str, work: Path, secs: float, passed: Sequence[str]) -> Found:
    """In a process group of its own, which is ended when the time is over."""
    path, log, began = work / f"{name}.jsonl", work / f"{name}.log", time.monotonic()
    command = [sys.executable, str(HERE / "gpu_parts.py"), name, "--work", str(work), "--secs", str(secs), *passed]
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
    lines = ["# On a GPU", "", "Written by `experiments/gpu_suite.py`.", ""]
    lines += [f"* {key}: {value}" for key, value in card.items() if key != "key"]
    for name, part in found.items():
        lines += ["", f"## {TITLES[name]}", ""]
        kept = [row for row in part.rows if not row.get("unfinished")]
        lines += table(kept) if kept else ["Nothing was found."]
        if part.state != "done":
            lines += ["", f"{name}: {part.state}."]
    return lines


def write(results: Path, card: Row, found: Mapping[str, Found]) -> list[str]:
    """Both files; the lines of the page."""
    results.mkdir(parents=True, exist_ok=True)
    record = {"card": card} | {n: {"state": p.state, "rows": p.rows} for n, p in found.items()}
    (results / "gpu_suite.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = report(card, found)
    (results / "gpu_suite.md").write_text("\n".join(lines) + "\n")
    return lines


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
        parser.error(f"wanted parts among {', '.join(TITLES)}, found {', '.join(unknown)}")
    args.work.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.secs
    before = rows_of(args.work / "card.jsonl")
    forget(args.work, ["card", *again])
    passed = ["--target", args.target, "--peer-python", args.peer_python, *["--tiny"] * args.tiny]
    card = run_part("card", args.work, CARD_SECS, passed)
    if not card.rows:
        print(f"gpu_suite: wanted a GPU at {args.target!r}, {card.state}", file=sys.stderr)
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
    lines = write(args.results, card.rows[-1], found)
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
        lines = write(args.results, card.rows[-1], found)
    print("\n".join(lines))
    return 0 if any(part.rows for part in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
