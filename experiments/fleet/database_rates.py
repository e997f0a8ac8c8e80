"""Rates of commits and queries of the store: bulk and one-by-one commits, plan look-up, best record, all records of a task.

Runs on a temporary SQLite file, in memory, and on PostgreSQL if `--url` names an empty database. Medians of repeats.
Goal: at least 10,000 committed measurements per second in bulk.

    python -m experiments.fleet.database_rates [--count N] [--repeats N] [--url postgresql://...]
"""

from __future__ import annotations

import argparse
import json
import platform
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from relax_tune.database.records import Measurement, Target, VariantRecord, Workload
from relax_tune.database.store import Store, open_store

TASKS = 20


def make(target: Target, count: int, prefix: str) -> list[Measurement]:
    """`count` records of realistic size: a trace of about 1 kB, five samples, spread over 20 tasks and 6 shapes."""
    trace = json.dumps([["split", {"loop": f"i{step}", "factor": f"T{step}"}] for step in range(22)])
    variants = [
        VariantRecord("tuned", f"tiles-{i % 7}", trace, json.dumps({"T0": i, "T1": i % 13}))
        for i in range(count // 6 + 1)
    ]
    return [
        Measurement(
            f"{prefix}-{i}",
            f"w{(i // 6) % TASKS}",
            target.key,
            variants[i // 6],
            {"n": 2 ** (i % 6)},
            samples_secs=tuple(1e-4 + i * 1e-9 + k * 1e-6 for k in range(5)),
            checked=True,
        )
        for i in range(count)
    ]


def rate(work: Callable[[int], int], repeats: int) -> float:
    """Median things a second of `work(repeat)`, which returns how many it did."""
    rates = []
    for repeat in range(repeats):
        start = time.perf_counter()
        done = work(repeat)
        rates.append(done / (time.perf_counter() - start))
    return statistics.median(rates)


def measure(store: Store, count: int, repeats: int) -> dict[str, float]:
    """Name -> things a second."""
    target = Target("c", "experiment", (("run", str(time.time_ns())),))
    store.add_target(target)
    for task in range(TASKS):
        store.add_workload(Workload(f"w{task}", f"workload {task}", 1))
        store.put_plans(target.key, {f"w{task}": json.dumps([["n <= 64", "v1"], ["true", "v2"]] * 4)})
    tag = target.key[:8]
    bulk = [make(target, count, f"{tag}-bulk{repeat}") for repeat in range(repeats)]
    batches = [make(target, 2000, f"{tag}-fifty{repeat}") for repeat in range(repeats)]
    single = [make(target, 200, f"{tag}-one{repeat}") for repeat in range(repeats)]

    def in_batches(records: list[Measurement], size: int) -> int:
        return sum(store.add_measurements(records[i : i + size]) for i in range(0, len(records), size))

    def plans(_: int) -> int:
        for i in range(300):
            assert store.plan(f"w{i % TASKS}", target.key) is not None
        return 300

    def best(_: int) -> int:
        for i in range(60):
            assert store.best(f"w{i % TASKS}", target.key, {"n": 8}) is not None
        return 60

    return {
        "commits in bulk, measurements/s": rate(lambda repeat: in_batches(bulk[repeat], count), repeats),
        "commits of 50, measurements/s": rate(lambda repeat: in_batches(batches[repeat], 50), repeats),
        "commits of 1, measurements/s": rate(lambda repeat: in_batches(single[repeat], 1), repeats),
        "bulk again (no-op), measurements/s": rate(lambda repeat: count + in_batches(bulk[repeat], count), repeats),
        "plan look-ups/s": rate(plans, repeats),
        f"best at a point, of {store.count(target.key) // TASKS} a task, /s": rate(best, repeats),
        "reading a task, measurements/s": rate(lambda _: len(store.query(target.key, "w0")), repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="measurements in a bulk commit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--url", help="another database to measure")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {options.count} measurements in bulk")
    with tempfile.TemporaryDirectory() as folder:
        urls = [f"sqlite:///{Path(folder) / 'records.db'}", "memory://", *([options.url] if options.url else [])]
        results = {}
        for url in urls:
            with open_store(url) as store:
                results[url.partition(":")[0]] = measure(store, options.count, options.repeats)
    names = list(results)
    print(f"{'':52}" + "".join(f"{name:>14}" for name in names))
    rows = [list(found.items()) for found in results.values()]
    for cells in zip(*rows):
        print(f"{cells[0][0]:52}" + "".join(f"{value:14,.0f}" for _, value in cells))


if __name__ == "__main__":
    main()
