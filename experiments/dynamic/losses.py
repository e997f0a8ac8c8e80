"""Find out why a symbolic build is slower than an oracle at a size: each candidate variant is built alone and timed there.

`guard`: a variant of the plan is as fast as the oracle, but the guards choose another one. `mistimed`: a variant on record is as fast,
but the plan does not contain it. `missing`: none of the fastest variants at the nearest timed sizes is as fast.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.dynamic.tuning import Work
from experiments.harness.contenders import Contender, visits
from relax_tune.database.records import Measurement
from relax_tune.database.store import open_store
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.settings import Settings

TOLERATED = 1.03
KNOWN = 4
"""Variants on record that are timed for each size beside those of the plan."""
ORACLE = "oracle"


def reasons(work: Work, name: str, sizes: Sequence[int], rounds: int, repeats: int) -> dict[int, str]:
    """Return why each size of a kernel lost, `guard`, `mistimed` or `missing`, with the best variant's time over the oracle's."""
    settings = Settings(target=work.target, trials=work.trials, caches="warm")
    runner = open_runner(settings)
    try:
        info = runner.device_info()
    finally:
        runner.close()
    with open_store(f"sqlite:///{work.folder / 'ranges.db'}") as store:
        job = device_job(work.kernel(name).module(True), info, store, settings)
        (task,) = job.tasks
        records = [r for r in job.records(task.key, task.regime) if r.status == "ok" and r.checked]
        planned = set(job.build().plans[task.name].plan.variants)
        known = planned | {k for size in sizes for k in _fastest_near(records, size)}
        folders: dict[str, Path] = {}
        for number, key in enumerate(sorted(known)):
            refused = {r.variant.key: "not asked" for r in records if r.variant.key != key}
            folders[key] = work.builds(f"alone-{number}")
            folders[key].mkdir(parents=True, exist_ok=True)
            job.artifact(job.build(refused=refused)).save(folders[key] / f"{name}.rta")
    serve = [sys.executable, "-m", "experiments.kernels.tuned_kernels", "serve", work.target]
    contenders = [Contender(k, [*serve, str(folder)]) for k, folder in folders.items()]
    contenders.append(Contender(ORACLE, [*serve, str(work.builds("oracle"))]))
    try:
        found = visits(contenders, [f"{name} n={m}" for m in sizes], rounds, repeats, visit_secs=0.1)
    finally:
        for c in contenders:
            c.close()
    return {m: _reason(found[f"{name} n={m}"], planned) for m in sizes}


def _fastest_near(records: Sequence[Measurement], size: int) -> list[str]:
    """Return the keys of the fastest variants on record at the timed sizes next to one."""
    timed: dict[int, dict[str, list[float]]] = {}
    for r in records:
        for value in dict(r.symbols).values():
            timed.setdefault(value, {}).setdefault(r.variant.key, []).append(r.median_secs)
    below, above = [s for s in timed if s <= size], [s for s in timed if s >= size]
    found: list[str] = []
    for at in {*([max(below)] if below else []), *([min(above)] if above else [])}:
        found += sorted(timed[at], key=lambda k: statistics.median(timed[at][k]))[:KNOWN]
    return found


def _reason(rounds: Mapping[str, Sequence[Sequence[float]]], planned: set[str]) -> str:
    medians = {k: statistics.median(s for visit in by for s in visit) for k, by in rounds.items() if by}
    oracle = medians.pop(ORACLE)
    of_plan = min((t for k, t in medians.items() if k in planned), default=float("inf")) / oracle
    of_all = min(medians.values(), default=float("inf")) / oracle
    kind = "guard" if of_plan <= TOLERATED else "mistimed" if of_all <= TOLERATED else "missing"
    return f"{kind} ({min(of_plan, of_all):.2f})"
