"""Slices of real ONNX graphs: random connected parts of files, on the values that ONNX Runtime gives them.

`python -m tests.fuzz.importers.slices FOLDER --slices 1000 --seed 1`: each file below the folder runs twice, with random sizes for its
symbolic dims, so that dims of a slice are symbols where their sizes differ. A slice is judged like a random program.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tests.fuzz.importers.builder import EVERY
from tests.fuzz.importers.minimise import minimise, regression_test, shown, stored
from tests.fuzz.importers.oracles import session
from tests.fuzz.importers.program import Array, Dim, Input, Program
from tests.fuzz.importers.trial import attempt

from relax_tune.ir.frontend.onnx.file import names_read_by, sorted_nodes

MOST_BYTES = 1 << 27
"""Bytes of a file that is tried."""
MOST_ELEMENTS = 40_000
"""Elements of a value of a slice."""
MOST_INTEGERS = 16
"""Elements of integers that may decide shapes."""
MOST_ABOVE = 12
"""Nodes of a path above a slice that compute shapes."""
SIZES = (1, 2, 3, 5, 8, 16)


@dataclass
class RealGraph:
    """A model and the values of all names in each run."""

    nodes: list[Any]
    constants: Mapping[str, Array]
    runs: list[Mapping[str, Array]]
    opset: int
    domains: Mapping[str, int]


def read(path: Path, rng: random.Random) -> RealGraph | None:
    """Return a graph with its values; None for a file that ONNX Runtime does not run with what is drawn here."""
    try:
        proto = onnx.load(str(path))
        constants = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
        names = dict.fromkeys(o for n in proto.graph.node for o in n.output if o)
        every = onnx.ModelProto()
        every.CopyFrom(proto)
        del every.graph.output[:]
        every.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
        run = session(every)
        runs: list[Mapping[str, Array]] = []
        for _ in range(2):
            given = _inputs([i for i in proto.graph.input if i.name not in constants], rng)
            runs.append({**given, **dict(zip(names, run.run([*names], given), strict=True))})
        opsets = {o.domain: o.version for o in proto.opset_import}
        opset = opsets.pop("", 0) or opsets.pop("ai.onnx", 0)
        nodes = sorted_nodes(list(proto.graph.node), {*constants, *runs[0]})
        return None if proto.functions else RealGraph(nodes, constants, runs, opset, opsets)
    except Exception:
        return None


def _inputs(inputs: Sequence[Any], rng: random.Random) -> dict[str, Array]:
    sizes: dict[str, int] = {}
    generator = np.random.default_rng(rng.randrange(1 << 40))
    given = {}
    for i in inputs:
        t = i.type.tensor_type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(t.elem_type))
        shape = [
            d.dim_value if d.HasField("dim_value") else sizes.setdefault(d.dim_param or i.name, rng.choice(SIZES))
            for d in t.shape.dim
        ]
        if dtype.kind == "f":
            given[i.name] = np.asarray(generator.standard_normal(shape)).astype(dtype)
        else:
            given[i.name] = np.asarray(generator.integers(0, 2, shape)).astype(dtype)
    return given


def slice_of(graph: RealGraph, rng: random.Random) -> Program | None:
    """Return a random connected part of a graph as a program; None for one with large or other values."""
    makers = {o: k for k, n in enumerate(graph.nodes) for o in n.output if o}
    readers: dict[str, list[int]] = {}
    for k, n in enumerate(graph.nodes):
        for name in names_read_by(n):
            readers.setdefault(name, []).append(k)
    chosen = {rng.randrange(len(graph.nodes))}
    for _ in range(rng.choice((0, 1, 2, 4, 8, 12))):
        edge = [makers[i] for k in chosen for i in names_read_by(graph.nodes[k]) if i in makers]
        edge += [r for k in chosen for o in graph.nodes[k].output for r in readers.get(o, ())]
        rest = sorted({*edge} - chosen)
        if not rest:
            break
        chosen.add(rng.choice(rest))
    for _ in range(MOST_ABOVE if rng.random() < 0.9 else 0):  # what computes shapes belongs to the slice
        above = {makers[i] for k in chosen for i in names_read_by(graph.nodes[k]) if i in makers and _varies(graph, i)}
        chosen |= above
    nodes = [graph.nodes[k] for k in sorted(chosen)]
    made = {o for n in nodes for o in n.output if o}
    read = [name for name in dict.fromkeys(i for n in nodes for i in sorted(names_read_by(n))) if name not in made]
    constants = {name: graph.constants[name] for name in read if name in graph.constants}
    for name in read:  # what decides shapes is mostly a constant of the whole graph
        first, second = graph.runs[0].get(name), graph.runs[1].get(name)
        if (
            isinstance(first, np.ndarray)
            and first.dtype.kind == "i"
            and first.size <= MOST_INTEGERS
            and np.array_equal(first, second)
        ) and rng.random() < 0.9:
            constants[name] = first
    calls = [{name: run[name] for name in read if name not in constants} for run in graph.runs]
    outputs = [o for n in nodes for o in n.output if o and not any(o in names_read_by(m) for m in nodes)]
    values = [*constants.values(), *(v for c in calls for v in c.values()), *(r[o] for r in graph.runs for o in made)]
    if any(not isinstance(v, np.ndarray) or v.dtype not in EVERY or v.size > MOST_ELEMENTS for v in values):
        return None
    inputs = {name: Input(a.dtype, tuple(_dims(a.shape, calls[1][name].shape))) for name, a in calls[0].items()}
    domains = {d: v for d, v in graph.domains.items() if any(n.domain == d for n in nodes)}
    return Program(graph.opset, nodes, inputs, constants, outputs[:6], calls, domains).needed()


def _varies(graph: RealGraph, name: str) -> bool:
    """Return whether a value is a few integers that differ between the runs."""
    first, second = (run.get(name) for run in graph.runs)
    few = isinstance(first, np.ndarray) and first.dtype.kind == "i" and first.size <= MOST_INTEGERS
    return few and not np.array_equal(first, second)


def _dims(first: Sequence[int], second: Sequence[int]) -> Iterator[Dim]:
    for a, b in zip(first, second, strict=True):
        yield a if a == b else f"s{a}_{b}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--slices", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--found", type=Path, default=Path("build/fuzz/slices"))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    rng, kinds, files = random.Random(asked.seed), Counter[str](), Counter[str]()
    paths = sorted(p for f in asked.folder for p in f.rglob("*.onnx") if p.stat().st_size <= MOST_BYTES)
    rng.shuffle(paths)
    end, tried = time.monotonic() + asked.seconds, 0
    for path in paths:
        if time.monotonic() > end or tried >= asked.slices:
            break
        graph = read(path, rng)
        files["run" if graph else "not run"] += 1
        for _ in range(0 if graph is None else min(3 * len(graph.nodes), -(-asked.slices // len(paths)) + 10)):
            assert graph is not None
            program = slice_of(graph, rng)
            if program is None or time.monotonic() > end:
                continue
            tried += 1
            outcome = attempt(program)
            kinds[outcome.kind or "agrees"] += 1
            if outcome.is_finding:
                _report(program, outcome, asked.found, f"{path.stem}_{tried}")
            elif outcome.kind in ("refused import", "refused call"):
                print(f"{path.name}: {outcome.kind}: {outcome.why[:300]}", flush=True)
    print(f"{tried} slices of {dict(files)} files: {dict(kinds)}")
    return bool(kinds["wrong"] + kinds["crash"])


def _report(program: Program, outcome: Any, folder: Path, name: str) -> None:
    def fails(candidate: Program) -> bool:
        return attempt(candidate).kind == outcome.kind

    small = minimise(program, outcome.output if outcome.kind == "wrong" else "", outcome.call, fails, 8)
    why = attempt(small).why
    print(f"==== {name}: {outcome.kind}: {why}\n{shown(small)}\n{regression_test(small, why)}", flush=True)
    stored(small, folder, name)


if __name__ == "__main__":
    sys.exit(main())
