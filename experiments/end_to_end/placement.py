"""Placements of a model's calls on two devices: the chosen placement against all others, by measurement.

    python -m experiments.end_to_end.placement --db /tmp/placement.db --tune   # measures tasks and links
    python -m experiments.end_to_end.placement --db /tmp/placement.db          # builds every placement and times them in turns

Models: a chain of products and row-wise functions, a product read by two others, and two independent sides. Every placement of the
calls on `c` and `opencl` (PoCL on this processor) is built from the same records. All are open at once, and rounds of a few calls take
turns. A row is a model at a shape. Columns: the time of the chosen placement, of the fastest one, of the single devices (medians of the
rounds), of the model built for `c` only, the regret (the chosen time over the fastest, less one), the predicted time, and how many
placements are slower than the chosen one.

The last table runs two independent calls on devices whose launches last 50 ms each: run concurrently, they take little more than 50 ms.

Writes experiments/results/placement.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.harness.pages import environment, write_page
from relax_tune.database.store import MemoryStore, Store, open_store
from relax_tune.ir.core.expr import as_int, const, substitute
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.devices import HintOnDevice
from relax_tune.ir.op.math.elementwise import Gelu, Relu, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.placement import Placement
from relax_tune.tuner.emit.emit_placed import PlacementPlan
from relax_tune.tuner.job.device_job import build_here, device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.job.job import Build, Job, job_for, placed_artifact
from relax_tune.tuner.placement.costs import FunctionCosts
from relax_tune.tuner.placement.links import record_link
from relax_tune.tuner.placement.solve import HOME_DEVICE
from relax_tune.tuner.settings import Settings

SHAPES = (1, 32, 512)
ROUNDS, CALLS = 15, 4
WIDTH = 256
SETTINGS = Settings(effort="quick", trials=16, self_test=False)


def weight(g: GraphBuilder, name: str) -> Any:
    return g.constant(name, np.random.default_rng(len(name)).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 16)


def chain() -> IRModule:
    """Five calls: product, softmax, product, softmax, product."""
    g = GraphBuilder()
    x: Any = g.input("x", (g.symbol("n", 1, 512), WIDTH))
    for at in range(3):
        x = g.call(Matmul(), x, weight(g, f"w{at}"))
        x = g.call(Softmax(), x) if at < 2 else x
    return g.finish(x)


def fan() -> IRModule:
    """Return a product whose result two others read, each through a separate function."""
    g = GraphBuilder()
    x = g.call(Matmul(), g.input("x", (g.symbol("n", 1, 512), WIDTH)), weight(g, "w"))
    return g.finish([g.call(Matmul(), g.call(op, x), weight(g, f"w{i}")) for i, op in enumerate((Relu(), Gelu()))])


def sides() -> IRModule:
    """Two independent pairs of a product and a softmax."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 512), WIDTH))
    return g.finish([g.call(Softmax(), g.call(Matmul(), x, weight(g, f"w{i}"))) for i in range(2)])


MODELS: Mapping[str, Callable[[], IRModule]] = {"chain": chain, "fan": fan, "sides": sides}


def job_of(module: IRModule, devices: Mapping[str, Device], store: Store) -> Job:
    return job_for(module, {kind: d.info for kind, d in devices.items()}, store, SETTINGS)


def tune(devices: Mapping[str, Device], store: Store) -> None:
    for name, make in MODELS.items():
        job = job_of(make(), devices, store)
        for kind, own in job.parts.items():
            with contextlib.closing(open_runner(own.settings)) as runner:
                print(name, kind, own.tune(runner).measurements, flush=True)
    target = job.parts["opencl"].target
    print(record_link(store, target, devices["opencl"], time.time()))


def median(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def time_all(job: Job, devices: Mapping[str, Device]) -> tuple[Build, dict[str, Any]]:
    """Time every placement of a model at every shape."""
    built = {k: build_here(j, "measured") for k, j in job.parts.items()}
    build = job.build()
    (placement,) = (build.placements or {}).values()
    calls = [v for v, _ in placement.costs.graph.calls]
    every = list(itertools.product(range(len(devices)), repeat=len(calls)))
    plain = device_job(job.first.module, devices["c"].info, job.first.store, replace(SETTINGS, target="c"))
    rows: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(plain.artifact(build_here(plain, "measured")).open(devices["c"]))
        opened: dict[tuple[int, ...], Model] = {}
        for chosen in every:
            plan = PlacementPlan(({v: placement.costs.devices[d] for v, d in zip(calls, chosen)},))
            found = job.emit(built, {"main": plan})
            artifact = placed_artifact(job.lowered, found, Placement(found.parts), {})
            opened[chosen] = stack.enter_context(artifact.open(devices))
        for n in SHAPES:
            x = np.random.default_rng(n).standard_normal((n, WIDTH)).astype(np.float32)
            copied = [copied_bytes(model, x) for model in opened.values()]
            least = [least_copied(placement.costs, c, n) for c in every]
            times: dict[tuple[int, ...], list[float]] = {c: [] for c in every}
            plain_times: list[float] = []
            for _ in range(ROUNDS):
                plain_times.append(median(lambda a=x: alone.run([a])))  # type: ignore[misc]
                for chosen, model in opened.items():
                    times[chosen].append(median(lambda m=model, a=x: m.run([a])))  # type: ignore[misc]
            secs = {c: statistics.median(t) for c, t in times.items()}
            option = next(int(e.variant) for e in placement.plan.entries if all(t.holds((n,)) == w for t, w in e.tests))
            taken = placement.options[option]
            best = min(secs, key=lambda c: secs[c])
            names = placement.costs.devices
            rows[str(n)] = {
                "chosen": "".join(names[d][0] for d in taken),
                "chosen_secs": secs[taken],
                "best": "".join(names[d][0] for d in best),
                "best_secs": secs[best],
                "single": {d: secs[(i,) * len(calls)] for i, d in enumerate(names)},
                "plain_secs": statistics.median(plain_times),
                "regret": secs[taken] / secs[best] - 1,
                "predicted_secs": placement.costs.problem((n,)).total(taken),
                "slower": sum(secs[c] > secs[taken] for c in every),
                "of": len(every) - 1,
                "copied": sum(copied),
                "least_copied": sum(least),
                "minimal": sum(a == b for a, b in zip(copied, least, strict=True)),
            }
    return build, rows


def copied_bytes(model: Model, x: Any) -> int:
    """Return the bytes that a call copies between devices."""
    before = model.placed.copied.total()
    model.run([x])
    return model.placed.copied.total() - before


def least_copied(costs: FunctionCosts, chosen: Sequence[int], n: int) -> int:
    """Return the fewest bytes of a placement on two devices: each value once to the other device, if that reads it."""
    values = {v: const(n) for v in costs.symbols}
    found = 0
    for t in costs.graph.tensors:
        made = HOME_DEVICE if t.maker is None else chosen[t.maker]
        read = {chosen[r] for r in t.readers} | ({HOME_DEVICE} if t.returned else set())
        found += len(read - {made}) * (as_int(substitute(t.nbytes, values)) or 0)
    return found


class Lasting:
    """A device whose launches last so long, without using the processor."""

    def __init__(self, device: Device, secs: float) -> None:
        self._device, self._secs = device, secs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def bind(self, *args: Any) -> Callable[[], None]:
        launch = self._device.bind(*args)

        def lasting() -> None:
            time.sleep(self._secs)
            launch()

        return lasting

    def record(self, launches: Any) -> None:
        return None


def side_by_side(devices: Mapping[str, Device], secs: float = 0.05) -> dict[str, float]:
    """Time two independent calls on devices on which each lasts `secs`."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 64), 8))
    made = [g.call(HintOnDevice(d), g.call(op, x)) for d, op in (("c", Tanh()), ("opencl", Relu()))]  # a launch each
    job = job_of(g.finish(made), devices, MemoryStore())
    artifact = job.artifact(job.build("generic"))
    given: Any = {kind: Lasting(device, secs) for kind, device in devices.items()}
    with artifact.open(given) as model:
        array = np.ones((4, 8), np.float32)
        model.run([array])
        times = []
        for _ in range(10):
            start = time.perf_counter()
            model.run([array])
            times.append(time.perf_counter() - start)
    return {"call_secs": secs, "both_secs": statistics.median(times), "worst_secs": max(times)}


def report(found: Mapping[str, Any]) -> str:
    lines = ["# Placements on two devices", ""]
    lines += ["`c` and `o` (opencl, PoCL) are the devices of the calls in order. Times are microseconds.", ""]
    lines += [
        "| model | n | chosen | time | fastest | time | regret | all c | all opencl | built for c alone | predicted | slower placements |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for name, rows in found["models"].items():
        for n, r in rows.items():
            cells = [
                name, n, r["chosen"], f"{r['chosen_secs'] * 1e6:.0f}", r["best"], f"{r['best_secs'] * 1e6:.0f}",
                f"{r['regret']:.1%}", *(f"{s * 1e6:.0f}" for s in r["single"].values()),
                f"{r['plain_secs'] * 1e6:.0f}", f"{r['predicted_secs'] * 1e6:.0f}",
                f"{r['slower']} of {r['of']}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Bytes that a call copies between the devices, summed over every placement, and the fewest possible.",
        "",
    ]
    lines += ["| model | n | copied | fewest | placements with the fewest |", "|---|---|---|---|---|"]
    for name, rows in found["models"].items():
        for n, r in rows.items():
            lines.append(f"| {name} | {n} | {r['copied']} | {r['least_copied']} | {r['minimal']} of {r['of'] + 1} |")
    s = found["side_by_side"]
    lines += ["", "| two independent calls of | both, median of 10 | both, worst |", "|---|---|---|"]
    lines.append(f"| {s['call_secs'] * 1e3:.0f} ms | {s['both_secs'] * 1e3:.1f} ms | {s['worst_secs'] * 1e3:.1f} ms |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", required=True)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    devices = {kind: open_device(kind) for kind in ("c", "opencl")}
    with open_store(args.db) as store:
        if args.tune:
            tune(devices, store)
            return
        facts = environment()
        models = {name: time_all(job_of(make(), devices, store), devices)[1] for name, make in MODELS.items()}
    found = {"environment": facts, "models": models, "side_by_side": side_by_side(devices)}
    write_page("placement", report(found).splitlines(), found, found["environment"])


if __name__ == "__main__":
    main()
