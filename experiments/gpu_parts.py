"""The parts of `gpu_suite.py`, each a function that gives rows; started by it, one process a part.

python experiments/gpu_parts.py PART --work FOLDER --secs SECS [--target cuda] [--peer-python PYTHON] [--tiny]

A row is written as soon as it is found, to FOLDER/PART.jsonl, and not found again when the part is started anew. What was tuned is in
FOLDER/records.db.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from gpu_cases import DECODERS, LENGTHS
from gpu_models import TYPES, decoder_folder, memory_bound, product
from gpu_timing import Copies, seconds

from relax_tune.database.store import MemoryStore, open_store
from relax_tune.errors import BuildError, RelaxTuneError
from relax_tune.ir.dtype import bf16, f16
from relax_tune.ir.frontend.hf import load_hf
from relax_tune.ir.function import IRModule
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.library.cublas import CuBlas
from relax_tune.runtime.program import KernelSource
from relax_tune.runtime.vm import Executor
from relax_tune.tuner.job import Job, open_runner
from relax_tune.tuner.loop import Progress
from relax_tune.tuner.measure.inputs import random_constants, random_inputs
from relax_tune.tuner.settings import Policy, Settings

HERE = Path(__file__).parent
ROOT = HERE.parent
Row = dict[str, Any]

COPY = """struct __align__(16) rt_four { float x, y, z, w; };
extern "C" __global__ void __launch_bounds__(256) copy(const rt_four *__restrict__ a, rt_four *__restrict__ b, long long n) {
  const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  if (i < n) b[i] = a[i];
}
"""
NOTHING = 'extern "C" __global__ void nothing(float *a) { if (a == 0) a[0] = 1.0f; }\n'


class OutOfTimeError(BaseException):
    """The part's share is used up. No Exception: a tuning job takes those for failures of one task."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a part is given. until: of time.monotonic; done: keys of the rows that were found before."""

    work: Path
    target: str
    peer_python: str
    tiny: bool
    until: float
    done: frozenset[str]

    def left(self) -> float:
        """Seconds until the part should end."""
        return self.until - time.monotonic()

    def new(self, keys: Sequence[str]) -> list[str]:
        """Those for which there is no row yet."""
        return [k for k in keys if k not in self.done]


def absent(key: str, why: object) -> Row:
    return {"key": key, "absent": " ".join(str(why).split())[:200]}


def card(context: Context) -> Iterator[Row]:
    """The GPU, its driver, and what is installed."""
    device = open_device(context.target)
    info = dict(device.info.fingerprint)
    row: Row = {"device": device.info.name, "date": time.strftime("%Y-%m-%d")}
    row |= {k: info[k] for k in ("compute", "units", "memory", "cuda", "compiler")}
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        asked = [smi, "--query-gpu=driver_version,clocks.max.sm,clocks.max.memory,power.limit", "--format=csv,noheader"]
        row["nvidia-smi"] = subprocess.run(asked, capture_output=True, text=True).stdout.strip().splitlines()[0]
    row["python"] = platform.python_version()
    try:
        row["cublas"] = dict(CuBlas().fingerprint())["version"]
    except BuildError as error:
        row["cublas"] = f"none: {error}"[:200]
    row["torch"] = _version(context.peer_python)
    device.close()
    yield {"key": "card"} | row


def _version(python: str) -> str:
    code = "import torch; print(torch.__version__, torch.cuda.is_available())"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "none"


def tests(context: Context) -> Iterator[Row]:
    """`pytest -m cuda`."""
    if importlib.util.find_spec("pytest") is None:
        yield absent("pytest", "the package pytest")
        return
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "cuda",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests/runtime"),
    ]
    if context.tiny:
        command += ["-k", "test_upload_then_download"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=context.left())
    except subprocess.TimeoutExpired:
        raise OutOfTimeError from None
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    failed = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
    yield {"key": "pytest -m cuda", "status": done.returncode, "said": lines[-1], "failed": "; ".join(failed[:10])}


SANITIZERS = ("memcheck", "racecheck")


def sanitizer(context: Context) -> Iterator[Row]:
    """Candidates of every sketch of a few functions, run under compute-sanitizer; by themselves where that is not installed."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    run = [sys.executable, str(HERE / "gpu_parts.py"), "candidates", "--work", str(context.work)]
    run += ["--target", context.target, "--secs", "15", *["--tiny"] * context.tiny]
    if tool is None:
        yield absent("compute-sanitizer", "the tool; candidates ran without it")
    for name in context.new(SANITIZERS if tool else ("alone",)):
        (context.work / "candidates.jsonl").unlink(missing_ok=True)
        under = [tool, "--tool", name, "--error-exitcode", "9"] if tool else []
        try:
            done = subprocess.run([*under, *run], capture_output=True, text=True, timeout=max(1.0, context.left()))
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        said = [line for line in (done.stdout + done.stderr).splitlines() if "=====" in line] or [done.stderr[-200:]]
        path = context.work / "candidates.jsonl"
        ran = len(path.read_text().splitlines()) if path.exists() else 0
        yield {"key": name, "candidates": ran, "status": done.returncode, "said": said[-1][:200]}


def candidates(context: Context) -> Iterator[Row]:
    """A first guess and a random candidate of every sketch, at small sizes off any tile. Of `sanitizer`."""
    device, rng = open_device(context.target), np.random.default_rng(0)
    modules = {f"{name} {kind}": m for kind in ("f32", "f16") for name, m in memory_bound(kind, 100, 70).items()}
    modules |= {
        f"product {d}": product(d, *((5, 8, 9) if context.tiny else (70, 72, 66)), weights=False)
        for d in ((f16,) if context.tiny else (f16, bf16))
    }
    if context.tiny:
        modules = dict([*modules.items()][-1:])
    for name, module in modules.items():
        with open_store("memory://") as store:
            job = Job(module, replace(device.info, libraries=()), store, Settings(target=context.target))
            for choices in job.choices.values():
                for number, sketch in enumerate(choices.sketches[:1] if context.tiny else choices.sketches):
                    drawn = choices.space.sample(rng, 400)
                    some = choices.space.candidates(drawn[drawn[:, 0] == number][:1])
                    for at, candidate in enumerate(some):
                        if context.left() < 0:
                            raise OutOfTimeError
                        program = choices.program(choices.tuned(candidate))
                        symbols = {s.name: min(67, s.upper or 67) for s in program.symbols}
                        executor = Executor(program, device, random_constants(program), {})
                        executor.run(random_inputs(program, symbols, 0))
                        executor.close()
                        yield {"key": f"{name} {sketch.name} {at}"}
    device.close()


def copied(device: Device, tiny: bool) -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    handle = device.compile([KernelSource("copy", "cuda", COPY)])["copy"]
    count = 1 << 10 if tiny else 1 << 25  # of 16 bytes
    buffers = [device.alloc(16 * count) for _ in range(2)]
    launch = device.bind(handle, buffers, [count], (-(-count // 256),), (256,))
    found = 32 * count / median(seconds(device, [[launch]]))
    for buffer in buffers:
        device.free(buffer)
    return found


def ceilings(context: Context) -> Iterator[Row]:
    device = open_device(context.target)
    yield {"key": "copy", "value": copied(device, context.tiny) / 1e9, "unit": "GB/s read and written"}
    handle = device.compile([KernelSource("nothing", "cuda", NOTHING)])["nothing"]
    launch = device.bind(handle, [device.alloc(4)], [], (1,), (32,))
    launch()
    device.synchronize()
    times, series = 1 if context.tiny else 1000, device.record([launch] * 100)
    for name, run, each in (("launch, queued", launch, 1), ("launch, recorded", series, 100)):
        if run is None:
            yield absent(name, "recordings: the package cuda-bindings")
            continue
        run()
        device.synchronize()
        began = time.perf_counter()
        for _ in range(times if each == 1 else max(1, times // 100)):
            run()
        device.synchronize()
        took = (time.perf_counter() - began) / (times if each == 1 else max(100, times))
        yield {"key": name, "value": took * 1e6, "unit": "us"}
    try:
        blas = CuBlas()
    except BuildError as error:
        yield absent("cuBLAS", error)
        return
    n, rng = 16 if context.tiny else 8192, np.random.default_rng(0)
    for kind, width in (("f32", 4), ("f16", 2), ("bf16", 2)):
        buffers = [device.alloc(width * n * n) for _ in range(3)]
        for buffer in buffers[:2]:
            device.upload(buffer, rng.standard_normal(n * n, np.float32).astype(TYPES[kind].numpy))
        run = blas.bind(f"cublas.gemm_{kind}", device, buffers, [n, n, n, 0, 0, n, n, n])
        secs = median(seconds(device, [[run]]))
        yield {"key": f"product {kind} {n}", "value": 2 * n**3 / secs / 1e12, "unit": "TFLOP/s"}
        for buffer in buffers:
            device.free(buffer)
    device.close()


def tuned(
    context: Context,
    modules: Mapping[str, IRModule],
    secs: float,
    trials: int,
    policies: Sequence[str],
    **settings: Any,
) -> dict[str, str]:
    """Tune each for its part of the time, then write WORK/NAME-POLICY.rta; what was measured of each. policies: those of builds, and
    `kernels`, which has no library."""
    chosen = Settings(target=context.target, effort="quick", trials=trials, **settings)
    began, said = time.monotonic(), {}
    runner = open_runner(chosen)
    with open_store(f"sqlite:///{context.work / 'records.db'}") as store, closing(runner):
        for number, (name, module) in enumerate(modules.items()):
            until = began + secs * (number + 1) / len(modules)

            def watch(progress: Progress, until: float = until) -> None:
                if time.monotonic() > until:
                    raise OutOfTimeError

            job = Job(module, runner.device_info(), store, chosen, watch)
            try:
                work = job.tune(runner)
                said[name] = f"{work.trials} candidates"
                said[name] += "".join(f"; {task}: {why}"[:80] for task, why in work.problems)
            except OutOfTimeError:
                said[name] = "cut short"
            for policy in policies:
                of = job
                if policy == "kernels":
                    of = Job(module, replace(job.device, libraries=()), store, chosen)
                how: Policy = "library" if policy == "library" else "measured"
                of.artifact(of.build(how)).save(context.work / f"{name}-{policy}.rta")
    return said


def dispatched(executor: Executor, symbols: Mapping[str, int]) -> str:
    """What runs at these sizes: kernels by the labels of their variants, routines by name."""
    values = executor.bind(symbols).values
    chosen = [call.variants[values[call.choice]] for call in executor.program.calls]
    found = [s.target if s.kind == "library" else v.label for v in chosen for s in v.steps]
    return ", ".join(dict.fromkeys(found))


def memory(context: Context) -> Iterator[Row]:
    rows, columns = (8, 40) if context.tiny else (8192, 4096)
    kinds = ("f32",) if context.tiny else ("f32", "bf16")
    names = [f"{name} {kind}" for kind in kinds for name in memory_bound(kind, rows, columns)]
    names = context.new(names[-1:] if context.tiny else names)
    modules = {n: memory_bound(n.split(" ")[-1], rows, columns)[n.rpartition(" ")[0]] for n in names}
    said = tuned(context, modules, context.left() - 15, 0 if context.tiny else 8, ["measured"])
    device = open_device(context.target)
    most = copied(device, context.tiny)
    for name in names:
        with load_artifact(context.work / f"{name}-measured.rta").open(device) as model:
            executor, width = model.executor, 4 if name.endswith("f32") else 2
            arrays = random_inputs(executor.program, {"n": rows}, 0)
            executor.run(arrays)
            moved = width * rows * columns * (1 + sum(a.ndim == 2 for a in arrays))
            secs = median(seconds(device, [executor.bind({"n": rows}).launches]))
            yield {
                "key": name, "shape": f"{rows} x {columns}", "us": secs * 1e6, "GB/s": moved / secs / 1e9,
                "of copy": moved / secs / most, "tuned": said[name],
            }  # fmt: skip
    device.close()


WIDTHS, ROWS = (4096, 14336), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GEMM_POLICIES = {"kernels": "ours", "library": "cuBLAS", "measured": "the build"}


def gemm_cases(tiny: bool) -> list[tuple[str, int, int, Sequence[int]]]:
    """(type, k, n, values of M) of each."""
    if tiny:
        return [("f16", 32, 48, (1, 5))]
    return [(kind, 4096, n, ROWS) for n in WIDTHS for kind in ("bf16", "f16")]


def gemm(context: Context) -> Iterator[Row]:
    cases = [c for c in gemm_cases(context.tiny) if context.new([f"{c[0]} {c[1]} x {c[2]}, M = {m}" for m in c[3]])]
    names = {f"gemm-{kind}-{k}-{n}": product(TYPES[kind], max(m), k, n, not context.tiny) for kind, k, n, m in cases}
    said = tuned(context, names, context.left() - 30, 1 if context.tiny else 16, list(GEMM_POLICIES))
    device = open_device(context.target)
    for (kind, k, n, rows), name in zip(cases, names, strict=True):
        opened = {p: Copies(device, context.work / f"{name}-{p}.rta", 2 * k * n) for p in GEMM_POLICIES}
        for m in rows:
            key = f"{kind} {k} x {n}, M = {m}"
            if key in context.done:
                continue
            row: Row = {"key": key}
            arrays = random_inputs(opened["measured"].executors[0].program, {"m": m}, 0)
            for policy, title in GEMM_POLICIES.items():
                row[f"{title}, us"] = opened[policy].secs({"m": m}, arrays) * 1e6
            row["TFLOP/s of the build"] = 2 * m * k * n / row["the build, us"] / 1e6
            row["cuBLAS / the build"] = row["cuBLAS, us"] / row["the build, us"]
            row["it runs"] = dispatched(opened["measured"].executors[0], {"m": m})
            row["cuBLAS runs"] = dispatched(opened["library"].executors[0], {"m": m})
            yield row | {"tuned": said[name]}
        for copies in opened.values():
            copies.close()
    device.close()


def peers(context: Context, *arguments: str) -> Iterator[Row]:
    """The rows that `gpu_peers.py` prints, in the Python that has torch."""
    if _version(context.peer_python) == "none":
        yield absent("torch", f"the package torch in {context.peer_python}")
        return
    command = [context.peer_python, str(HERE / "gpu_peers.py"), *arguments, *["--tiny"] * context.tiny]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"gpu_peers.py {' '.join(arguments)} ended with status {process.returncode}")


def gemm_torch(context: Context) -> Iterator[Row]:
    cases = [f"{kind}:{k}:{n}:{','.join(map(str, m))}" for kind, k, n, m in gemm_cases(context.tiny)]
    yield from peers(context, "gemm", *cases)


def decoder(context: Context) -> Iterator[Row]:
    """Prefill and decode of both models with weights and caches of bfloat16, the cache on the device and grown by each step."""
    chosen = ["tiny"] if context.tiny else ["small", "layer"]
    for number, name in enumerate(chosen):
        lengths = LENGTHS[name]
        if not context.new([f"{name} {f} {n}" for f in ("prefill", "decode") for n in lengths]):
            continue
        folder = decoder_folder(DECODERS[name], context.work / f"decoder-{name}")
        bounds = {"b": (1, 1), "n": (1, lengths[-1]), "m": (1, lengths[-1])}
        whole = load_hf(folder, bounds=bounds, caches="bf16")
        modules = {f"{name}-{f}": replace(whole, functions={f: whole.functions[f]}) for f in ("prefill", "decode")}
        share = (context.left() - 15) / (len(chosen) - number)
        device = open_device(context.target)
        if context.tiny:  # untuned
            for at, module in modules.items():
                job = Job(module, device.info, MemoryStore(), Settings(target=context.target, precision="bf16"))
                job.artifact(job.build("generic")).save(context.work / f"{at}-measured.rta")
            said = dict.fromkeys(modules, "untuned")
        else:
            said = tuned(context, modules, share, 4, ["measured"], precision="bf16")
        for function, symbol in (("prefill", "n"), ("decode", "m")):
            with load_artifact(context.work / f"{name}-{function}-measured.rta").open(device) as model:
                executor = model.executors[function]
                for length in lengths:
                    symbols = {"b": 1, symbol: length}
                    results = executor.run(random_inputs(executor.program, symbols, 0))
                    if not all(np.isfinite(r.astype(np.float32)).all() for r in results):
                        raise SystemExit(f"{name} {function} {length}: found results that are no numbers")
                    secs = median(seconds(device, [executor.bind(symbols).launches]))
                    tokens = length if function == "prefill" else 1
                    yield {
                        "key": f"{name} {function} {length}", "us": secs * 1e6, "tokens/s": tokens / secs,
                        "it runs": dispatched(executor, symbols), "tuned": said[f"{name}-{function}"],
                    }  # fmt: skip
        device.close()


def decoder_torch(context: Context) -> Iterator[Row]:
    chosen = ["tiny"] if context.tiny else ["small", "layer"]
    yield from peers(context, "decoder", *chosen)


def _one_kernel(context: Context, target: str, **settings: Any) -> Row:
    """A softmax tuned on a target by a few candidates: checked and timed, as every record is."""
    rows, columns = (8, 40) if context.tiny else (4096, 1024)
    chosen = Settings(target=target, effort="quick", trials=1 if context.tiny else 4, **settings)
    runner = open_runner(chosen)
    with open_store("memory://") as store, closing(runner):
        job = Job(memory_bound("f32", rows, columns)["softmax"], runner.device_info(), store, chosen)
        work = job.tune(runner)
        (found,) = (job.records(c.task.key, c.task.regime) for c in job.choices.values())
        right = [r for r in found if r.status == "ok" and r.checked]
        least = min((min(r.samples_secs) for r in right), default=float("nan"))
        return {"device": job.device.name, "candidates": work.trials, "right": len(right), "least us": least * 1e6}


def cluster(context: Context) -> Iterator[Row]:
    if importlib.util.find_spec("distributed") is None:
        yield absent("cluster", "the package distributed")
        return
    from relax_tune.tuner.measure.cluster_processes import start_scheduler, start_worker

    label = context.target if re.fullmatch(r"[\w:]+", context.target) else "cuda"
    scheduler, address = start_scheduler()
    with scheduler, start_worker(address, [label]):
        yield {"key": "softmax, far"} | _one_kernel(context, label, scheduler=address)


def opencl(context: Context) -> Iterator[Row]:
    try:
        import pyopencl as cl

        names = [p.name for p in cl.get_platforms() if "NVIDIA" in p.name]
    except Exception as error:  # no package, no loader, no driver: each says it in its own way
        yield absent("OpenCL", error)
        return
    if not names:
        yield absent("OpenCL", "a platform of NVIDIA's")
        return
    yield {"key": "softmax, OpenCL"} | _one_kernel(context, f"opencl:{names[0]}")


PARTS: Mapping[str, Callable[[Context], Iterator[Row]]] = {
    f.__name__: f
    for f in (
        *(card, tests, sanitizer, candidates, ceilings, memory, gemm, gemm_torch, decoder, decoder_torch, cluster),
        opencl,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--secs", type=float, required=True)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    path = args.work / f"{args.part}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if line.endswith("}") and '"unfinished"' not in line]
    path.write_text("".join(f"{line}\n" for line in kept))
    done = frozenset(json.loads(line)["key"] for line in kept)
    context = Context(args.work, args.target, args.peer_python, args.tiny, time.monotonic() + args.secs - 2, done)
    with path.open("a") as out:

        def write(row: Row) -> None:
            print(json.dumps(row), file=out, flush=True)

        try:
            for row in PARTS[args.part](context):
                if row["key"] not in done:
                    write(row)
        except OutOfTimeError:
            write({"key": "end", "unfinished": True})
        except (RelaxTuneError, OSError) as error:
            print(f"{args.part}: {' '.join(str(error).split())}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # out of time: schedulers and workers are ended too
    sys.exit(main())
