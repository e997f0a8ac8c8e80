"""Compare what a plan dispatches in each bucket with the library alone, in interleaved pairs.

A bucket is a range of sizes that dispatches one variant; it is timed at its geometric middle. Every round gives one ratio: the median
of a visit to the built model over the median of a visit to a build that only calls the library (same records, same runtime). The
library against itself shows the noise. The bound is the 95th percentile of the median of resampled ratios (bootstrap).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.dynamic.tuning import Work, intervals
from experiments.harness.contenders import Contender, visits

KERNELS = ("mikpoly", "dietcode_dense", "dietcode_nt", "dietcode_nn", "dense_gelu_512x768x3072")
OURS, LIBRARY, AGAIN = "ours", "library", "library again"
ALLOWED = 1.03
PAIRS = 30
BUCKETS = 3
RESAMPLES = 10_000
Interval = tuple[int, int, str]


def middles(found: Sequence[Interval], count: int) -> list[tuple[int, Interval]]:
    """Up to `count` intervals, the widest on a log scale, each with the size in its geometric middle."""
    widest = sorted(found, key=lambda i: (-math.log((i[1] + 1) / i[0]), i))[:count]
    return [(round(math.sqrt(low * high)), (low, high, label)) for low, high, label in sorted(widest)]


def pairs(own: Sequence[Sequence[float]], rival: Sequence[Sequence[float]]) -> list[float]:
    """Of each round, the ratio of the medians of two visits."""
    return [statistics.median(a) / statistics.median(b) for a, b in zip(own, rival, strict=True)]


def upper_bound(ratios: Sequence[float], share: float = 0.95) -> float:
    """The bootstrap's upper bound of the median."""
    drawn = np.random.default_rng(0).choice(np.asarray(ratios), (RESAMPLES, len(ratios)))
    return float(np.quantile(np.median(drawn, axis=1), share))


def measured(work: Work, kernels: Sequence[str], buckets: int, rounds: int, repeats: int) -> dict[str, Any]:
    """A row for every bucket that is timed."""
    chosen: dict[str, tuple[Interval, int]] = {}
    for name in kernels:
        work.tune(name)
        (top,) = work.kernel(name).dims.values()
        found = intervals(work.builds("ours") / f"{name}.rta", top)
        chosen |= {f"{name} n={m}": (interval, len(found)) for m, interval in middles(found, buckets)}
    serve = [sys.executable, "-m", "experiments.kernels.tuned_kernels", "serve", work.target]
    folders = {OURS: "ours", LIBRARY: "library", AGAIN: "library"}
    contenders = [Contender(n, [*serve, str(work.builds(of))]) for n, of in folders.items()]
    try:
        found_visits = visits(contenders, list(chosen), rounds, repeats, visit_secs=0.1)
    finally:
        for c in contenders:
            c.close()
    work.keep("buckets", found_visits)
    rows = {}
    for case, by in found_visits.items():
        if any(len(by.get(n, ())) != rounds for n in folders):
            continue
        (low, high, label), count = chosen[case]
        rows[case] = {"low": low, "high": high, "label": label, "buckets": count, "pairs": rounds}
        for key, name in (("ours", OURS), ("again", AGAIN)):
            ratios = pairs(by[name], by[LIBRARY])
            rows[case] |= {f"{key}_ratio": statistics.median(ratios), f"{key}_bound": upper_bound(ratios)}
    return {"rows": rows, "lacking": sorted(set(chosen) - set(rows))}


def lines(found: Mapping[str, Any]) -> list[str]:
    """As Markdown."""
    text = [
        "| kernel, size | bucket | dispatched | built / library | 95 % upper bound | library again / library | its bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, r in found["rows"].items():
        text.append(
            f"| {case} | {r['low']}..{r['high']} (of {r['buckets']}) | {r['label']} | {r['ours_ratio']:.3f} | {r['ours_bound']:.3f} "
            f"| {r['again_ratio']:.3f} | {r['again_bound']:.3f} |"
        )
    over = [c for c, r in found["rows"].items() if r["ours_bound"] > ALLOWED]
    text += [
        "",
        f"{len(found['rows'])} buckets, {len(over)} with a bound above {ALLOWED}: {', '.join(over) or 'none'}.",
    ]
    if found["lacking"]:
        text.append(f"Not timed by all: {', '.join(found['lacking'])}.")
    return text
