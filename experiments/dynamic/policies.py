"""Table 4: policies that choose kernels over a range of sizes, from one fixed set of kernels that are all timed at all sizes beforehand.

    python -m experiments.dynamic.policies measure [--target c] [--variants 24] [--kernel policy_matmul]     on a quiet machine
    python -m experiments.dynamic.policies          the tables, from results/policy_matrix_TARGET.json.gz

The matrix holds the raw samples of variants x sizes of a product of M rows, in several passes. Samples of a size that were taken one
after the other are normalised together, so that a busy moment favours no variant. A policy sees the odd samples of the sizes that it
requests, and is scored by the even samples at all sizes against the best variant there, so that lucky samples do not count as merit.
Each policy is also scored on random halves of the samples, which shows the effect of the division. Timings are counted as (variant,
size) pairs. The policies:

* powers of two, FlashInfer's buckets, size hints (64, 256, 4096): the best kernel timed at each bucket's upper end serves the bucket.
* Hidet's points: sizes between two points take the kernel that is best at the nearer one. The points are 1, 2, 4, 8, 16 and then
  every multiple of 16 (up to 256), 64 (to 2048) and 256. Hidet's original points are chosen by hand for each model.
* TensorRT-opt: the best kernel at the middle of the range serves the whole range.
* one-timing adaption: every kernel is timed once, at the largest size; elsewhere its time is assumed proportional to its number of tiles.
* ours: anchors, selection and validation as in `relax-tune tune`.
* oracle: the best kernel at each size. Its regret, due to choosing by other samples than the scoring ones, is the noise floor.

Writes results/policies.json and .md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.pages import RESULTS, environment, write_page
from experiments.kernels.zoo import KERNELS
from relax_tune.database.store import MemoryStore, Store
from relax_tune.errors import UserError
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.measure.messages import MeasureRequest, TimingPolicy
from relax_tune.tuner.plan.plans import choose
from relax_tune.tuner.plan.validation import SHAPES, VALIDATIONS
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.allowed_sizes import Range
from relax_tune.tuner.task.check import check_case
from relax_tune.tuner.task.domain import Domain

MATRIX = "policy_matrix_{}.json.gz"
TARGETS = ("c", "opencl", "cuda")
DRAWS = 20
ANCHORS, CHECKED = 6, SHAPES["normal"]


@dataclass(frozen=True)
class Matrix:
    """samples: seconds by variant and size, at least two each. tiles: rows that each variant computes at a time; libraries: those
    that others must beat beyond noise. environment: where and when it was measured."""

    sizes: tuple[int, ...]
    samples: Mapping[str, Mapping[int, Sequence[float]]]
    tiles: Mapping[str, int]
    libraries: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def halves(self, first: int) -> dict[str, dict[int, list[float]]]:
        """Every other sample, from this one."""
        return {k: {m: list(own[m][first::2]) for m in self.sizes} for k, own in self.samples.items()}

    def drawn(self, seed: int) -> Matrix:
        """The same samples in another order, the same one for all variants."""
        (count,) = {len(row) for own in self.samples.values() for row in own.values()}
        order = np.random.default_rng(seed).permutation(count)
        return replace(
            self,
            samples={k: {m: np.asarray(own[m])[order].tolist() for m in self.sizes} for k, own in self.samples.items()},
        )


def load_matrix(path: Path) -> Matrix:
    """Read a matrix. Raises UserError if the file is not one."""
    try:
        found = json.loads(gzip.decompress(path.read_bytes()))
        sizes = tuple(found["sizes"])
        samples = {k: dict(zip(sizes, rows, strict=True)) for k, rows in found["samples"].items()}
        matrix = Matrix(sizes, samples, found["tiles"], tuple(found["libraries"]), found["environment"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path}: expected a matrix of times, got {error!r}; run `policies.py measure`") from None
    short = [(k, m) for k, own in samples.items() for m in sizes if len(own[m]) < 2]
    if short or not samples or list(sizes) != sorted(set(sizes)):
        raise UserError(
            f"{path}: expected two samples at each of rising sizes, got fewer at {short[:3]}; measure it again"
        )
    return matrix


def levelled(matrix: Matrix) -> Matrix:
    """Return a matrix without the effect of a busy machine on all variants at once.

    Samples of a size with one number were taken one after the other; they are divided by the ratio of their geometric mean to its median.
    """
    samples: dict[str, dict[int, list[float]]] = {k: {} for k in matrix.samples}
    for m in matrix.sizes:
        rows = np.log([own[m] for own in matrix.samples.values()])
        mean = rows.mean(axis=0)
        for k, row in zip(matrix.samples, np.exp(rows - mean + np.median(mean)), strict=True):
            samples[k][m] = row.tolist()
    return replace(matrix, samples=samples)


def save_matrix(matrix: Matrix, path: Path) -> None:
    """The same bytes for the same matrix."""
    rows = {k: [list(own[m]) for m in matrix.sizes] for k, own in sorted(matrix.samples.items())}
    found = {
        "environment": dict(matrix.environment),
        "libraries": matrix.libraries,
        "samples": rows,
        "sizes": matrix.sizes,
        "tiles": dict(matrix.tiles),
    }
    path.write_bytes(gzip.compress(json.dumps(found, sort_keys=True).encode(), mtime=0))


# -- the policies -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """The variant at each size, and how many (variant, size) pairs had to be timed to know."""

    chosen: Mapping[int, str]
    timings: int


Seen = Mapping[str, Mapping[int, Sequence[float]]]
"""The samples that a policy chooses by."""


def fastest(seen: Seen, size: int) -> str:
    return min(seen, key=lambda k: (statistics.median(seen[k][size]), k))


def snapped(points: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Points within the sizes, each as the nearest size there is."""
    inside = [p for p in points if sizes[0] <= p <= sizes[-1]]
    return sorted({min(sizes, key=lambda m: (abs(math.log(m / p)), m)) for p in inside} | {sizes[-1]})


def buckets(points: Callable[[int], Sequence[int]]) -> Callable[[Matrix, Seen], Decision]:
    """A policy: the best at the first point from a size on."""

    def decide(matrix: Matrix, seen: Seen) -> Decision:
        ends = snapped(points(matrix.sizes[-1]), matrix.sizes)
        best = {p: fastest(seen, p) for p in ends}
        return Decision({m: best[next(p for p in ends if p >= m)] for m in matrix.sizes}, len(seen) * len(ends))

    return decide


def powers(top: int) -> list[int]:
    return [1 << e for e in range(top.bit_length() + 1)]


def flashinfer(top: int) -> list[int]:
    """Doubling to 256, steps of 256 to 2048, of 512 to 4096, then doubling."""
    doubled = [1 << e for e in range(9)]
    stepped = [*range(512, 2049, 256), *range(2560, 4097, 512)]
    return doubled + stepped + [4096 << e for e in range(1, max(1, top.bit_length()))]


def size_hints(_: int) -> list[int]:
    return [64, 256, 4096]


def hidet_points(top: int) -> list[int]:
    return [1, 2, 4, 8, *range(16, 257, 16), *range(320, 2049, 64), *range(2304, max(top, 2304) + 1, 256)]


def nearest_point(matrix: Matrix, seen: Seen) -> Decision:
    points = snapped(hidet_points(matrix.sizes[-1]), matrix.sizes)
    best = {p: fastest(seen, p) for p in points}
    chosen = {m: best[min(points, key=lambda p: (abs(p - m), p))] for m in matrix.sizes}
    return Decision(chosen, len(seen) * len(points))


def middle(matrix: Matrix, seen: Seen) -> Decision:
    low, high = matrix.sizes[0], matrix.sizes[-1]
    (opt, *_) = snapped([round(math.sqrt(low * high))], matrix.sizes)
    return Decision(dict.fromkeys(matrix.sizes, fastest(seen, opt)), len(seen))


def adapted(matrix: Matrix, seen: Seen) -> Decision:
    top = matrix.sizes[-1]

    def guess(key: str, size: int) -> float:
        tile = matrix.tiles[key]
        return statistics.median(seen[key][top]) * -(-size // tile) / -(-top // tile)

    return Decision({m: min(seen, key=lambda k: (guess(k, m), k)) for m in matrix.sizes}, len(seen))


def ours(matrix: Matrix, seen: Seen) -> Decision:
    """Anchors over the whole range; the plan is looked at between them, and chosen again where it lost there."""
    sizes = matrix.sizes
    anchors = snapped(Range(sizes[0], sizes[-1]).levels(ANCHORS), sizes)
    weight = 1 / len(anchors)
    domain = Domain(tuple((m,) for m in anchors), (weight,) * len(anchors))
    timed = {k: {(("s0", m),): list(own[m]) for m in anchors} for k, own in seen.items()}
    steps = tuple(sorted({t for t in matrix.tiles.values() if t > 1})[:6])
    others = [m for m in snapped([round(m * 1.618) for m in anchors], sizes) if m not in anchors]
    looked: list[int] = []
    while True:
        plan, _ = choose(timed, domain, set(matrix.libraries), steps)
        borders = [m for e in plan.entries for t, _ in e.tests if not t.modulus for m in (t.threshold, t.threshold + 1)]
        borders = [m for m in dict.fromkeys(snapped(borders, sizes)[:-1]) if m not in anchors]
        between = [m for m in others if m not in borders][: max(CHECKED - len(borders), CHECKED - CHECKED // 2)]
        wanted = [m for m in (*between, *borders)][:CHECKED]
        looked += [m for m in wanted if m not in looked][: VALIDATIONS * CHECKED - len(looked)]
        rest = [
            [k for k in timed if k not in plan.variants and (k in matrix.libraries) is kind] for kind in (True, False)
        ]
        contenders = [*plan.variants, *(min(keys, key=lambda k: (over(timed[k], anchors), k)) for keys in rest if keys)]
        lacking = [(k, m) for k in contenders for m in wanted if m in looked and (("s0", m),) not in timed[k]]
        if not lacking:
            return Decision({m: plan.choose((m,)) for m in sizes}, sum(map(len, timed.values())))
        for k, m in lacking:
            timed[k][(("s0", m),)] = list(seen[k][m])


def over(timed: Mapping[Any, Sequence[float]], anchors: Sequence[int]) -> float:
    """The sum of logarithms of a variant's times at the anchors."""
    return sum(math.log(statistics.median(timed[("s0", m),])) for m in anchors)


def oracle(matrix: Matrix, seen: Seen) -> Decision:
    return Decision({m: fastest(seen, m) for m in matrix.sizes}, len(seen) * len(matrix.sizes))


POLICIES: Mapping[str, Callable[[Matrix, Seen], Decision]] = {
    "powers of two": buckets(powers),
    "FlashInfer buckets": buckets(flashinfer),
    "Hidet points": nearest_point,
    "size hints 64, 256, 4096": buckets(size_hints),
    "TensorRT-opt": middle,
    "one-timing adaption": adapted,
    "ours": ours,
    "oracle": oracle,
}


# -- scores -------------------------------------------------------------------------------------------------------------------


def scores(matrix: Matrix) -> dict[str, dict[str, float]]:
    """Of each policy: mean and p99 regret over the sizes, each weighing its part of the log range, and timings used; and the mean and
    standard error of that mean regret over halves of the samples drawn at random."""
    found = halved(matrix)
    again = [halved(matrix.drawn(seed)) for seed in range(DRAWS)]
    for name, row in found.items():
        means = [one[name]["mean"] for one in again]
        row |= {"drawn": statistics.mean(means), "drawn_error": statistics.stdev(means) / math.sqrt(DRAWS)}
    return found


def halved(matrix: Matrix) -> dict[str, dict[str, float]]:
    """Regrets where odd samples choose and even ones score."""
    seen, unseen = matrix.halves(1), matrix.halves(0)
    weights = log_weights(matrix.sizes)
    found = {}
    for name, policy in POLICIES.items():
        decision = policy(matrix, seen)
        secs = {m: {k: statistics.median(own[m]) for k, own in unseen.items()} for m in matrix.sizes}
        regret = np.asarray([secs[m][decision.chosen[m]] / min(secs[m].values()) - 1 for m in matrix.sizes])
        order = np.argsort(regret, kind="stable")
        place = int(np.searchsorted(np.cumsum(weights[order]), 0.99 - 1e-12))
        p99 = float(regret[order[min(place, len(order) - 1)]])
        found[name] = {"mean": float(regret @ weights), "p99": p99, "timings": float(decision.timings)}
    return found


def log_weights(sizes: Sequence[int]) -> Any:
    """The part of the log-scaled range nearest to each size; they sum to 1."""
    logs = np.log(sizes)
    edges = np.concatenate([logs[:1], (logs[1:] + logs[:-1]) / 2, logs[-1:]])
    parts = np.diff(edges)
    return parts / parts.sum() if parts.sum() > 0 else np.full(len(logs), 1 / len(logs))


def report(target: str, matrix: Matrix) -> list[str]:
    """A target's table as Markdown."""
    samples = min(len(row) for own in matrix.samples.values() for row in own.values())
    lines = [
        "",
        f"## Target {target}",
        "",
        f"{len(matrix.samples)} variants at {len(matrix.sizes)} sizes, {matrix.sizes[0]} to {matrix.sizes[-1]}, {samples} samples each; "
        "odd samples choose, even ones score.",
        "",
        "| policy | mean regret | p99 regret | mean regret over halves drawn at random | timings |",
        "|---|---|---|---|---|",
    ]
    for name, row in scores(matrix).items():
        drawn = f"{100 * row['drawn']:.1f} +- {100 * row['drawn_error']:.1f} %"
        mean, p99 = f"{100 * row['mean']:.1f} %", f"{100 * row['p99']:.1f} %"
        lines.append(f"| {name} | {mean} | {p99} | {drawn} | {row['timings']:.0f} |")
    return [*lines, "", "The matrix was measured with " + json.dumps(dict(matrix.environment))]


# -- the matrix ---------------------------------------------------------------------------------------------------------------


def measured(
    kernel: str, target: str, variants: int, sizes: Sequence[int], rounds: int, passes: int, store: Store
) -> Matrix:
    """Times of the search's first guesses at a kernel, of others drawn at random, and of every library form, in turns; several
    times over all sizes, so that no size has all its samples from one moment."""
    before = environment()
    settings = Settings(target=target, effort="full", trials=0)
    runner = open_runner(settings)
    try:
        job = device_job(KERNELS[kernel].module(True), runner.device_info(), store, settings)
        (task_variants,) = job.task_variants.values()
        task = task_variants.task
        guessed = task_variants.sketch_set.seeds(variants)
        drawn = task_variants.sketch_set.space.candidates(
            task_variants.sketch_set.space.sample(np.random.default_rng(0), 4 * variants)
        )
        tried = list(dict.fromkeys((*guessed, *drawn)))[:variants]
        own = [*task_variants.library.variants, *map(task_variants.sketch_set.record_of, tried)]
        checks = tuple(check_case(task, n) for n in range(2))
        policy = TimingPolicy(rounds, rounds, 0.05, 0.5)
        shapes = tuple({f"s{a}": m for a in range(len(task.func.symbols))} for m in sizes)
        requests = [MeasureRequest(v.key, task_variants.program(v).to_json(), checks, shapes, policy) for v in own]
        turns = [{r.id: r for r in runner.submit(requests).result()} for _ in range(passes)]
    finally:
        runner.close()
    samples: dict[str, dict[int, list[float]]] = {}
    tiles = {}
    for variant in own:
        results = [turn[variant.key] for turn in turns]
        failed = next((r for r in results if not (r.ok and r.checked)), None)
        if failed is not None:
            print(f"{variant.sketch}: {failed.stage}: {failed.message}", file=sys.stderr)
            continue
        each = zip(sizes, *(r.timings for r in results), strict=True)
        samples[variant.key] = {m: [secs for t in timings for secs in t.samples_secs] for m, *timings in each}
        tiles[variant.key] = variant.values.get("MR", 1)
    libraries = tuple(v.key for v in own if v.kind == "library" and v.key in samples)
    return Matrix(tuple(sizes), samples, tiles, libraries, before)


def default_sizes(top: int) -> list[int]:
    """Return the sizes that policies request up to `top`, and others on a log scale, with primes."""
    asked = [m for points in (powers, flashinfer, size_hints) for m in points(top)]
    return sorted({m for m in (*asked, *Range(1, top).levels(96), 17, 67, 127, 257, 509, 1021, 2039) if m <= top})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("measure", "table"), default="table")
    parser.add_argument("--target", choices=TARGETS, default="c")
    parser.add_argument("--kernel", default="policy_matmul")
    parser.add_argument("--variants", type=int, default=24)
    parser.add_argument("--top", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="Where matrices are and results are written.")
    args = parser.parse_args()
    if args.command == "measure":
        sizes = default_sizes(args.top)
        save_matrix(
            measured(args.kernel, args.target, args.variants, sizes, args.rounds, args.passes, MemoryStore()),
            args.folder / MATRIX.format(args.target),
        )
        return
    found = {t: args.folder / MATRIX.format(t) for t in TARGETS}
    matrices = {t: levelled(load_matrix(path)) for t, path in found.items() if path.exists()}
    lines = ["# Policies on one kernel library (table 4)", "", "Written by `experiments/dynamic/policies.py`."]
    lines += [line for t, matrix in matrices.items() for line in report(t, matrix)]
    each = {t: scores(matrix) for t, matrix in matrices.items()}
    write_page("policies", lines, each, environment(), args.folder)


if __name__ == "__main__":
    main()
