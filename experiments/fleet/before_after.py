"""Time of building, measuring and tuning in two commits, in pairs: one process of each, in an order that changes from pair to pair.

    python -m experiments.fleet.before_after --before b9130345 --pairs 12

Run it on a quiet machine. Parts: `import` imports the package; `load` reads a BERT-like model of two layers from its folder; `build`
builds it without records; `measure` times 24 candidates in an open device process; `tune` is a whole first job with the start of a device
process, and `tune again` one that measures nothing. The ratio of a part is the median over pairs. Writes `results/before_after.md` and
`.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.harness.pages import ROOT, environment, write_page

CHILD = """
import contextlib, json, sys, tempfile, time
from pathlib import Path
found, began = {}, time.perf_counter()
def lap(name):
    global began
    found[name], began = time.perf_counter() - began, time.perf_counter()
import relax_tune as rt
from relax_tune.tuner.measure.local import LocalRunner
lap("import")
import tests.tuner.cli.cli_model as model
from tests.tuner.measure.measure_programs import request
model.HIDDEN, model.INNER, model.LAYERS, model.HEADS = 128, 512, 2, 4
with tempfile.TemporaryDirectory() as name:
    folder = model.make_bert(Path(name, "bert"))
    bounds = {"b": (1, 4), "n": (1, 32)}
    began = time.perf_counter()
    module = rt.load_model(str(folder), bounds)
    lap("load")
    rt.build(module, target="c", db="memory://")
    lap("build")
    with LocalRunner("c", lock=False) as runner:
        batches = [[request("good", "c", id=f"r{n}{k}") for k in range(8)] for n in range(4)]
        runner.submit(batches[0]).result()
        began = time.perf_counter()
        for batch in batches[1:]:
            runner.submit(batch).result()
        lap("measure")
    began = time.perf_counter()
    for part in ("tune", "tune again"):
        rt.tune(module, target="c", db=str(Path(name, "t.db")), effort="quick", trials=8, strategy="random")
        lap(part)
print(json.dumps(found))
"""


def run(tree: Path, cache: Path) -> dict[str, float]:
    """Return the seconds of each part in a checkout."""
    paths = os.pathsep.join([str(tree / "src"), str(tree)])
    own = {**os.environ, "PYTHONPATH": paths, "RELAX_TUNE_CACHE": str(cache), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=cache, env=own, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tree}: {done.stderr[-3000:]}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    """Check the earlier commit out into a temporary folder, and run pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="the earlier commit")
    parser.add_argument("--pairs", type=int, default=12)
    given = parser.parse_args()
    facts = environment()
    pairs: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="relax-tune-before-") as name:
        trees = {"before": Path(name, "tree"), "after": ROOT}
        caches = {tree: Path(name, f"cache-{tree}") for tree in trees}
        for folder in (trees["before"], *caches.values()):
            folder.mkdir()
        packed = subprocess.run(["git", "archive", given.before], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", str(trees["before"])], input=packed, check=True)
        for tree, path in trees.items():  # fills the caches
            run(path, caches[tree])
        for n in range(given.pairs):
            order = list(trees) if n % 2 else list(trees)[::-1]
            pairs.append({tree: run(trees[tree], caches[tree]) for tree in order})
            print(f"pair {n + 1} of {given.pairs}", flush=True)
    lines = [
        "# Costs before and after",
        "",
        f"`python -m experiments.fleet.before_after --before {given.before} --pairs {given.pairs}`: seconds, medians over the pairs.",
        "",
        "| part | before | after | after / before | quartiles |",
        "|---|---|---|---|---|",
    ]
    for part in pairs[0]["after"]:
        before, after = ([pair[tree][part] for pair in pairs] for tree in ("before", "after"))
        ratios = [a / b for a, b in zip(after, before, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        lines.append(
            f"| {part} | {statistics.median(before):.3f} | {statistics.median(after):.3f} | {middle:.3f} | {low:.3f} - {high:.3f} |"
        )
    write_page("before_after", lines, {"before": given.before, "pairs": pairs}, facts)


if __name__ == "__main__":
    main()
