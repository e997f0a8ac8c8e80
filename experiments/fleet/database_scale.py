"""Ten million records in SQLite and PostgreSQL: size, statistics, warm start, queries of a task, check, export of new records.

`python -m experiments.fleet.database_scale [--count 10000000] [--engine sqlite|postgres] [--check]` (`make test-scale`) creates the
databases and the server, and prints a table. It fails if a record takes more than 400 bytes, statistics more than 2 s, a warm start
more than 1 s, or a check more than 200 MB.

A workload has 2048 records: 256 variants of real sketches at 8 shapes, of 3 to 60 samples; one in ten failed. Half are of one
target, half of nine others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, text
from tests.support import postgres
from tests.support.tuner_models import PAPER_DEVICE, QUICK

from relax_tune.database.exchange.jsonl import export_lines
from relax_tune.database.records import Measurement, Target, VariantRecord, Workload, canonical_json
from relax_tune.database.sql.codec import pack_id, text_key
from relax_tune.database.sql_store import SqlStore
from relax_tune.database.store import MemoryStore, open_store
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.task.variants import TaskVariants

SHAPES = (1, 3, 8, 17, 64, 100, 200, 256)
VARIANTS, OTHERS, SKETCHES, POOLS = 256, 9, 4, 16
SAMPLES, SHARES = (3, 5, 20, 60), (0.1, 0.1, 0.4, 0.4)
NEWEST = 1.79e9
TALLY = ("task", "place", "kind", "stage", "regime", "checked")
LIMITS = {"bytes a record": 400, "stats, s": 2.0, "warm start, s": 1.0, "check, MB": 200}


@dataclass(frozen=True)
class Made:
    """A workload and variants of it."""

    workload: Workload
    variants: tuple[VariantRecord, ...]


def product(inner: int, outer: int) -> TaskVariants:
    """The task of (n, inner) by (inner, outer)."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 256)
    module = g.finish(g.call(Matmul(), g.input("x", (n, inner)), g.constant("w", np.zeros((inner, outer), np.float32))))
    return next(iter(device_job(module, PAPER_DEVICE, MemoryStore(), QUICK).task_variants.values()))


def workloads(count: int) -> Iterator[Made]:
    """Yield products of different sizes with real texts, keys and sketches. The number makes the variants of each workload distinct."""
    inner, outer = 1009, 512
    base = product(inner, outer)
    rng = np.random.default_rng(0)
    pools = [drawn(base, rng) for _ in range(POOLS)]
    for number in range(count):
        text_ = re.sub(rf"\b{inner}\b", str(64 + number), base.task.text)
        key = workload_key(parse_prim_func(text_))
        variants = tuple(
            VariantRecord("tuned", sketch, trace, canonical_json({**values, "W": number}))
            for sketch, trace, values in pools[number % POOLS]
        )
        yield Made(Workload(key, text_, 1, f"matmul_{64 + number}"), variants)


def drawn(base: TaskVariants, rng: np.random.Generator) -> list[tuple[str, str, dict[str, Any]]]:
    """Draw sketches, traces and values of variants; a number makes variants of small spaces distinct."""
    sketches = range(min(SKETCHES, len(base.sketch_set.sketches)))
    found: dict[str, tuple[str, str, dict[str, Any]]] = {}
    repeat = 0
    while len(found) < VARIANTS:
        codes = base.sketch_set.space.sample(rng, 2 * VARIANTS)
        for c in base.sketch_set.space.candidates(codes[np.isin(codes[:, 0], list(sketches))]):
            made = base.sketch_set.record_of(c)
            values = {**made.values, "X": repeat}
            found[canonical_json([made.sketch, made.trace, values])] = (made.sketch, made.trace, values)
        repeat += 1
    return list(found.values())[:VARIANTS]


class Filler:
    """Writes rows of the newest schema in bulk, with all indexes and tallies in place."""

    def __init__(self, store: SqlStore) -> None:
        self.connection: Connection = store._engine.connect()
        self.postgres = self.connection.dialect.name == "postgresql"
        if not self.postgres:
            self.raw: Any = self.connection.connection.cursor()
            self.raw.execute("PRAGMA cache_size=-2000000")
            self.raw.execute("PRAGMA synchronous=OFF")
        else:
            self.raw = self.connection.connection.cursor()
        self.next = Counter[str]()
        self.known: dict[tuple[str, bytes], int] = {}

    def put(self, table: str, columns: str, rows: list[tuple[Any, ...]]) -> None:
        """Insert rows."""
        if not rows:
            return
        if self.postgres:
            with self.raw.copy(f"COPY {table} ({columns}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
        else:
            self.raw.executemany(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(rows[0]))})", rows)

    def number(self, table: str, columns: str, key: bytes, *values: Any) -> int:
        """Return the number of a shared row, which is inserted once."""
        if (table, key) not in self.known:
            self.next[table] += 1
            self.known[table, key] = self.next[table]
            self.put(table, f"number, key, {columns}", [(self.next[table], key, *values)])
        return self.known[table, key]

    def begin(self) -> None:
        """Begin a transaction."""
        if not self.postgres:
            self.raw.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Commit it."""
        if self.postgres:
            self.connection.connection.commit()
        else:
            self.raw.execute("COMMIT")

    def close(self) -> None:
        """Set the engine's sequences after the inserted numbers, and update its statistics."""
        if self.postgres:
            for table, last in [*self.next.items()]:
                self.raw.execute(f"ALTER TABLE {table} ALTER COLUMN number RESTART WITH {last + 1}")
            self.connection.connection.commit()
            self.raw.execute("ANALYZE")
            self.connection.connection.commit()
        else:
            self.raw.execute("ANALYZE")
            self.raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self.raw.execute("PRAGMA cache_size=-2000")
        self.connection.close()


def fill(store: SqlStore, count: int) -> Target:
    """Fill a database unless it is; return the target of half of the records."""
    mine = Target(PAPER_DEVICE.kind, PAPER_DEVICE.name, PAPER_DEVICE.fingerprint, PAPER_DEVICE.limits)
    if store.target(mine.key) is not None:
        return mine
    others = [Target("c", f"other-{i}", (("compiler", str(i)),), PAPER_DEVICE.limits) for i in range(OTHERS)]
    for target in (mine, *others):
        store.add_target(target)
    per_task = VARIANTS * len(SHAPES)
    own = max(1, count // per_task // 2)
    elsewhere = max(1, (count // per_task - own) // OTHERS)
    filler = Filler(store)
    rng = np.random.default_rng(1)
    for number, made in enumerate(workloads(own)):
        filler.begin()
        row = (made.workload.key, made.workload.text, 1, made.workload.hint)
        filler.put("workloads", "key, text, format_version, hint", [row])
        numbers = variant_numbers(filler, made)
        measured = [(mine, 0), *((t, i + 1) for i, t in enumerate(others))] if number < elsewhere else [(mine, 0)]
        for target, which in measured:
            fill_task(filler, target, which, made, numbers, number, rng)
        filler.commit()
        if number % 200 == 0:
            print(f"  {number} of {own} workloads", file=sys.stderr, flush=True)
    filler.close()
    return mine


def variant_numbers(filler: Filler, made: Made) -> list[int]:
    """Insert the variants of a workload; variants of earlier workloads are shared."""
    found, rows = [], []
    for v in made.variants:
        key = bytes.fromhex(v.key)
        if ("variants", key) not in filler.known:
            trace = filler.number(
                "traces", "kind, sketch, trace", text_key(v.kind, v.sketch, v.trace), 0, v.sketch, v.trace
            )
            filler.next["variants"] += 1
            filler.known["variants", key] = filler.next["variants"]
            rows.append((filler.next["variants"], key, trace, v.parameters))
        found.append(filler.known["variants", key])
    filler.put("variants", "number, key, trace, parameters", rows)
    return found


def fill_task(
    filler: Filler, target: Target, which: int, made: Made, numbers: list[int], number: int, rng: np.random.Generator
) -> None:
    """Insert the measurements of a workload on a target, and their tallies."""
    filler.next["tasks"] += 1
    task = filler.next["tasks"]
    filler.put("tasks", "number, target, workload", [(task, target.key, made.workload.key)])
    job, host = f"job-{which}-{number // 8}", f"host-{which}-{number % 20}"
    told = (job, "", f"{host}/c", host, f"{host}-processor")
    place = filler.number("places", "job, environment, worker, host, unit", text_key(*told), *told)
    points = []
    for n in SHAPES:
        symbols = canonical_json({"s0": n})
        points.append(filler.number("points", "symbols", text_key(symbols), symbols))
    rows, tallies, last = [], Counter[tuple[Any, ...]](), dict[tuple[Any, ...], float]()
    total = len(numbers) * len(SHAPES)
    sizes = rng.choice(SAMPLES, total, p=SHARES)
    failed = rng.random(total) < 0.1
    times = (rng.lognormal(-9, 1, total)[:, None] * rng.normal(1, 0.02, (total, max(SAMPLES)))).clip(1e-9)
    times = times.astype("<f4")
    newest = NEWEST - 86400.0 * (number % 365)
    for index in range(total):
        variant, spot = divmod(index, len(SHAPES))
        digest = hashlib.blake2b(f"{task}:{variant}".encode(), digest_size=16).hexdigest()
        id = pack_id(f"{digest}.{spot}")
        stage, message, samples = 0, 0, b"f" + times[index, : sizes[index]].tobytes()
        if failed[index]:
            words = f"compile: error {index % 37}: the kernel of workload {number % 50} takes too many registers"
            stage, samples = 2, b""
            message = filler.number("messages", "text", text_key(words), words)
        rows.append(
            (id, newest - index * 0.25, 0.3 + index / 7e3, 3600.0, 51.5, task, points[spot], numbers[variant], place,
             message, 0, stage, 0, not failed[index], samples)
        )  # fmt: skip
        key = task, place, 0, stage, 0, not failed[index]
        tallies[key] += 1
        last.setdefault(key, newest - index * 0.25)  # times fall
    columns = "id, measured_at, build_secs, clock_mhz, celsius, task, point, variant, place, message, kind, stage, regime, checked, samples"
    filler.put("measurements", columns, [tuple(bool(x) if type(x) is np.bool_ else x for x in r) for r in rows])
    counted = [(*key, count, last[key]) for key, count in tallies.items()]
    filler.put("tallies", ", ".join((*TALLY, "count", "last")), [tuple(map(_plain, r)) for r in counted])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def timed(work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def size_of(store: SqlStore, folder: Path) -> int:
    """Bytes on disk, indexes included."""
    if store._path is not None:
        return sum(f.stat().st_size for f in folder.glob("scale.db*"))
    with store._engine.connect() as connection:
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())


def ask(url: str, mine: Target, folder: Path) -> dict[str, float]:
    """Run the queries of tuning, building and `db`."""
    found: dict[str, float] = {}
    task = product(96, 160)
    found["open, s"] = timed(lambda: open_store(url, read_only=True).close())
    with open_store(url) as store:
        assert isinstance(store, SqlStore)
        total = sum(s.measurements for t in store.targets() if (s := store.stats(t.key)) is not None)
        found["records"] = total
        found["bytes a record"] = size_of(store, folder) / total
        found["stats, s"] = timed(lambda: [store.stats(t.key) for t in store.targets()])
        found["units, s"] = timed(lambda: store.units(mine.key))
        key = store.measured(mine.key)[7]
        found["count of a task, s"] = timed(lambda: store.count(mine.key, key))
        found["2048 records of a task, s"] = timed(lambda: store.query(mine.key, key))
        found["top 3 at a point, s"] = timed(lambda: store.top(key, mine.key, {"s0": 64}, 3))
        found["warm start, s"] = timed(lambda: RecordedHistory(store, mine.key, {task.task.key}).rows(task.sketch_set))
        found["rows of a warm start"] = len(
            RecordedHistory(store, mine.key, {task.task.key}).rows(task.sketch_set).log_time
        )  # type: ignore[union-attr]
        found["commit of 50, s"] = timed(commits(store, mine, key))
        since = NEWEST - 86400.0
        lines: list[str] = []
        found["export of the last day, s"] = timed(lambda: lines.extend(export_lines(store, [mine.key], since)), 1)
        found["records of the last day"] = sum('"record":"measurement"' in line for line in lines)
    return found


def check(url: str) -> dict[str, float]:
    """Check a database in a separate process, to measure its memory."""
    code = (
        "import time; from pathlib import Path; from relax_tune.database.store import open_store\n"
        f"store = open_store({url!r}, read_only=True); start = time.perf_counter(); got = store.check()\n"
        "assert not got, got[:3]\n"
        "secs, status = time.perf_counter() - start, Path('/proc/self/status').read_text()\n"  # getrusage tells the parent's peak too
        "print(secs, int(status.split('VmHWM:')[1].split()[0]) / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    secs, megabytes = map(float, done.stdout.split())
    return {"check, s": secs, "check, MB": megabytes}


def commits(store: SqlStore, target: Target, workload: str) -> Callable[[], object]:
    """A commit of 50 new records each time."""
    known = store.query(target.key, workload, status="ok", limit=50)
    count = iter(range(1_000_000))

    def commit() -> object:
        run = next(count)
        return store.add_measurements(
            [
                Measurement(
                    f"scale-{time.time_ns()}-{run}-{i}", m.workload, m.target, m.variant, m.symbols,
                    samples_secs=m.samples_secs, checked=True, job="scale",
                )
                for i, m in enumerate(known)
            ]
        )  # fmt: skip

    return commit


def keep(results: dict[str, dict[str, float]], out: Path | None) -> None:
    """Write the present results."""
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000_000)
    parser.add_argument("--engine", choices=("sqlite", "postgres"), action="append")
    parser.add_argument("--check", action="store_true", help="also run `db check`, for minutes")
    parser.add_argument(
        "--url", help="a PostgreSQL database to fill, or to ask if it is full, instead of one of a new server"
    )
    parser.add_argument("--folder", type=Path, help="where the SQLite file is made and kept")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    urls: dict[str, str] = {}
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for engine in options.engine or ("sqlite", "postgres"):
            url = f"sqlite:///{folder / 'scale.db'}"
            if engine == "postgres" and options.url is not None:
                url = options.url
            elif engine == "postgres":
                settings = ("shared_buffers=1GB", "max_wal_size=8GB", "synchronous_commit=off")
                url = stack.enter_context(postgres.server(*settings)) + "postgres"
            start = time.perf_counter()
            with open_store(url) as store:
                assert isinstance(store, SqlStore)
                mine = fill(store, options.count)
            filled = time.perf_counter() - start
            urls[engine] = url
            results[engine] = {**ask(url, mine, folder), "filled in bulk, s": filled}
            print(engine, json.dumps(results[engine]), flush=True)
            keep(results, options.out)
        for engine, url in urls.items() if options.check else ():
            results[engine] |= check(url)
            keep(results, options.out)
    print(f"Python {platform.python_version()}, {options.count} records")
    print(f"{'':34}" + "".join(f"{name:>14}" for name in results))
    for name in next(iter(results.values())):
        print(f"{name:34}" + "".join(f"{found[name]:14,.3f}" for found in results.values()))
    bad = [
        f"{e}: {n} is {f[n]:.3g}, above {m}" for e, f in results.items() for n, m in LIMITS.items() if f.get(n, 0) > m
    ]
    sys.exit("\n".join(bad) or None)


if __name__ == "__main__":
    main()
