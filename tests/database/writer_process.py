"""A process of its own that writes records and races for leases; prints a JSON line of what it did.

`python writer_process.py URL NAME COUNT TASKS`: COUNT measurements in batches, alternating between the two targets, each
also named by its content; then one try at each of TASKS leases.
"""

from __future__ import annotations

import json
import sys

from relax_tune.database.records import Measurement, Target, VariantRecord, Workload
from relax_tune.database.store import open_store


def main() -> None:
    url, name, count, tasks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    targets = [Target("c", "one"), Target("c", "two")]
    with open_store(url) as store:
        for target in targets:
            store.add_target(target)
        for task in range(tasks):
            store.add_workload(Workload(f"w{task}", f"workload {task}", 1))
        sys.stdin.readline()  # everybody starts together
        made = [
            Measurement(
                f"{name}-{i}",
                f"w{i % tasks}",
                targets[i % 2].key,
                VariantRecord("tuned", "s", "[]", json.dumps({"tile": i % 17})),
                {"n": i},
                samples_secs=(float(i + 1), float(ord(name[0]))),
                checked=True,
                job=name,
            )
            for i in range(count)
        ]
        shared = [
            Measurement("shared-0", "w0", targets[0].key, VariantRecord("generic"), {"n": 1}, samples_secs=(1.0,))
        ]
        added = 0
        for start in range(0, count, 7):
            added += store.add_measurements([*made[start : start + 7], *shared])
        won = [
            task for task in range(tasks) if store.acquire_lease(f"w{task}", targets[0].key, name, secs=5.0) is not None
        ]
    print(json.dumps({"added": added, "won": won}))


if __name__ == "__main__":
    main()
