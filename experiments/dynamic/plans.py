"""Time of deciding all plans of a model: in Python, once per binding of the symbols, and in the C of `relax-tune plan --c`.

The model is a chain of products of different widths, each a task. The recorded times are synthetic, so that the fastest variant
changes with the number of rows; only the time of the decision is measured, which depends on the form of the plans. In Python it
includes the whole scalar list that a new binding evaluates: sizes, grids and checks besides the plans.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relax_tune.database.records import Measurement, Workload
from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.program.plan_c import plans_in_c
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import WIDTH, compile_scalars
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import device_info
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.task import FORMAT_VERSION
from relax_tune.tuner.task.variants import TaskVariants

TOP = 8192
TIMER = """#include <stdint.h>
#include <stdio.h>
#include <time.h>
int32_t main_plan(const int64_t* symbols, int32_t* task_variants);
int main(void) {
  enum { SIZES = 8192, TIMES = 50 };
  static int64_t sizes[SIZES];
  static int32_t task_variants[4096];
  uint64_t state = 1;
  int64_t sum = 0;
  for (int i = 0; i < SIZES; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    sizes[i] = 1 + (int64_t)((state >> 33) % TOP);
  }
  for (int t = 0; t < TIMES; ++t) {
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < SIZES; ++i) {
      sum += main_plan(sizes + i, task_variants);
      sum += task_variants[i % CALLS];
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    printf("%.3f\\n", ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / SIZES);
  }
  return sum < 0;
}
"""


def chain(tasks: int) -> IRModule:
    """A product after another, no two of the same widths."""
    graph = GraphBuilder()
    rows = graph.symbol("n", 1, TOP)
    widths = [16 * (2 + k) for k in range(tasks + 1)]
    x = graph.input("x", [rows, const(widths[0])])
    for k, (width, next_) in enumerate(zip(widths, widths[1:])):
        x = graph.call(Matmul(), x, graph.constant(f"w{k}", np.zeros((width, next_), np.float32)))
    return graph.finish(x)


def made_up(task_variants: TaskVariants, target: str, number: int, variants: int) -> list[Measurement]:
    """Records of the task `number`: of as many variants, each with more to begin with and less for a row than the one before, so that
    they take over from one another, in every task at other sizes."""
    rng = np.random.default_rng(number)
    own = [
        task_variants.sketch_set.generic(),
        *map(task_variants.sketch_set.record_of, task_variants.sketch_set.seeds(variants - 1)),
    ]
    found = []
    for place, variant in enumerate(own):
        begin, row = 3.4**place * rng.uniform(0.7, 1.4), 0.3 * 3.4**-place * rng.uniform(0.7, 1.4)
        for at, (size,) in enumerate(task_variants.task.domain.points):
            secs = 1e-6 * (begin + row * size)
            found.append(
                Measurement(
                    id=f"{task_variants.task.key}.{place}.{at}",
                    workload=task_variants.task.key,
                    target=target,
                    variant=variant,
                    symbols={"s0": size},
                    samples_secs=(secs,) * 3,
                    checked=True,
                )
            )
    return found


def model_program(tasks: int, variants: int) -> tuple[Program, list[int]]:
    """The program of the chain, and how many entries each plan has."""
    store = MemoryStore()
    job = device_job(chain(tasks), device_info("c"), store, Settings(target="c"))
    store.add_target(job.target)
    for number, task_variants in enumerate(job.task_variants.values()):
        store.add_workload(
            Workload(task_variants.task.key, task_variants.task.text, FORMAT_VERSION, task_variants.task.name)
        )
        store.add_measurements(made_up(task_variants, job.target.key, number, variants))
    built = job.build()
    return built.program, [len(p.plan.entries) for p in built.plans.values()]


def python_us(program: Program) -> float:
    """Return the median microseconds in which a new binding decides all plans, each time at another size."""
    evaluate = compile_scalars(program.scalars, len(program.symbols))
    times = []
    for size in np.random.default_rng(0).integers(1, TOP, 500).tolist():
        start = time.perf_counter()
        values = evaluate((size,))
        _ = [values[call.choice] for call in program.calls]
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def c_ns(program: Program, folder: Path) -> float:
    """Median nanoseconds of one call of the generated C, which decides all plans; sizes vary from call to call."""
    (folder / "plans.c").write_text(plans_in_c([program]))
    (folder / "timer.c").write_text(TIMER)
    flags = ["-O2", f"-DTOP={TOP}", f"-DCALLS={len(program.calls)}"]
    sources = [str(folder / name) for name in ("plans.c", "timer.c")]
    subprocess.run(["gcc", *flags, *sources, "-o", str(folder / "timer")], check=True)
    done = subprocess.run([str(folder / "timer")], check=True, capture_output=True, text=True)
    return statistics.median(map(float, done.stdout.split()))


def measured(folder: Path, tasks: int, variants: int) -> dict[str, Any]:
    """Return the times of deciding, and the numbers of tasks, entries and instructions."""
    program, entries = model_program(tasks, variants)
    ns = c_ns(program, folder)
    return {
        "tasks": len(program.calls),
        "entries": statistics.mean(entries),
        "instructions": len(program.scalars) // WIDTH,
        "python_us": python_us(program),
        "c_ns": ns,
        "c_ns_a_plan": ns / len(program.calls),
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """As Markdown."""
    return [
        f"A model of {found['tasks']} tasks, {found['entries']:.1f} entries a plan, {found['instructions']} scalar instructions in all. "
        f"One evaluation in Python: {found['python_us']:.1f} us (goal: at most 200 us for 50 tasks). In C: {found['c_ns']:.0f} ns a "
        f"call, {found['c_ns_a_plan']:.2f} ns a plan (goal: at most 10 ns)."
    ]
