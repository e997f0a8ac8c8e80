"""Regret of the symbolic build against an oracle that is tuned for each size, and the noise of this comparison.

Sizes are drawn log-uniformly, one from each of several equal parts of the range's logarithm (none where all sizes of a part were timed
during tuning), so that all sizes weigh the same. The oracle gets as many trials for one size as the range got in total. The symbolic
build, the oracle, and the oracle in a second process are timed in turns in one run. The odd rounds choose the faster of the first two,
and the even rounds score the symbolic build against it. So neither lucky samples nor a bad search of the oracle change the result. The
second process of the oracle in place of the symbolic build gives the noise floor. `losses.py` explains sizes that lose more than 3 %.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from experiments.dynamic.losses import TOLERATED, reasons
from experiments.dynamic.tuning import Work, by_size
from experiments.harness.contenders import Contender, visits

KERNELS = ("range_matmul", "range_softmax", "range_layer_norm")
SIZES = 8
SYMBOLIC, ORACLE, AGAIN = "symbolic", "oracle", "oracle again"
Rounds = Sequence[Sequence[float]]
"""Seconds of a contender: what was sampled in each round."""


def drawn(top: int, count: int, known: Collection[int]) -> list[int]:
    """Rising sizes up to `top`, log-uniform in `count` equal parts of the log range, none of the known ones."""
    rng = np.random.default_rng(0)
    found: list[int] = []
    for part in range(count):
        low, high = (top ** ((part + side) / count) for side in (0, 1))
        inside = [m for m in range(math.ceil(low), math.floor(high) + 1) if m not in known and m not in found]
        if inside:
            wanted = math.exp(rng.uniform(math.log(low), math.log(high)))
            found.append(min(inside, key=lambda m: (abs(math.log(m / wanted)), m)))
    return sorted(found)


def halves(rounds: Rounds) -> tuple[float, float]:
    """The medians of all samples of odd rounds, and of even ones. Wants two rounds at least."""
    odd, even = ([s for visit in rounds[first::2] for s in visit] for first in (1, 0))
    return statistics.median(odd), statistics.median(even)


def regret(own: Rounds, rival: Rounds) -> float:
    """How much slower `own` is than the faster of both: chosen by odd rounds, scored by even ones."""
    (own_odd, own_even), (rival_odd, rival_even) = halves(own), halves(rival)
    return 0.0 if own_odd <= rival_odd else own_even / rival_even - 1


def ratio(own: Rounds, rival: Rounds) -> float:
    """Of the medians of all samples."""
    return statistics.median(s for v in own for s in v) / statistics.median(s for v in rival for s in v)


def case_row(by: Mapping[str, Rounds]) -> dict[str, Any]:
    """Return the reported figures of a size."""
    return {
        "us": statistics.median(s for v in by[SYMBOLIC] for s in v) * 1e6,
        "over_oracle": ratio(by[SYMBOLIC], by[ORACLE]),
        "again_over_oracle": ratio(by[AGAIN], by[ORACLE]),
        "regret": regret(by[SYMBOLIC], by[ORACLE]),
        "floor": regret(by[AGAIN], by[ORACLE]),
    }


def summed(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean and 99th percentile over sizes of equal weight; of fewer than 100 the latter is the worst."""
    if not rows:
        raise SystemExit("regret: expected sizes timed by all contenders, got none; see what they said above")
    found = {}
    for what in ("regret", "floor"):
        values = sorted(r[what] for r in rows)
        found |= {f"{what}_mean": statistics.mean(values), f"{what}_p99": values[math.ceil(0.99 * len(values)) - 1]}
    return found


def measured(work: Work, kernels: Sequence[str], count: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Return the rows of every kernel and size, the cost of tuning each, and the sums."""
    tuning: dict[str, Any] = {}
    cases: list[str] = []
    for name in kernels:
        (top,) = work.kernel(name).dims.values()
        symbolic = work.tune(name)
        sizes = drawn(top, count, symbolic.sizes)
        oracles = {m: work.tune(name, m) for m in sizes}
        cases += [f"{name} n={m}" for m in sizes]
        each = statistics.mean(t.timings for t in oracles.values())
        tuning[name] = {
            "top": top,
            "symbolic": asdict(symbolic),
            "oracles": {m: asdict(t) for m, t in oracles.items()},
            "timings_over_oracles": symbolic.timings / sum(t.timings for t in oracles.values()),
            "timings_over_all_sizes": symbolic.timings / (each * top),
            "sizes_for_a_fifth": math.ceil(5 * symbolic.timings / each),
        }
    serve = [sys.executable, "-m", "experiments.kernels.tuned_kernels", "serve", work.target]
    contenders = [
        Contender(SYMBOLIC, [*serve, str(work.builds("ours"))]),
        Contender(ORACLE, [*serve, str(work.builds("oracle"))]),
        Contender(AGAIN, [*serve, str(work.builds("oracle"))]),
    ]
    try:
        found = visits(contenders, cases, rounds, repeats, visit_secs=0.1)
    finally:
        for c in contenders:
            c.close()
    rows = {case: case_row(by) for case, by in found.items() if all(len(by.get(c.name, ())) >= 2 for c in contenders)}
    lacking = sorted(set(cases) - set(rows))
    for name in kernels:
        lost = [int(c.split("n=")[1]) for c, r in rows.items() if c.split()[0] == name and r["regret"] > TOLERATED - 1]
        for size, reason in (reasons(work, name, lost, rounds, repeats) if lost else {}).items():
            rows[f"{name} n={size}"]["why"] = reason
    work.keep("regret", found)
    return {"rows": rows, "lacking": lacking, "sum": summed(list(rows.values())), "tuning": tuning}


def lines(found: Mapping[str, Any]) -> list[str]:
    """As Markdown."""
    text = [
        "| kernel, size | symbolic, us | over its oracle | oracle again over oracle | regret | noise floor | why (best variant alone) |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, row in by_size(found["rows"]):
        text.append(
            f"| {case} | {row['us']:.1f} | {row['over_oracle']:.3f} | {row['again_over_oracle']:.3f} "
            f"| {100 * row['regret']:.1f} % | {100 * row['floor']:.1f} % | {row.get('why', '')} |"
        )
    s = found["sum"]
    text += [
        "",
        f"Mean regret {100 * s['regret_mean']:.1f} % (goal: at most 2 %), worst {100 * s['regret_p99']:.1f} % (10 %). Noise floor, by "
        f"the oracle and its copy: mean {100 * s['floor_mean']:.1f} %, worst {100 * s['floor_p99']:.1f} %.",
    ]
    if found["lacking"]:
        text.append(f"Not timed by all: {', '.join(found['lacking'])}.")
    text += [
        "",
        "| kernel | range | timings, symbolic | timings, oracle, a size | symbolic / oracle at these sizes | at every size of the range "
        "| sizes from which it is a fifth | tuning s, symbolic | oracles |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found["tuning"].items():
        own, others = row["symbolic"], list(row["oracles"].values())
        text.append(
            f"| {name} | 1..{row['top']} | {own['timings']} | {statistics.mean(o['timings'] for o in others):.0f} "
            f"| {row['timings_over_oracles']:.2f} | {row['timings_over_all_sizes']:.5f} | {row['sizes_for_a_fifth']} "
            f"| {own['wall_secs']:.0f} | {sum(o['wall_secs'] for o in others):.0f} |"
        )
    return text
