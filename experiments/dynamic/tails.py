"""Ways to handle the last, incomplete tile of a symbolic dim, all else equal: DietCode's ablation with our schedules.

`python -m experiments.dynamic.tails [--tiny] [c] [opencl]` times a product, a row sum and an elementwise function at sizes that are and
are not multiples of the tile, in every mode, interleaved and with checked outputs. It writes ratios to the best mode to
results/tails.json and tails.md (--tiny: one small size, only printed).

predicate: a condition on every point of a tile. peel: no conditions in whole tiles (DietCode's partition). pow2: the rest in tiles of
descending powers of two. exact: the rest as one tile of its height. padding: tiles of padded copies (local padding). regions: one loop
nest for whole tiles and one for the rest, with different schedules. Balanced tiles are not included: their heights are not constants,
so that their sums could not be in registers.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.harness.pages import environment, write_page
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.core.expr import Expr, Var, call, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Tail, blocks
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.runtime.program.program import Program
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.vectorize import accumulate, in_vectors
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import simplify_func
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.measure.messages import MeasureRequest, TimingPolicy
from relax_tune.tuner.program.program_builder import KernelStage, candidate_program
from relax_tune.tuner.task.check import check_case
from relax_tune.tuner.task.domain import Domain
from relax_tune.tuner.task.task import Task

MARKS: Mapping[str, Tail] = {"predicate": "predicate", "peel": "peel", "pow2": "pow2", "exact": "exact"}
MODES = (*MARKS, "padding", "regions")
TILE_ROWS, ROWS, DEPTH, WIDTH = 8, 64, 256, 256
TINY = (5,)
POLICY = TimingPolicy(7, 60, 0.2, 0.5)


def product() -> PrimFunc:
    """Y(n, WIDTH) = X(n, DEPTH) W."""
    b = TensorBuilder("product")
    n = Var("n")
    x, w, y = b.input("X", (n, DEPTH)), b.input("W", (DEPTH, WIDTH)), b.output("Y", (n, WIDTH))
    b.reduce(y, (DEPTH,), const(0.0), lambda acc, i, j, k: acc + x[i, k] * w[k, j], name="main")
    return b.finish()


def row_sum() -> PrimFunc:
    """Y(ROWS) = sums of the rows of X(ROWS, n)."""
    b = TensorBuilder("row_sum")
    n = Var("n")
    x, y = b.input("X", (ROWS, n)), b.output("Y", (ROWS,))
    b.reduce(y, (n,), const(0.0), lambda acc, i, k: acc + x[i, k], name="main")
    return b.finish()


def elementwise() -> PrimFunc:
    """Y = tanh(X) of (ROWS, n)."""
    b = TensorBuilder("elementwise")
    n = Var("n")
    x, y = b.input("X", (ROWS, n)), b.output("Y", (ROWS, n))
    b.compute(y, lambda i, j: call("tanh", x[i, j]), name="main")
    return b.finish()


def product_under(mode: str, machine: HardwareInfo) -> Schedule:
    """Register tiles of TILE_ROWS rows by two vectors, written out at the end; panels of columns are shared out."""
    s = Schedule(product())
    if mode == "padding":
        s.apply("pad", block="main", factors=[TILE_ROWS, None, None])
        s.apply("set_scope", buffer="Y_pad", scope="local")
    else:
        s.apply("cache_write", block="main", scope="local")
    out = blocks(s.func.body)[-1].name
    i, j, k = s.loops_of("main")
    j_0, j_1 = s.split(j, [None, 2 * machine.lanes], divides=True)
    i_0, i_1 = s.split(i, [None, TILE_ROWS])
    s.set_tail(i_0, MARKS.get(mode, "predicate"))
    s.reorder([j_0, i_0, k, i_1, j_1])
    if mode == "padding":
        s.compute_at("X_pad_fill", i_0)
        s.apply("set_scope", buffer="X_pad", scope="local")
    rows, columns = s.reverse_compute_at(out, i_0)
    if mode == "regions":
        s.apply("partition", loop=i_0, at=s.func.symbols[0] // TILE_ROWS)
        _in_turn(s, "main_tail", f"{out}_tail")
    for name in (rows, i_1):
        s.set_kind(name, "unrolled")
    for name in (columns, j_1):
        s.set_kind(name, "vectorized")
    s.apply("decompose_reduction", block="main", loop=k)
    s.set_kind(j_0, "group" if machine.has_grid else "parallel")
    return s


def _in_turn(s: Schedule, block: str, out: str) -> None:
    """Rows of the rest one after the other: no tile, so none that is computed and thrown away."""
    s.set_kind(s.loops_of(block)[-1], "vectorized")
    s.set_kind(s.loops_of(out)[-1], "vectorized")
    s.apply("decompose_reduction", block=block, loop=s.loops_of(block)[2])


def rows_under(func: PrimFunc, mode: str, machine: HardwareInfo) -> Schedule:
    """Rows are shared out; each runs through its columns in tiles of four vectors, sums with an accumulator for every lane."""
    s, tile = Schedule(func), 4 * machine.lanes
    if mode == "padding":
        s.apply("pad", block="main", factors=[None, tile])
    row, column = s.loops_of("main")
    if mode == "regions":
        s.apply("partition", loop=column, factor=tile)
    c_0, c_1 = s.split(column, [None, tile])
    s.set_tail(c_0, MARKS.get(mode, "predicate"))
    if find_block(s.func, "main").is_reduction:
        accumulate(s, "main", c_1)
    s.set_kind(c_1, "vectorized")
    names = {b.name for b in blocks(s.func.body)}
    if "X_pad_fill" in names:
        s.compute_at("X_pad_fill", row)
        in_vectors(s, "X_pad_fill", s.loops_of("X_pad_fill")[-1], tile)
    if "Y_pad_take" in names:
        s.reverse_compute_at("Y_pad_take", row)
        in_vectors(s, "Y_pad_take", s.loops_of("Y_pad_take")[-1], tile)
    s.set_kind(row, "group" if machine.has_grid else "parallel")
    return s


@dataclass(frozen=True)
class Case:
    """A function of one symbol, and its schedule under a mode."""

    make: Callable[[], PrimFunc]
    under: Callable[[str, HardwareInfo], Schedule]
    tile: Callable[[HardwareInfo], int]

    def sizes(self, machine: HardwareInfo) -> tuple[int, ...]:
        """One, primes, and sizes on the tile and next to it."""
        tile = self.tile(machine)
        return tuple(sorted({1, 37, 127, 509, *(tile * k + d for k in (1, 4, 16) for d in (-1, 0, 1))}))


CASES = {
    "product": Case(product, product_under, lambda _: TILE_ROWS),
    "row_sum": Case(row_sum, lambda mode, machine: rows_under(row_sum(), mode, machine), lambda m: 4 * m.lanes),
    "elementwise": Case(
        elementwise, lambda mode, machine: rows_under(elementwise(), mode, machine), lambda m: 4 * m.lanes
    ),
}


def programs(case: Case, task: Task, machine: HardwareInfo, target: CodeTarget) -> dict[str, Program]:
    """A program for each mode that makes other code than those before it."""
    found: dict[str, Program] = {}
    for mode in MODES:
        stage = KernelStage(simplify_func(case.under(mode, machine).func))
        # parameters are the same buffers in the task's function and in what was scheduled, by position
        stage = KernelStage(
            stage.func, dict(zip(stage.func.buffers, task.func.buffers, strict=True)), _meaning(stage, task)
        )
        made = candidate_program(task.func, "tuned", (stage,), target, task.symbol_names)
        if made.kernels not in [p.kernels for p in found.values()]:
            found[mode] = made
    return found


def _meaning(stage: KernelStage, task: Task) -> dict[Var, Expr]:
    return dict(zip(stage.func.symbols, task.func.symbols, strict=True))


def measured(case: Case, runner: Runner, sizes: Sequence[int] | None) -> dict[str, dict[int, float]]:
    """Seconds of every mode at every size."""
    info = runner.device_info()
    machine = HardwareInfo.from_limits(info.kind, dict(info.limits))
    func, sizes = case.make(), sizes or case.sizes(machine)
    task = Task(workload_key(func), "", func, (), Domain(tuple((n,) for n in sizes), (1 / len(sizes),) * len(sizes)))
    target = CodeTarget("opencl" if machine.has_grid else "c", machine.lanes)
    checks = (check_case(task, 0), check_case(task, 1))
    made = programs(case, task, machine, target)
    requests = [MeasureRequest(mode, p.to_json(), checks, task.bindings(), POLICY) for mode, p in made.items()]
    found: dict[str, dict[int, float]] = {}
    for result in runner.submit(requests).result():
        if result.status != "ok":
            raise SystemExit(f"{func.name} under {result.id}: {result.stage}: {result.message}")
        found[result.id] = {n: statistics.median(t.samples_secs) for n, t in zip(sizes, result.timings, strict=True)}
    return {mode: found[mode] for mode in made}


def table(name: str, found: Mapping[str, Mapping[int, float]]) -> str:
    """Ratios to the best mode at each size, and their geometric mean."""
    sizes = list(next(iter(found.values())))
    best = {n: min(row[n] for row in found.values()) for n in sizes}
    lines = [f"| {name} | " + " | ".join(f"n={n}" for n in sizes) + " | mean |", "|---" * (len(sizes) + 2) + "|"]
    for mode, row in found.items():
        ratios = [row[n] / best[n] for n in sizes]
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        lines.append(f"| {mode} | " + " | ".join(f"{r:.2f}" for r in (*ratios, mean)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure on the targets named, both when none is."""
    before = environment()
    tiny = "--tiny" in sys.argv
    kinds = [a for a in sys.argv[1:] if not a.startswith("--")] or ["c", "opencl"]
    results: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    texts = ["# Tail handling: time over that of the best mode at each size"]
    for kind in kinds:
        runner = LocalRunner(kind)
        try:
            results[kind] = {name: measured(case, runner, TINY if tiny else None) for name, case in CASES.items()}
        finally:
            runner.close()
        texts += [f"## {kind}", *(table(name, found) for name, found in results[kind].items())]
    text = "\n\n".join(texts) + "\n"
    if tiny:
        print(text)
    else:
        write_page("tails", text.splitlines(), {"environment": before, "median_secs": results}, before)


if __name__ == "__main__":
    main()
