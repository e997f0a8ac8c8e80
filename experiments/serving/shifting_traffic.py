"""Traffic whose lengths shift, served by `relax-tune serve --improve`: what swaps gain, and what tuning takes from serving.

    python -m experiments.serving.shifting_traffic --model FOLDER --artifact FILE.rta --db URL [--secs 3600] [--out NAME]

One text of random tokens a request, at random times (a Poisson process). Its length is log-normal around a mean that changes in
steps: each of `MEANS` for an equal part of the time. The state of the server is read every second, so each request has the phase in
which it was sent, and the artifact that answered it.

* *Gain*: times of requests after a swap, relative to the median of their length (to a power of two) with the artifact from before, in the
  same part.
* *Cost of tuning*: times of requests while the server tunes, relative to the median of their length while it does not, with the same
  artifact. Only times with the other artifact or in the other phase differ, so the loads of the machine should be those of the run alone.

The artifact is copied into a folder of the run first. Without `--out` the results are only printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from docs.pictures import standalone

from experiments.harness.pages import RESULTS, environment, write_page
from experiments.serving.batching import Connections, body_of, exchange
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.report.charts import lines
from relax_tune.tuner.report.subject import Figure
from relax_tune.tuner.text.tokens import limit_of

MEANS = (12, 48, 120, 24)
SPREAD = 0.4
"""Standard deviation of the logarithm of a length."""
SLICES = 40
"""Points of the picture along the time."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request: its time since the start, tokens, seconds to the answer, phase of the server, and number of swaps before it."""

    at: float
    length: int
    secs: float
    phase: str
    swaps: int


@dataclass(slots=True)
class State:
    """The state of the server as last read."""

    phase: str = "recording"
    swaps: int = 0
    last: dict[str, Any] | None = None


def length_at(share: float, generator: np.random.Generator, most: int) -> int:
    """Return the length of a text at a share of the time, from 0 to 1."""
    mean = MEANS[min(int(share * len(MEANS)), len(MEANS) - 1)]
    return int(np.clip(round(mean * np.exp(SPREAD * generator.standard_normal())), 2, most))


async def drive(port: int, secs: float, rate: float, most: int, seed: int, state: State) -> list[Answered]:
    """Send requests for so many seconds; return the answers."""
    generator = np.random.default_rng(seed)
    due = np.cumsum(generator.exponential(1 / rate, max(1, round(rate * secs))))
    lengths = [length_at(at / secs, generator, most) for at in due]
    bodies = [body_of(generator.integers(1000, 2000, n)) for n in range(most + 1)]
    idle: Connections = []
    start = time.perf_counter()

    async def one(at: float, length: int) -> Answered:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        phase, swaps = state.phase, state.swaps
        await exchange(port, bodies[length], idle)
        return Answered(float(at), length, time.perf_counter() - start - float(at), phase, swaps)

    watching = asyncio.create_task(_watch(port, state))
    try:
        return list(await asyncio.gather(*(one(float(at), n) for at, n in zip(due, lengths, strict=True))))
    finally:
        watching.cancel()
        for _, writer in idle:
            writer.close()


async def _watch(port: int, state: State) -> None:
    while True:
        (model,) = (await asyncio.to_thread(_improvement, port))["models"]
        state.phase, state.swaps, state.last = model["phase"], model["swaps"] - model["returns"], model
        await asyncio.sleep(1.0)


def _improvement(port: int) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/improvement") as answer:
        return json.load(answer)


def _kind(a: Answered) -> int:
    return a.length.bit_length()


def relative(answers: Iterable[Answered], base: Iterable[Answered]) -> list[float]:
    """Return the times of requests relative to the median of their length in `base`; lengths without five times there are left out."""
    known = defaultdict[int, list[float]](list)
    for a in base:
        known[_kind(a)].append(a.secs)
    medians = {kind: median(secs) for kind, secs in known.items() if len(secs) >= 5}
    return [a.secs / medians[_kind(a)] for a in answers if _kind(a) in medians]


def summary(answers: Sequence[Answered], secs: float) -> list[str]:
    """Return the rows of gains and of the cost of tuning, by the part of the time."""
    rows = ["| part | mean length | requests | | median | p99 |", "|---|---|---|---|---|---|"]
    for part, mean in enumerate(MEANS):
        own = [a for a in answers if part <= a.at / secs * len(MEANS) < part + 1]
        quiet = [a for a in own if a.phase != "tuning"]
        for swaps in sorted({a.swaps for a in own}):
            base = [a for a in quiet if a.swaps == swaps]
            cases = [
                ("not tuning", base, base),
                ("tuning", [a for a in own if a.phase == "tuning" and a.swaps == swaps], base),
            ]
            cases.append(("after the swap", [a for a in quiet if a.swaps == swaps + 1], base))
            for label, chosen, against in cases:
                ratios = relative(chosen, against)
                if len(ratios) >= 20:
                    p50, p99 = np.quantile(ratios, [0.5, 0.99])
                    rows.append(
                        f"| {part + 1} | {mean} | {len(ratios)} | artifact {swaps}, {label} | {p50:.3f} | {p99:.3f} |"
                    )
    return rows


def picture(answers: Sequence[Answered], secs: float) -> str:
    """Return the picture of the median and the 99th percentile over the time."""
    rows = []
    for number in range(SLICES):
        own = [a.secs * 1e3 for a in answers if number <= a.at / secs * SLICES < number + 1]
        if own:
            x = (number + 0.5) * secs / SLICES / 60
            for label, q in (("median", 0.5), ("99th percentile", 0.99)):
                rows.append({"x": x, "y": float(np.quantile(own, q)), "series": label})
    chart = lines(
        rows, x="minutes", y="time of a request (ms, log scale)", series=["median", "99th percentile"], log_y=True
    )
    return standalone(Figure("shifting-traffic", "Times of requests while their lengths shift", "", chart))


def measure(given: argparse.Namespace) -> tuple[list[Answered], State]:
    """Serve, send, and return the answers and the last state."""
    state = State()
    with tempfile.TemporaryDirectory() as folder:
        path = shutil.copy(given.artifact, Path(folder) / "encoder.rta")
        command = [sys.executable, "-m", "relax_tune", "serve", str(path), "--model", str(given.model), "--port", "0"]
        command += ["--no-token", "--queue", "4096", "--timeout-secs", "600", "--p99-ms", str(given.p99_ms)]
        command += ["--improve", "--improve-secs", str(given.improve_secs), "--db", given.db]
        limit = limit_of(load_artifact(path), 1).most or 512
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as child:
            assert child.stderr is not None
            port = None
            for line in child.stderr:
                print(line, end="", file=sys.stderr)
                if match := re.search(r"127\.0\.0\.1:(\d+)/", line):
                    port = int(match[1])
                    break
            assert port is not None
            try:
                time.sleep(given.settle_secs)
                answers = asyncio.run(drive(port, given.secs, given.rate, min(limit, given.longest), given.seed, state))
            finally:
                child.terminate()
                sys.stderr.write(child.stderr.read())
    return answers, state


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the encoder")
    parser.add_argument("--artifact", type=Path, required=True, help="the encoder, built with bounds of b and n")
    parser.add_argument("--db", required=True, help="database of records")
    parser.add_argument("--secs", type=float, default=3600.0)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--improve-secs", type=float, default=300.0)
    parser.add_argument("--settle-secs", type=float, default=20.0, help="seconds before the first request")
    parser.add_argument("--p99-ms", type=float, default=200.0)
    parser.add_argument("--longest", type=int, default=256, help="longest text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="name of the page of results")
    given = parser.parse_args()
    measured = environment()
    answers, state = measure(given)
    rows = summary(answers, given.secs)
    last = {} if state.last is None else state.last
    end = f"{len(answers)} requests, all answered; {last.get('rounds')} rounds, {last.get('swaps')} swaps, {last.get('returns')} undone."
    if given.out is None:
        print("\n".join([*rows, "", end]))
        return
    intro = (
        f"{given.secs:g} s of traffic at {given.rate:g} requests per second. Times are relative to the median of requests of the same "
        "length (to a power of two) in the same part, with the same artifact while the server does not tune."
    )
    shown = f"![Times of requests over the time]({given.out}.svg)"
    page = ["# Traffic whose lengths shift", "", intro, "", shown, "", *rows, "", end]
    write_page(given.out, page, {"answers": [asdict(a) for a in answers], "state": last}, measured)
    (RESULTS / f"{given.out}.svg").write_text(picture(answers, given.secs))


if __name__ == "__main__":
    main()
