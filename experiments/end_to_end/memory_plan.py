"""Bytes of planned activations against a lower bound and against TVM's plan, at several bindings of the symbols.

    python -m experiments.end_to_end.memory_plan

Models: the MiniLM encoder and tiny_bert (ONNX), a chain of feed-forward parts, and 24 layers of a decoder (see compile_time) as prefill
and as decode with a cache. Each is lowered and planned once; then its symbols are bound. Columns, all without inputs, weights and results:

* bound: the live-set lower bound, the most bytes that are in use at one time; no plan can be below it.
* planned: one symbolic plan for every shape.
* by proof: a symbolic plan in which a storage is reused, in order, only if the requested size is provably at most the storage's.
* equal sizes: the same, but a storage is reused only for the same size expression.
* offsets: one arena, planned for each shape when it is known: the largest value first, each at the lowest free offset.
* no reuse: every value in separate memory.
* TVM: the storages of TVM's StaticPlanBlockMemory over the same operators, after its legalisation and fusion. Its fusion differs from
  ours, so it has other values to place: that is part of what is compared. TVM 0.27 cannot import tiny_bert (a dynamic Reshape).
* with: the plan that also holds what kernels and library calls need while they run, for a described AVX2 machine whose products are
  OpenBLAS's (packed operands, products before their epilogues). bound with: the bytes in use at one time, including these. apart: the
  plan of the values alone, plus storages for workspaces that all calls share, each as large as the largest with its number.
* constant, TVM constant: both plans when the upper bounds of all symbols are used, so that memory is allocated once for all shapes.

Writes experiments/results/memory_plan.json and .md. Nothing is timed: the numbers do not depend on the machine. TVM needs the package
apache-tvm (and onnx); without it its columns say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from experiments.code.compile_time import MINILM, decoder
from experiments.harness.pages import ROOT, environment, write_page
from relax_tune.database.store import MemoryStore
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.expr import Expr, as_int, const, le, substitute
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.op.base import env_of
from relax_tune.ir.op.math.elementwise import Add, Gelu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.library.library_forms import ALTERNATIVES
from relax_tune.ir.passes.memory.memory_plan import Lifetime, PlanMemory, lifetimes
from relax_tune.ir.passes.pipeline import LoweredModule
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.emit.emit_graph import workspaces
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.plan.plans import plan_task
from relax_tune.tuner.program.program_builder import ProgramBuilder
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.variants import TaskVariants

TINY_BERT = ROOT / "tests" / "data" / "tiny_bert.onnx"
Sizes = Mapping[str, int]
Needs = Mapping[GVar, Sequence[Expr]]
LIMITS = (("l1_bytes", 32 << 10), ("l2_bytes", 512 << 10), ("registers", 16), ("vector_bits", 256), ("workers", 2))


def feed_forward(parts: int = 6, width: int = 384, inner: int = 1536) -> IRModule:
    """x + gelu(x w1) w2, `parts` times, over n rows."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 1024), width))
    for i in range(parts):
        first, second = (
            g.constant(f"{name}{i}", np.broadcast_to(np.float32(0.1), shape))
            for name, shape in (("w", (width, inner)), ("v", (inner, width)))
        )
        x = g.call(Add(), x, g.call(Matmul(), g.call(Gelu(), g.call(Matmul(), x, first)), second))
    return g.finish(x)


def grid(batch: str, length: str, lengths: Sequence[int], batches: Sequence[int]) -> list[Sizes]:
    return [{batch: b, length: n} for n in lengths for b in batches]


MODELS: Mapping[str, tuple[Callable[[], IRModule], list[Sizes]]] = {
    "MiniLM": (lambda: load_model(MINILM), grid("b", "n", (1, 16, 128, 512), (1, 8))),
    "tiny_bert (ONNX)": (
        lambda: load_model(TINY_BERT),
        grid("batch", "seq", (1, 13, 32), (1, 3)),
    ),
    "feed-forward, 6 parts": (feed_forward, [{"n": n} for n in (1, 64, 1024)]),
    "prefill, 24 layers": (lambda: decoder(24), [{"b": 1, "n": n} for n in (128, 256, 512, 1024)]),
    "decode, 24 layers": (lambda: decoder(24, cache=True), [{"b": b, "n": 1, "m": 512} for b in (1, 4, 16, 64)]),
}


def bind(module: IRModule, sizes: Sizes) -> Callable[[Expr], int]:
    known = {b.var: const(sizes[b.var.name]) for b in module.bounds}

    def number(e: Expr) -> int:
        found = as_int(substitute(e, known))
        assert found is not None, e
        return found

    return number


def walk(lives: Sequence[Lifetime], number: Callable[[Expr], int], fits: Callable[[Expr, Expr], bool]) -> int:
    """Bytes of a plan that reuses, in order, the smallest free storage that fits."""
    sizes: list[Expr] = []
    free: list[int] = []
    live: list[tuple[int, int]] = []
    for life in lives:
        for item in [x for x in live if x[0] < life.first]:
            live.remove(item)
            free.append(item[1])
        fitting = sorted((s for s in free if fits(life.nbytes, sizes[s])), key=lambda s: number(sizes[s]))
        if fitting:
            free.remove(fitting[0])
        else:
            sizes.append(life.nbytes)
        live.append((life.last, fitting[0] if fitting else len(sizes) - 1))
    return sum(map(number, sizes))


def arena(lives: Sequence[Lifetime], nbytes: Mapping[Lifetime, int]) -> int:
    """Bytes of one arena in which the largest are placed first, each as low as it fits."""
    placed: dict[Lifetime, int] = {}
    for life in sorted(lives, key=lambda life: -nbytes[life]):
        at = 0
        meeting = (x for x in placed if x.first <= life.last and life.first <= x.last)
        for low, high in sorted((placed[x], placed[x] + nbytes[x]) for x in meeting):
            if low - at >= nbytes[life]:
                break
            at = max(at, high)
        placed[life] = at
    return max((at + nbytes[life] for life, at in placed.items()), default=0)


def lowered_with(module: IRModule) -> tuple[LoweredModule, Needs]:
    """The lowered module, and bytes that each call needs while it runs."""
    device = DeviceInfo("c", "described", (), LIMITS)
    job = device_job(module, device, MemoryStore(), Settings("c"))
    task_variants = {t.name: TaskVariants(t, job.hardware, job.code_target, ALTERNATIVES) for t in job.tasks}
    plans = {name: plan_task(own, (), "library") for name, own in task_variants.items()}
    main = job.lowered.functions["main"]
    found = workspaces(job.lowered.module, main, task_variants, plans, ProgramBuilder("main", job.code_target))
    return job.lowered, {v: sizes for v, (sizes, _) in found.items()}


def live(lives: Sequence[Lifetime], nbytes: Mapping[Lifetime, int]) -> int:
    """The most bytes in use at one step."""
    steps = {life.first for life in lives}
    return max((sum(v for life, v in nbytes.items() if life.first <= at <= life.last) for at in steps), default=0)


def row(module: IRModule, needs: Needs, sizes: Sizes) -> dict[str, int | None]:
    """Return the bytes in each of our columns at one binding."""
    number, lives = bind(module, sizes), lifetimes(module)
    everything = lifetimes(module, workspaces=needs)
    places = [[number(own[p]) for own in needs.values() if len(own) > p] for p in range(max(map(len, needs.values())))]
    nbytes = {life: number(life.nbytes) for life in lives}
    env = env_of(module.bounds)

    def proved(a: Expr, b: Expr) -> bool:
        return a is b or prove(le(a, b), env) is Proof.YES

    return {
        "bound": live(lives, nbytes),
        "planned": (planned := sum(map(number, PlanMemory().plan(module).storages))),
        "bound with": live(everything, {life: number(life.nbytes) for life in everything}),
        "with": sum(map(number, PlanMemory().plan(module, workspaces=needs).storages)),
        "apart": planned + sum(map(max, places)),
        "by proof": walk(lives, number, proved),
        "equal sizes": walk(lives, number, lambda a, b: a is b),
        "offsets": arena(lives, nbytes),
        "no reuse": sum(nbytes.values()),
        "constant": None if upper_bounds(module) is None else sum(map(number, PlanMemory(True).plan(module).storages)),
    }


def upper_bounds(module: IRModule) -> Mapping[str, int] | None:
    """By name, where every symbol has one."""
    found = {b.var.name: b.upper for b in module.bounds if b.upper is not None}
    return found if len(found) == len(module.bounds) else None


def tvm_plans(module: IRModule) -> dict[str, Callable[[Sizes], int]]:
    """TVM's columns; none without TVM."""
    try:
        import tvm_memory  # type: ignore[import-not-found]
    except ImportError:
        return {}

    upper = upper_bounds(module)
    plans = {"TVM": tvm_memory.planned(tvm_memory.from_graph(module))}
    return (
        plans if upper is None else {**plans, "TVM constant": tvm_memory.planned(tvm_memory.from_graph(module), upper)}
    )


def tvm_version() -> str:
    try:
        return version("apache-tvm")
    except PackageNotFoundError:
        return "not installed"


OURS = ("bound", "planned", "bound with", "with", "apart", "by proof", "equal sizes", "offsets", "no reuse")
COLUMNS = (*OURS, "TVM", "constant", "TVM constant")


def main() -> None:
    result = {}
    lines = ["# Planned activation bytes", ""]
    lines += ["Written by `experiments/end_to_end/memory_plan.py`, which describes the columns; KiB."]
    lines += ["", f"| model | storages | binding | {' | '.join(COLUMNS)} | planned / bound | TVM / planned |"]
    lines += ["|---" * (len(COLUMNS) + 5) + "|"]
    for name, (make, bindings) in MODELS.items():
        module = make()
        others = {} if "ONNX" in name else tvm_plans(module)
        lowered, needs = lowered_with(module)
        module = lowered.module
        count = len(PlanMemory().plan(module).storages)
        rows = [
            (sizes, {**row(module, needs, sizes), **{c: f(sizes) for c, f in others.items()}}) for sizes in bindings
        ]
        for sizes, found in rows:
            where = ", ".join(f"{k}={v}" for k, v in sizes.items())
            kib = " | ".join("-" if found.get(c) is None else f"{(found[c] or 0) / 1024:.1f}" for c in COLUMNS)
            ours, bound, peer = found["planned"] or 0, found["bound"] or 1, found.get("TVM")
            ratios = f"{ours / bound:.3f} | {'-' if peer is None else f'{peer / ours:.2f}'}"
            lines.append(f"| {name} | {count} | {where} | {kib} | {ratios} |")
        result[name] = {"storages": count, "rows": [{"binding": dict(s), "bytes": r} for s, r in rows]}
    facts = environment() | {"apache-tvm": tvm_version()}
    write_page("memory_plan", lines, {"environment": facts, "models": result}, facts)


if __name__ == "__main__":
    main()
