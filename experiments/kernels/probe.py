"""Quality of the rules for one kernel before any search: random candidates of every sketch, by the processor time of one thread.

    python -m experiments.kernels.probe softmax_1024x1024 --target c [--symbolic] [--size n=512] [--per-sketch 12] [--source FILE]

The processor time of one thread (the least of many calls) stays meaningful on a busy machine, where wall time does not. On OpenCL the
threads are the driver's, so wall time is used, the least of many calls. Prints a line per sketch: the best candidate's microseconds,
GFLOP/s, GB/s and parameters, and the time of one thread of torch where torch is installed. Nothing is recorded.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before any thread pool is made

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.kernels.model import Kernel
from experiments.kernels.zoo import KERNELS
from relax_tune.errors import RelaxTuneError
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import Program
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.measure.device_process.inputs import random_constants, random_inputs
from relax_tune.tuner.task.extract import extract_tasks
from relax_tune.tuner.task.variants import TaskVariants


def least(run: Callable[[], None], clock: Callable[[], float], secs: float) -> float:
    """The least time of one call, of as many as fit into `secs`."""
    run()
    found, until = [], time.perf_counter() + secs
    while time.perf_counter() < until or len(found) < 3:
        start = clock()
        run()
        found.append(clock() - start)
    return min(found)


def probe(device: Device, program: Program, sizes: dict[str, int], secs: float) -> float:
    """Seconds of the program at these sizes."""
    executor = Executor(program, device, random_constants(program))
    try:
        bound = executor.bind(sizes)
        bound.prepare()
        for index, array in zip(program.inputs, random_inputs(program, sizes, 0), strict=True):
            device.upload(executor.buffer(program.buffers[index].name), array)

        def run() -> None:
            bound.launch()
            device.synchronize()

        return least(run, time.thread_time if device.info.kind == "c" else time.perf_counter, secs)
    finally:
        executor.close()


def torch_secs(kernel: Kernel, sizes: dict[str, int], secs: float) -> float | None:
    """One thread of torch on the same work."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    arrays = kernel.arrays(sizes) | kernel.weights()
    tensors = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}
    with torch.no_grad():
        return least(lambda: kernel.torch(torch, tensors), time.thread_time, secs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("--target", default="c")
    parser.add_argument("--symbolic", action="store_true", help="the table's dims are symbols")
    parser.add_argument("--size", action="append", default=[], help="another size of a dim, as n=64 (with --symbolic)")
    parser.add_argument("--per-sketch", type=int, default=12)
    parser.add_argument("--sketch", default="", help="of sketches whose names start so")
    parser.add_argument("--secs", type=float, default=0.1, help="of calls for each candidate")
    parser.add_argument("--source", type=Path, help="write the best candidate's source here")
    args = parser.parse_args()
    kernel = KERNELS[args.kernel]
    chosen = {**kernel.dims, **{n: int(v) for n, v in (s.split("=") for s in args.size)}}
    device = open_device(args.target)
    machine = HardwareInfo.from_limits(device.info.kind, dict(device.info.limits) | {"workers": 1})
    target = CodeTarget("opencl" if machine.has_grid else "c", machine.lanes)
    lowered = lower(kernel.module(args.symbolic))
    for task in extract_tasks(lowered):
        task_variants = TaskVariants(task, machine, target)
        model = {b.var: chosen[b.var.name] for b in lowered.module.bounds}
        sizes = {f"s{a}": model[e] for a, e in enumerate(task.sites[0])}  # type: ignore[index]
        print(f"{task.name} {sizes or ''}")
        best: tuple[float, str] = (float("inf"), "")
        drawn = task_variants.sketch_set.space.sample(np.random.default_rng(0), 4000)
        seeds = task_variants.sketch_set.seeds(len(task_variants.sketch_set.sketches))
        for number, sketch in enumerate(task_variants.sketch_set.sketches):
            if not sketch.name.startswith(args.sketch):
                continue
            rows = task_variants.sketch_set.space.candidates(drawn[drawn[:, 0] == number][: args.per_sketch])
            rows = [*(c for c in seeds if c.sketch == number), *rows]
            times = []
            for c in rows:
                record = task_variants.sketch_set.record_of(c)
                try:
                    program = task_variants.program(record)
                    secs = probe(device, program, sizes, args.secs)
                except RelaxTuneError as error:
                    print(f"  {sketch.name} {record.values}: {str(error).splitlines()[0]:.120}")
                    continue
                times.append((secs, str(dict(record.values))))
                if secs < best[0]:
                    best = secs, "\n".join(k.source for k in program.kernels)
            if times:
                secs, values = min(times)
                rates = f"{kernel.flops / secs / 1e9:7.1f} GFLOP/s {kernel.bytes / secs / 1e9:6.1f} GB/s"
                print(
                    f"  {sketch.name:32} {secs * 1e6:10.1f} us {rates} {values} (first guess {times[0][0] * 1e6:.1f})"
                )
        if args.source:
            args.source.write_text(best[1])
    peer = torch_secs(kernel, chosen, 5 * args.secs)
    if peer:
        print(f"  torch, one thread {peer * 1e6:24.1f} us {kernel.flops / peer / 1e9:7.1f} GFLOP/s")
    device.close()


if __name__ == "__main__":
    main()
