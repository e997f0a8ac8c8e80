"""Tables 2 and 3: one build for a whole range of sizes: its regret against an oracle tuned for each size, its plans, its buckets.

    python -m experiments.dynamic.shapes --work FOLDER --peer-python PYTHON [--target c] [--trials 64] [--only PART,...]

Each part can be run alone, and then replaces only its figures:

* dietcode: DietCode's products. (16 T, 768) times the transposition of (2304, 768); in batches of 19 (a tenth of theirs) T x 64 x T with
  the right side transposed, and T x T x 64. T is the symbol (in the first one, the rows are), over all sizes up to the largest.
* mikpoly: MikPoly's sweep, (M, 768) times (768, 3072), M from 1 to 8192; and a product with bias and GELU, of 1 to 512 rows.
* regret: `regret.py`; plans: `plans.py`; buckets: `buckets.py`.

Contenders: NumPy and torch as users call them; `library` (the fastest installed library, called by our runtime, and a kernel for the
rest of the function); TVM's default build with a symbolic dim, where it takes tolerable time; `kernels` (ours without libraries); and
`ours` (what the tool dispatches). Weights are constants of our models and may be packed once; DietCode, MikPoly and the peers have no
such notion. Tuned results stay in the folder, so that the run may be interrupted. Writes results/dynamic_shapes.json and .md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.dynamic import buckets, plans, regret
from experiments.dynamic.tuning import Work, by_size, wrong_sizes
from experiments.harness.contenders import Contender, Visits, summary, visits
from experiments.harness.pages import RESULTS, environment, write_page
from experiments.kernels.model import Kernel
from experiments.kernels.zoo import KERNELS
from relax_tune.tuner.task.allowed_sizes import Range

GELU = "dense_gelu_512x768x3072"
DIETCODE_T = (5, 24, 43, 62, 81, 100, 119, 128)
TVM, TVM_FLOPS = "tvm-dynamic", 4e8
Row = Mapping[str, float]


def with_primes(levels: Sequence[int], top: int) -> list[int]:
    """Return the sizes, the largest prime below each, and the ends of the range with their neighbours."""
    primes = [next((p for p in range(m, 1, -1) if all(p % d for d in range(2, math.isqrt(p) + 1))), 1) for m in levels]
    return sorted({m for m in (1, 2, *levels, *primes, top - 1, top) if 1 <= m <= top})


def flops(kernel: Kernel, size: int) -> float:
    """Operations at a size of its one symbol, which two dims follow where there is no weight."""
    (top,) = kernel.dims.values()
    return kernel.flops * (size / top) ** (1 if kernel.weights() else 2)


def compared(
    work: Work, peer: str | None, sizes: Mapping[str, Sequence[int]], rounds: int, repeats: int
) -> dict[str, Any]:
    """Return the medians of every contender at every size, and the cost of tuning."""
    took = {name: asdict(work.tune(name)) for name in sizes}
    cases = {f"{name} n={m}": flops(KERNELS[name], m) for name, own in sizes.items() for m in own}
    products = [c for c in cases if c.split()[0] != GELU]
    contenders = [
        Contender("numpy", [sys.executable, "-m", "experiments.kernels.peer_kernels", "serve", "numpy"], products)
    ]
    if peer is not None:
        command = [peer, "-m", "experiments.kernels.peer_kernels"]
        contenders.append(Contender("torch", [*command, "serve", "torch"]))
        folder = work.folder / TVM
        built = [name for name in sizes if name != GELU and untuned(name, folder, command)]
        few = [c for c in products if c.split()[0] in built and cases[c] <= TVM_FLOPS]
        contenders.append(Contender(TVM, [*command, "serve", "tvm", str(folder)], few))
    for of in ("library", "kernels", "ours"):
        command = [
            sys.executable,
            "-m",
            "experiments.kernels.tuned_kernels",
            "serve",
            work.target,
            str(work.builds(of)),
        ]
        contenders.append(Contender(of, command))
    try:
        found = visits(contenders, list(cases), rounds, repeats, visit_secs=0.1)
    finally:
        for c in contenders:
            c.close()
    work.keep("+".join(sizes), found)
    return {"times": summary(flat(found)), "names": [c.name for c in contenders], "tuning": took}


def flat(found: Visits) -> dict[str, dict[str, list[float]]]:
    return {case: {n: [s for v in own for s in v] for n, own in by.items()} for case, by in found.items()}


def untuned(name: str, folder: Path, command: Sequence[str]) -> bool:
    """Whether there is TVM's default build of a kernel, now or from before."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"{name}.so").exists():
        done = subprocess.run([*command, "untuned", name, str(folder)], capture_output=True, text=True, timeout=600)
        if done.returncode:
            print(f"{TVM} {name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return (folder / f"{name}.so").exists()


def checked(work: Work, name: str, sizes: Sequence[int], builds: Sequence[str] = ("kernels", "ours")) -> dict[str, Any]:
    """At how many sizes the builds were compared with NumPy, and where they were wrong."""
    work.tune(name)
    paths = {of: work.builds(of) / f"{name}.rta" for of in builds}
    wrong = {of: wrong_sizes(KERNELS[name], path, work.target, sizes) for of, path in paths.items()}
    print(
        f"{work.target} {name}: {len(sizes)} sizes compared with NumPy, wrong at {wrong}", file=sys.stderr, flush=True
    )
    return {"sizes": len(sizes), "wrong": wrong}


# -- the parts ----------------------------------------------------------------------------------------------------------------


def dietcode(work: Work, peer: str | None, args: argparse.Namespace) -> dict[str, Any]:
    sizes, checks = {}, {}
    for name, factor in (("dietcode_dense", 16), ("dietcode_nt", 1), ("dietcode_nn", 1)):
        (top,) = work.kernel(name).dims.values()
        sizes[name] = [factor * t for t in DIETCODE_T if factor * t <= top][: args.sizes]
        checks[name] = checked(work, name, with_primes(Range(1, top).levels(24), top))
    return compared(work, peer, sizes, args.rounds, args.repeats) | {"checks": checks}


def mikpoly(work: Work, peer: str | None, args: argparse.Namespace) -> dict[str, Any]:
    tops = {name: next(iter(work.kernel(name).dims.values())) for name in ("mikpoly", "mikpoly_96x64", GELU)}
    checks = {
        "mikpoly_96x64": checked(work, "mikpoly_96x64", range(1, tops["mikpoly_96x64"] + 1), ("kernels",)),
        "mikpoly": checked(work, "mikpoly", with_primes(Range(1, tops["mikpoly"]).levels(44), tops["mikpoly"])),
    }
    sizes = {
        "mikpoly": list(Range(1, tops["mikpoly"]).levels(min(args.sizes, 12))),
        GELU: [m for m in (1, 17, 64, 128, 512) if m <= tops[GELU]][: args.sizes],
    }
    return compared(work, peer, sizes, args.rounds, args.repeats) | {"checks": checks}


def time_regret(work: Work, _: str | None, args: argparse.Namespace) -> dict[str, Any]:
    sizes = min(args.sizes, regret.SIZES)
    return regret.measured(work, regret.KERNELS, sizes, 2 * args.rounds, args.repeats)


def time_plans(work: Work, _: str | None, args: argparse.Namespace) -> dict[str, Any]:
    return plans.measured(work.folder, 3 if args.tiny else 50, 4)


def time_buckets(work: Work, _: str | None, args: argparse.Namespace) -> dict[str, Any]:
    count, rounds = (1, 2) if args.tiny else (buckets.BUCKETS, buckets.PAIRS)
    return buckets.measured(work, buckets.KERNELS, count, rounds, args.repeats)


PARTS: Mapping[str, Callable[[Work, str | None, argparse.Namespace], dict[str, Any]]] = {
    "dietcode": dietcode, "mikpoly": mikpoly, "regret": time_regret, "plans": time_plans, "buckets": time_buckets,
}  # fmt: skip


# -- the report ---------------------------------------------------------------------------------------------------------------


def over(row: Mapping[str, Row], own: str, rivals: Sequence[str]) -> float:
    """Return the time of the fastest peer over the time of `own`; NaN if either side was not timed."""
    known = [row[n]["median_us"] for n in rivals if n in row]
    return min(known) / row[own]["median_us"] if known and own in row else math.nan


def table(found: Mapping[str, Any]) -> list[str]:
    """A row a size: microseconds of each contender, and our speed against the best of the others."""
    names = found["names"]
    ratios = {"ours / library": ("ours", ("numpy", "library")), "kernels / library": ("kernels", ("numpy", "library")),
              "ours / torch": ("ours", ("torch",)), "ours / TVM": ("ours", (TVM,))}  # fmt: skip
    text = [f"| kernel, size | {' | '.join(f'{n}, us' for n in names)} | {' | '.join(ratios)} |"]
    text.append("|---" * (1 + len(names) + len(ratios)) + "|")
    for case, row in by_size(found["times"]):
        cells = [f"{row[n]['median_us']:.1f}" if n in row else "-" for n in names]
        values = [over(row, own, rivals) for own, rivals in ratios.values()]
        cells += ["-" if math.isnan(v) else f"{v:.2f}" for v in values]
        text.append(f"| {case} | {' | '.join(cells)} |")
    there = sorted({name for took in found["tuning"].values() for name in took["libraries"]})
    text += [
        "",
        "Ratios are speeds: above 1, ours is faster. Against the library: against the faster of NumPy, which has OpenBLAS, and "
        f"`library`, which could choose from {', '.join(there) or 'none'}.",
        "",
    ]
    for name, check in found["checks"].items():
        wrong = {of: m for of, m in check["wrong"].items() if m}
        verdict = f"WRONG at {wrong}" if wrong else "all right"
        text.append(f"* {name}: {check['sizes']} sizes compared with NumPy in double precision, {verdict}.")
    for name, took in found["tuning"].items():
        sketches = ", ".join(took["sketches"])
        text.append(f"* {name}: tuned in {took['wall_secs']:.0f} s, {took['timings']} timings; dispatches {sketches}.")
    return text


def least(found: Mapping[str, Any], name: str, low: int, high: int, own: str, rivals: Sequence[str]) -> str:
    """The least speed of `own` over the rivals, of the sizes timed in a range, and the geometric mean."""
    known = []
    for case, row in found["times"].items():
        kernel, _, size = case.partition(" n=")
        if kernel == name and low <= int(size) <= high and not math.isnan(ratio := over(row, own, rivals)):
            known.append(ratio)
    if not known:
        return "not timed"
    return f"at least {min(known):.2f}, geometric mean {math.exp(statistics.mean(map(math.log, known))):.2f}"


def goals(found: Mapping[str, Any]) -> list[str]:
    """Return the lines that compare the sweep with the goals for products."""
    blas = ("numpy", "library")
    return [
        "",
        f"Speed over the library at 512..2048 rows (goal: 1.0): ours {least(found, 'mikpoly', 512, 2048, 'ours', blas)}; kernels "
        f"{least(found, 'mikpoly', 512, 2048, 'kernels', blas)}. To 128 rows (1.15): ours {least(found, 'mikpoly', 1, 128, 'ours', blas)}; "
        f"kernels {least(found, 'mikpoly', 1, 128, 'kernels', blas)}. With bias and GELU over library and kernel (1.4): "
        f"{least(found, GELU, 1, 512, 'ours', ('library',))}. Over TVM's dynamic build (100): "
        f"{least(found, 'mikpoly', 1, 8192, 'ours', (TVM,))}.",
    ]


REPORTS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], list[str]]]] = {
    "dietcode": ("DietCode's products (table 2)", table),
    "mikpoly": ("MikPoly's sweep (table 3)", lambda found: [*table(found), *goals(found)]),
    "regret": ("Regret against an oracle tuned for each size", regret.lines),
    "buckets": ("Buckets against the library", buckets.lines),
    "plans": ("Deciding all plans", plans.lines),
}


def report(record: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Everything on record, by target and part."""
    text = ["# Dynamic shapes", "", "Written by `experiments/dynamic/shapes.py`; medians, in turns."]
    for target, parts in record.items():
        for part, (title, lines) in REPORTS.items():
            if part in parts:
                text += [
                    "",
                    f"## {title}, target {target}",
                    "",
                    *lines(parts[part]),
                    "",
                    json.dumps(parts[part]["environment"]),
                ]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python", help="has torch, apache-tvm and what ours needs")
    parser.add_argument("--target", default="c")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, default=12, help="at most so many of each kernel")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--tiny", action="store_true", help="short ranges, few tasks and rounds: shows that everything runs"
    )
    args = parser.parse_args()
    unknown = sorted(set(args.only.split(",")) - set(PARTS))
    if unknown:
        raise SystemExit(f"--only expects some of {', '.join(PARTS)}; got {', '.join(unknown)}")
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    work = Work(args.work, args.target, args.trials, 100 if args.tiny else None)
    path = args.out / "dynamic_shapes.json"
    record: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for part in args.only.split(","):
        before = environment()
        found = PARTS[part](work, args.peer_python, args) | {"environment": before, "trials": args.trials}
        record.setdefault(args.target, {})[part] = found
        # Parts are measured on different days: each section has the environment of its part.
        write_page("dynamic_shapes", report(record), record, before, args.out, quiet=True)
        print("\n".join(REPORTS[part][1](found)), flush=True)


if __name__ == "__main__":
    main()
