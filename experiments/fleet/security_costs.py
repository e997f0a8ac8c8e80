"""Cost of the sandbox of device processes: measuring, tuning and building with and without it, in turns.

    python -m experiments.fleet.security_costs --secs 100 --target c --target opencl

A pair is the same work twice, with Landlock and without, in an order that changes from pair to pair. Parts: `start` opens a
device process; `measure` measures 24 candidates in one that is open; `kernel` is the time that these report; `tune` is a whole job on
a two-layer network, `build` a build from its records with the self-test. The ratio of a part is the median over pairs. Writes
`results/security_costs.md` and `.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.tuner.job.job_processes import small_model
from tests.tuner.measure.measure_programs import request

import relax_tune as rt
from experiments.harness.pages import environment, write_page
from relax_tune.tuner.measure.device_process.sandbox import landlock_version
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.measure.process import DeviceProcess

PLACE = "relax_tune.tuner.measure.local.DeviceProcess"
CANDIDATES = 24
TRIALS = 8
Found = dict[str, float]


def bare(*given: object) -> DeviceProcess:
    """Start a process from the arguments of `LocalRunner`, whose last one asks for confinement."""
    *others, _ = given
    return DeviceProcess(*others, False)  # type: ignore[arg-type]


def held(confined: bool) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if confined else mock.patch(PLACE, bare)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(target: str, confined: bool) -> Found:
    """Seconds of opening a process, of a batch in it, and the median seconds of its kernels."""
    with held(confined):
        began = time.perf_counter()
        with LocalRunner(target, lock=False) as runner:
            opened = time.perf_counter()
            assert bool(runner.sandbox) == confined
            kinds = ("good", "also-good")
            batch = [request(kinds[at % 2], target, id=str(at)) for at in range(CANDIDATES)]
            results = runner.submit(batch).result(120)
            ended = time.perf_counter()
    samples = [secs for result in results for timing in result.timings for secs in timing.samples_secs]
    return {"start": opened - began, "measure": ended - opened, "kernel": statistics.median(samples)}


def tune(target: str, folder: Path) -> dict[str, Any]:
    """Tune a two-layer network into a new database; return the arguments of its build."""
    given = {"target": target, "effort": "quick", "db": f"sqlite:///{folder}/records.db", "bounds": {"n": (1, 64)}}
    model = small_model(folder)
    rt.tune(model, trials=TRIALS, seed=0, **given)
    return {"model": model, **given}


def tuning(target: str, confined: bool) -> Found:
    """Seconds of a tuning job."""
    with tempfile.TemporaryDirectory() as folder, held(confined):
        return {"tune": timed(partial(tune, target, Path(folder)))}


def building(given: dict[str, Any], confined: bool) -> Found:
    """Seconds of a build from records, with its self-test."""
    with held(confined):
        return {"build": timed(partial(rt.build, **given))}


def pairs(work: Callable[[bool], Found], secs: float) -> Iterator[tuple[Found, Found]]:
    """Yield the times of the work with and without the sandbox, in turns, for some seconds; at least three times."""
    until, first, count = time.perf_counter() + secs, True, 0
    while count < 3 or time.perf_counter() < until:
        found = {confined: work(confined) for confined in (first, not first)}
        yield found[True], found[False]
        first, count = not first, count + 1


def summary(found: list[tuple[Found, Found]]) -> dict[str, dict[str, float]]:
    rows = {}
    for part in found[0][0]:
        ratios = [a[part] / b[part] for a, b in found]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows[part] = {
            "held_secs": statistics.median(a[part] for a, _ in found),
            "bare_secs": statistics.median(b[part] for _, b in found),
            "ratio": statistics.median(ratios), "quarter": low, "three_quarters": high, "pairs": len(found),
        }  # fmt: skip
    return rows


def page(rows: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    lines = [
        "# Cost of the sandbox",
        "",
        "Written by `experiments/fleet/security_costs.py`, which describes the comparison: the same work in device processes with Landlock",
        "and without, in turns. Ratios are medians over pairs, with their quartiles.\n",
        "| target | part | with, ms | without, ms | ratio | quartiles | pairs |",
        "|---|---|---|---|---|---|---|",
    ]
    for target, parts in rows.items():
        for part, r in parts.items():
            digits = 4 if part == "kernel" else 0
            lines.append(
                f"| {target} | {part} | {r['held_secs'] * 1e3:.{digits}f} | {r['bare_secs'] * 1e3:.{digits}f} | {r['ratio']:.3f} "
                f"| {r['quarter']:.3f} to {r['three_quarters']:.3f} | {r['pairs']} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--secs", type=float, default=100.0, help="for all parts together")
    parser.add_argument("--target", action="append", choices=["c", "opencl"])
    options = parser.parse_args()
    targets = options.target or ["c", "opencl"]
    facts = {**environment(), "landlock": str(landlock_version())}
    share, rows = options.secs / (3 * len(targets)), {}
    for target in targets:
        measure(target, True)  # compilers and drivers from the disk
        rows[target] = {
            **summary(list(pairs(partial(measure, target), share))),
            **summary(list(pairs(partial(tuning, target), share))),
        }
        with tempfile.TemporaryDirectory() as folder:
            given = tune(target, Path(folder))
            rt.build(**given)  # what it compiles is kept
            rows[target] |= summary(list(pairs(partial(building, given), share)))
        print(json.dumps(rows[target], indent=1), flush=True)
    write_page("security_costs", page(rows), {"rows": rows, "environment": facts}, facts)


if __name__ == "__main__":
    main()
