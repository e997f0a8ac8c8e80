"""Processes that write one database at once lose nothing, mix nothing, and share no lease."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_tune.database.records import Target
from relax_tune.database.store import open_store

pytestmark = pytest.mark.process

WRITER = Path(__file__).with_name("writer_process.py")
COUNT, TASKS = 140, 12


def test_two_processes_lose_nothing_and_mix_nothing(sql_url: str) -> None:
    names = ["a", "b"]
    running = [
        subprocess.Popen(
            [sys.executable, str(WRITER), sql_url, name, str(COUNT), str(TASKS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = []
    for process in running:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        answers.append(json.loads(out))
    assert sum(answer["added"] for answer in answers) == 2 * COUNT + 1, "the shared record is new exactly once"
    leased = sorted(task for answer in answers for task in answer["won"])
    assert leased == list(range(TASKS)), "each task is leased to exactly one process"
    targets = [Target("c", "one"), Target("c", "two")]
    with open_store(sql_url) as store:
        assert store.check() == []
        seen = {}
        for which, target in enumerate(targets):
            for workload in store.workloads(target.key):
                for measurement in store.query(target.key, workload.key):
                    seen[measurement.id] = measurement
                    if measurement.id == "shared-0":
                        continue
                    name, number = measurement.id.split("-")
                    i = int(number)
                    assert i % 2 == which and measurement.workload == f"w{i % TASKS}"
                    assert measurement.samples_secs == (i + 1.0, float(ord(name)))
                    assert measurement.variant.values == {"tile": i % 17} and measurement.symbols == {"n": i}
                    assert measurement.job == name
        assert set(seen) == {"shared-0"} | {f"{name}-{i}" for name in names for i in range(COUNT)}
        for task, holders in enumerate([[n for n, a in zip(names, answers) if t in a["won"]] for t in range(TASKS)]):
            lease = store.lease(f"w{task}", targets[0].key)
            assert lease is not None and [lease.holder] == holders


def test_a_killed_writer_leaves_whole_batches(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    code = (
        "from relax_tune.database.records import *\n"
        "from relax_tune.database.store import open_store\n"
        f"store = open_store({url!r})\n"
        "store.add_target(Target('c', 'one')); store.add_workload(Workload('w', 'text', 1))\n"
        "key = Target('c', 'one').key\n"
        "for batch in range(10**6):\n"
        "    store.add_measurements(Measurement(f'{batch}-{i}', 'w', key, VariantRecord('tuned'), samples_secs=(1.0,))\n"
        "        for i in range(50))\n"
        "    print(batch, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    promised = 0
    while promised < 5:
        promised = int(process.stdout.readline())
    process.kill()
    process.wait()
    with open_store(url) as store:
        assert store.check() == []
        count = store.count(Target("c", "one").key)
        assert count >= 50 * (promised + 1) and count % 50 == 0
