"""Registers and shared memory of sampled candidates of every GPU rule: the assembler's report against our estimates.

    python -m experiments.gpu.ptxas_report [--samples 12] [--seed 0] [--only NAME]

For sm_80 and sm_90, through NVRTC (extra `cuda-compiler`); no GPU is needed, and nothing is timed. Candidates are drawn without the
limits of the machine, from tiles twice as large as rules use. Where possible they are near the limits by our estimate: half of them
below and half above, at most by the factor FAR, so that both kinds of mistake can occur. A candidate fits if it needs no more shared
memory than a block may have, and if no register is spilled because its number of threads leaves too few for each
(`__launch_bounds__`). FEW bytes that the assembler spills although registers are left do not count.
`schedules/occupancy` accepts or rejects a candidate: a false accept is measured in vain, a false reject is never tried. Bytes of
shared memory must agree everywhere. Writes experiments/results/ptxas_report.json and .md; with `--only`, the rows of functions whose
names contain NAME replace earlier ones.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod

import numpy as np

from experiments.harness.pages import RESULTS, environment, write_page
from relax_tune.errors import BuildError
from relax_tune.ir.codegen.generate import CodeTarget, generate, split_kernels
from relax_tune.ir.core.dtype import DType, bf16, f16, f32
from relax_tune.ir.core.expr import Expr, as_int, const, maximum, minimum, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.math.elementwise import Add, Gelu
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import RmsNorm
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax, Sum
from relax_tune.ir.passes.graph.mixed_precision import MixedPrecision
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.pipeline import Pass, lower
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.occupancy import (
    REGISTER_GRANULE,
    group_items,
    kernels,
    launch_limits,
    registers,
    shared_bytes,
)
from relax_tune.schedules.rules.gpu import mma
from relax_tune.schedules.rules.shared import register_tiles
from relax_tune.schedules.schedule import holds
from relax_tune.schedules.sketch import GPU_RULES, Sketch, instantiate
from relax_tune.schedules.target import HardwareInfo

# How far from the limits candidates may be by our estimate, and how many are drawn to find such.
FAR, DRAWN = 2.0, 300
FEW = 128
# Tiles larger than rules make them.
WIDER = ((register_tiles, "HEIGHTS", (1, 2, 4, 8, 16)), (register_tiles, "VECTORS", (1, 2, 4, 8)), (register_tiles, "MOST_SUMS", 256),
         (mma, "MOST_SUMS", 512))  # fmt: skip
# Per multiprocessor and block, from the CUDA C++ Programming Guide.
LIMITS = {"workers": 108, "warp": 32, "max_group_size": 1024, "max_local_bytes": 163 << 10, "local_bytes_per_sm": 164 << 10,
          "registers_per_sm": 64 << 10, "threads_per_sm": 2048, "groups_per_sm": 32, "vector_bits": 128,
          "compute_major": 8}  # fmt: skip
HOPPER = {"workers": 132, "max_local_bytes": 227 << 10, "local_bytes_per_sm": 228 << 10, "compute_major": 9}
MACHINES = {
    "sm_80": HardwareInfo.from_limits("cuda", LIMITS),
    "sm_90": HardwareInfo.from_limits("cuda", LIMITS | HOPPER),
}


def _lowered(make: Callable[[GraphBuilder], GVar], *passes: Pass) -> PrimFunc:
    g = GraphBuilder()
    module = g.finish(make(g))
    for made in passes:
        module = made(module)
    (func,) = lower(module).prims.values()
    return func


def _dense(g: GraphBuilder, rows: Expr, columns: int = 4096, depth: int = 4096) -> GVar:
    w = g.constant("w", np.broadcast_to(np.float32(0.5), (columns, depth)))
    return g.call(Gelu(), g.call(Matmul(True), g.input("x", (rows, const(depth))), w))


def _halves(g: GraphBuilder) -> GVar:
    return g.call(
        Matmul(), g.input("x", (g.symbol("m"), const(4096)), f16), g.input("w", (const(4096), const(4096)), f16)
    )


def _convolved(g: GraphBuilder) -> GVar:
    w = g.constant("w", np.broadcast_to(np.float32(0.5), (128, 64, 3, 3)))
    return g.call(
        Gelu(), g.call(Conv((1, 1), (1, 1)), g.input("x", (g.symbol("n"), const(64), const(58), const(58))), w)
    )


def _quantized(g: GraphBuilder) -> GVar:
    w = g.constant("w", np.random.default_rng(0).standard_normal((256, 512), np.float32))
    return g.call(Matmul(True), g.input("x", (g.symbol("m"), const(512))), w)


def _attended(g: GraphBuilder, width: int, dtype: DType = f32) -> GVar:
    n, m = g.symbol("n"), g.symbol("m")
    q, k, v = (g.input(x, (const(8), r, const(width)), dtype) for x, r in (("q", n), ("k", m), ("v", m)))
    return g.call(Attention(width**-0.5), q, k, v)


def _product(g: GraphBuilder) -> GVar:
    m, k, n = (g.symbol(x) for x in "mkn")
    return g.call(Matmul(), g.input("a", (m, k)), g.input("b", (k, n)))


def _added(g: GraphBuilder) -> GVar:
    n = g.symbol("n")
    return g.call(Gelu(), g.call(Add(), g.input("x", (n, const(4096))), g.input("y", (n, const(4096)))))


def functions() -> dict[str, PrimFunc]:
    """Return the functions of typical models, by name."""
    return {
        "dense f32": _lowered(lambda g: _dense(g, g.symbol("m"))),
        "product of two inputs": _lowered(_product),
        "one row": _lowered(lambda g: _dense(g, const(1))),
        "dense f16": _lowered(lambda g: _dense(g, g.symbol("m")), MixedPrecision(f16)),
        "product of halves": _lowered(_halves),
        "int4": _lowered(_quantized, QuantizeWeights(4, 32)),
        "convolution": _lowered(_convolved),
        "attention 64": _lowered(lambda g: _attended(g, 64)),
        "attention 128": _lowered(lambda g: _attended(g, 128)),
        "attention 64, bf16": _lowered(lambda g: _attended(g, 64, bf16)),
        "attention 128, f16": _lowered(lambda g: _attended(g, 128, f16)),
        "softmax": _lowered(lambda g: g.call(Softmax(), g.input("x", (g.symbol("n"), g.symbol("m"))))),
        "RMS norm": _lowered(
            lambda g: g.call(RmsNorm(1e-6), g.input("x", (g.symbol("n"), const(4096))), g.constant("s", np.ones(4096, np.float32)))
        ),
        "column sums": _lowered(lambda g: g.call(Sum((0,)), g.input("x", (g.symbol("n"), const(1024))))),
        "sum of all": _lowered(lambda g: g.call(Sum((0,)), g.input("x", (g.symbol("n"),)))),
        "elementwise": _lowered(_added),
        "transpose": _lowered(lambda g: g.call(Permute((0, 2, 1)), g.input("x", (g.symbol("b"), g.symbol("n"), g.symbol("m"))))),
    }  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A kernel of a candidate: our estimate and the assembler's report."""

    architecture: str
    function: str
    sketch: str
    values: Mapping[str, int]
    kernel: str
    items: int
    estimated_registers: int
    registers: int
    spilled_bytes: int
    estimated_shared: int
    shared: int
    accepted: bool
    fits: bool
    taken: float


def _number(e: Expr, sketch: Sketch, values: Mapping[str, int]) -> int:
    found = as_int(substitute(e, {t: const(values[t.name]) for t in sketch.tunables}))
    assert found is not None, e
    return found


def _taken(sketch: Sketch, machine: HardwareInfo) -> list[tuple[Expr, Expr]]:
    """Return for every kernel the estimated resources and their limits: registers of an item, and shared memory."""
    found: list[tuple[Expr, Expr]] = []
    for k in kernels(sketch.func):
        items = maximum(group_items(sketch.func, k), 1)
        found.append(
            (registers(sketch.func, k, True), minimum(machine.registers, const(machine.sm_registers) // items))
        )
        found.append((shared_bytes(sketch.func, k, machine), const(machine.local_bytes)))
    return found


def _chosen(
    sketch: Sketch, machine: HardwareInfo, samples: int, rng: random.Random
) -> list[tuple[dict[str, int], float]]:
    """Return values that satisfy the constraints, with their share of the limits: near these on both sides if possible, else one."""
    wanted = _taken(sketch, machine)
    drawn: dict[tuple[int, ...], tuple[dict[str, int], float]] = {}
    for _ in range(DRAWN):
        values = {t.name: rng.choice(t.domain) for t in sketch.tunables}
        key = tuple(values.values())
        if key in drawn or not all(holds(c, {t: values[t.name] for t in sketch.tunables}) for c in sketch.constraints):
            continue
        if max(_number(group_items(sketch.func, k), sketch, values) for k in kernels(sketch.func)) > machine.group_size:
            continue
        share = max(_number(a, sketch, values) / _number(b, sketch, values) for a, b in wanted)
        drawn[key] = values, share
    below, beyond = ([x for x in drawn.values() if low < x[1] <= high] for low, high in ((1 / FAR, 1.0), (1.0, FAR)))
    near = below[: -(-samples // 2)] + beyond[: samples // 2]
    return near or list(drawn.values())[:1]


def examined(name: str, func: PrimFunc, architecture: str, samples: int, rng: random.Random) -> list[Row]:
    """Rows of `samples` candidates of each sketch of a function."""
    machine, compiler = MACHINES[architecture], CUDACompiler(architecture)
    target = CodeTarget("cuda", machine.lanes)
    rows: list[Row] = []
    for rule in GPU_RULES.values():
        for label, s in rule(func, machine):
            sketch = Sketch(label, s.func, s.trace, tuple(s.constraints))
            own = launch_limits(s.func, machine)
            for values, share in _chosen(sketch, machine, samples, rng):
                accepted = all(holds(c, {t: values[t.name] for t in sketch.tunables}) for c in own)
                parts = zip(kernels(s.func), split_kernels(instantiate(sketch, values)), strict=True)
                for part, one in parts:
                    text = generate(one, target)
                    shared = _number(shared_bytes(s.func, part, machine), sketch, values)
                    asked = re.search(r"/\*shared (\d+)\*/", text.source)
                    try:
                        report = compiler.compile([KernelSource(text.name, "cuda", text.source)]).kernels[text.name]
                        held, used = report.registers, report.shared_bytes
                        spilled = report.spill_stores + report.spill_loads
                    except BuildError as error:
                        if "shared data" not in str(error):
                            raise
                        held, used, spilled = 0, shared, 0
                    used = int(asked[1]) if asked else used
                    allowed = min(machine.registers, machine.sm_registers // prod(text.local))
                    rows.append(
                        Row(
                            architecture, name, label, values, text.name, prod(text.local),
                            _number(registers(s.func, part), sketch, values), held, spilled, shared, used, accepted,
                            spilled <= (FEW if held + REGISTER_GRANULE < allowed else 0) and used <= machine.local_bytes, round(share, 3),
                        )
                    )  # fmt: skip
    return rows


def _same_shared(r: Row) -> bool:
    """Return whether bytes of shared memory agree, up to the gaps between arrays, which begin at multiples of 16 bytes."""
    return 0 <= r.shared - r.estimated_shared < 128


def summary(rows: list[Row]) -> tuple[dict[str, float], list[str]]:
    """Rates over candidates (all of whose kernels must fit), and lines of a table."""
    candidates: dict[tuple[object, ...], tuple[bool, bool]] = {}
    for r in rows:
        key = (r.architecture, r.function, r.sketch, tuple(sorted(r.values.items())))
        candidates[key] = (r.accepted, candidates.get(key, (True, True))[1] and r.fits)
    lines = [
        "| sketch | architecture | candidates | fit | accepted | false accepts | false rejects |",
        "|---|---|---|---|---|---|---|",
    ]
    for sketch, architecture in sorted({(str(k[2]), str(k[0])) for k in candidates}):
        mine = [v for k, v in candidates.items() if (k[2], k[0]) == (sketch, architecture)]
        lines.append(
            f"| {sketch} | {architecture} | {len(mine)} | {sum(f for _, f in mine)} | {sum(a for a, _ in mine)} | "
            f"{sum(a and not f for a, f in mine)} | {sum(f and not a for a, f in mine)} |"
        )
    everything = list(candidates.values())
    rates = {
        "candidates": len(everything),
        "fit": sum(f for _, f in everything),
        "false_accepts": sum(a and not f for a, f in everything) / len(everything),
        "false_rejects": sum(f and not a for a, f in everything) / len(everything),
        "shared_differs": sum(not _same_shared(r) for r in rows),
    }
    return rates, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="functions whose name holds this")
    parser.add_argument("--dry", action="store_true", help="print, and write no results")
    options = parser.parse_args()
    rows: list[Row] = []
    for architecture in MACHINES:
        for name, func in functions().items():
            if options.only in name:
                rows += examined(name, func, architecture, options.samples, random.Random(f"{options.seed} {name}"))
    rates, table = summary(rows)
    print(json.dumps(rates), *table, sep="\n")
    for r in rows:
        if options.dry or r.accepted != r.fits or not _same_shared(r):
            print(json.dumps(asdict(r)))
    if options.dry:
        return
    if options.only:
        mine, held = {r.function for r in rows}, json.loads((RESULTS / "ptxas_report.json").read_text())["rows"]
        rows += [Row(**r) for r in held if r["function"] not in mine]
    write(rows, {"nvrtc": CUDACompiler("sm_80").version, "samples": options.samples, "seed": options.seed})


def write(rows: list[Row], settings: Mapping[str, object]) -> None:
    """The results, as numbers and as a table."""
    rates, table = summary(rows)
    facts = environment() | {name: str(value) for name, value in settings.items()}
    text = {"environment": facts, "rates": rates, "rows": [asdict(r) for r in rows]}
    head = (
        f"Written by `experiments/gpu/ptxas_report.py`, {settings['nvrtc']}. Of "
        f"{rates['candidates']} candidates, most of them near the limits, {rates['fit']} fit; false accepts "
        f"{rates['false_accepts']:.1%}, false rejects {rates['false_rejects']:.1%}; shared bytes differ for "
        f"{rates['shared_differs']} kernels."
    )
    lines = ["# Estimates against the assembler", "", head, "", *table]
    write_page("ptxas_report", lines, text, facts, indent=None, quiet=True)


if __name__ == "__main__":
    main()
