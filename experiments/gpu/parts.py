"""The parts of `suite.py`, each a function that yields rows. `suite.py` starts one process per part.

    python -m experiments.gpu.parts PART --work FOLDER --secs SECS [--target cuda] [--peer-python PYTHON] [--tiny]

A row is written to FOLDER/PART.jsonl as soon as it is measured, and not measured again when the part is started again. Records are in
FOLDER/records.db.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from experiments.gpu.cases import DECODERS, LENGTHS
from experiments.gpu.context import Context, OutOfTimeError, Row, absent
from experiments.gpu.models import TYPES, decoder_folder, memory_bound, product
from experiments.gpu.timing import Copies, seconds
from experiments.gpu.tuning import dispatched, one_kernel, tuned
from experiments.gpu.warpgroups import warpgroups
from experiments.harness.pages import ROOT
from relax_tune.database.store import MemoryStore, open_store
from relax_tune.errors import BuildError, RelaxTuneError
from relax_tune.ir.core.dtype import bf16, f16
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device import host
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.library.cublas import CuBlas
from relax_tune.runtime.program.program import KernelSource, Program
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.measure.device_process.inputs import random_constants, random_inputs
from relax_tune.tuner.settings import Settings

COPY = """struct __align__(16) rt_four { float x, y, z, w; };
extern "C" __global__ void __launch_bounds__(256) copy(const rt_four *__restrict__ a, rt_four *__restrict__ b, long long n) {
  const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  if (i < n) b[i] = a[i];
}
"""
NOTHING = 'extern "C" __global__ void nothing(float *a) { if (a == 0) a[0] = 1.0f; }\n'


def card(context: Context) -> Iterator[Row]:
    """Yield the GPU, its driver, and the installed software."""
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
    """torch's, without loading it, which takes long for the first time."""
    code = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "none"


TESTS = (
    *(
        "runtime/device/test_device_contract.py",
        "cuda_emulation/test_few_queries.py",
        "schedules/rules/test_async_copies.py",
    ),
    *("schedules/rules/test_cuda.py", "schedules/rules/gpu/test_mma.py", "schedules/rules/test_mma_intrinsics.py"),
)


def tests(context: Context) -> Iterator[Row]:
    """Yield the results of `pytest -m cuda`: the contract of devices, and kernels of all rules against the interpreter."""
    if importlib.util.find_spec("pytest") is None:
        yield absent("pytest", "the package pytest")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda and not slow", "-p", "no:cacheprovider"]
    if context.tiny:
        command += ["-k", "test_upload_then_download"]
    running = {}
    for name in context.new(TESTS[:1] if context.tiny else TESTS):
        log = context.work / f"pytest-{Path(name).stem}.log"
        with log.open("w") as out:
            running[name] = log, subprocess.Popen([*command, f"tests/{name}"], stdout=out, stderr=out, cwd=ROOT)
    late = False
    for name, (log, process) in running.items():
        try:
            status = process.wait(max(0.1, context.left()))
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            continue
        lines = log.read_text(errors="replace").strip().splitlines() or [""]
        failed = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
        yield {"key": name, "status": status, "said": lines[-1], "failed": "; ".join(failed[:10])}
    if late:
        raise OutOfTimeError


SANITIZERS = ("memcheck", "racecheck")


def sanitizer(context: Context) -> Iterator[Row]:
    """Candidates of every sketch of a few functions: by themselves, which leaves their machine code behind, then watched by
    compute-sanitizer's tools."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    run = [sys.executable, "-m", "experiments.gpu.parts", "candidates", "--work", str(context.work)]
    run += ["--target", context.target, *["--tiny"] * context.tiny]
    if tool is None:
        yield absent("compute-sanitizer", "the tool")
    names = context.new(("alone", *SANITIZERS) if tool else ("alone",))
    for number, name in enumerate(names):
        secs = context.left() / (len(names) - number)
        (context.work / "candidates.jsonl").unlink(missing_ok=True)
        # not what a driver answers, such as functions that it does not have
        watched = [tool, "--tool", name, "--report-api-errors", "no", "--error-exitcode", "9"]
        command = [*(watched if tool and name != "alone" else ()), *run, "--secs", str(secs - 3)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, secs))
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        print(f"{name}:\n{done.stdout[-20000:]}{done.stderr[-5000:]}", flush=True)
        said = [line for line in (done.stdout + done.stderr).splitlines() if "=====" in line] or [done.stderr[-200:]]
        path = context.work / "candidates.jsonl"
        ran = len(path.read_text().splitlines()) if path.exists() else 0
        yield {"key": name, "candidates": ran, "status": done.returncode, "said": said[-1][:200]}


def candidates(context: Context) -> Iterator[Row]:
    """A random candidate of every sketch, at small sizes off any tile. Of `sanitizer`."""
    device, rng = open_device(context.target), np.random.default_rng(0)
    modules = {f"{name} f16": m for name, m in memory_bound("f16", 100, 70).items()}
    modules |= {
        f"product {d}": product(d, *((5, 8, 9) if context.tiny else (70, 72, 66)), weights=False)
        for d in ((f16,) if context.tiny else (f16, bf16))
    }
    if context.tiny:
        modules = dict([*modules.items()][-1:])
    programs: dict[str, Program] = {}
    for name, module in modules.items():
        with open_store("memory://") as store:
            job = device_job(module, replace(device.info, libraries=()), store, Settings(target=context.target))
            for task_variants in job.task_variants.values():
                for number, sketch in enumerate(
                    task_variants.sketch_set.sketches[:1] if context.tiny else task_variants.sketch_set.sketches
                ):
                    drawn = task_variants.sketch_set.space.sample(rng, 400)
                    for candidate in task_variants.sketch_set.space.candidates(drawn[drawn[:, 0] == number][:1]):
                        programs[f"{name} {sketch.name}"] = task_variants.program(
                            task_variants.sketch_set.record_of(candidate)
                        )
    with ThreadPoolExecutor(host.usable_cpus()) as pool:
        [*pool.map(lambda p: device.compile(p.kernels), programs.values())]
    for name, program in programs.items():
        if context.left() < 0:
            raise OutOfTimeError
        symbols = {s.name: min(67, s.upper or 67) for s in program.symbols}
        executor = Executor(program, device, random_constants(program), {})
        executor.run(random_inputs(program, symbols, 0))
        executor.close()
        yield {"key": name}
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


def memory(context: Context) -> Iterator[Row]:
    rows, columns = (8, 40) if context.tiny else (8192, 4096)
    kinds = ("f32",) if context.tiny else ("f32", "bf16")
    names = [f"{name} {kind}" for kind in kinds for name in memory_bound(kind, rows, columns)]
    names = context.new(names[-1:] if context.tiny else names)
    modules = {n: lambda n=n: memory_bound(n.split(" ")[-1], rows, columns)[n.rpartition(" ")[0]] for n in names}
    device = open_device(context.target)
    most = copied(device, context.tiny)
    for name, said in tuned(context, modules, 1.5, 0 if context.tiny else 8, ["measured"]):
        with load_artifact(context.work / f"{name}-measured.rta").open(device) as model:
            executor, width = model.executor, 4 if name.endswith("f32") else 2
            arrays = random_inputs(executor.program, {"n": rows}, 0)
            executor.run(arrays)
            moved = width * rows * columns * (1 + sum(a.ndim == 2 for a in arrays))
            secs = median(seconds(device, [executor.bind({"n": rows}).launches]))
            yield {
                "key": name, "shape": f"{rows} x {columns}", "us": secs * 1e6, "GB/s": moved / secs / 1e9,
                "of copy": moved / secs / most, "it runs": dispatched(executor, {"n": rows}), "tuned": said,
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
    cases = {
        f"gemm-{kind}-{k}-{n}": (kind, k, n, missing)
        for kind, k, n, rows in gemm_cases(context.tiny)
        if (missing := [m for m in rows if context.new([f"{kind} {k} x {n}, M = {m}"])])
    }
    modules = {
        name: lambda kind=kind, k=k, n=n: product(TYPES[kind], 5 if context.tiny else ROWS[-1], k, n, not context.tiny)
        for name, (kind, k, n, _) in cases.items()
    }
    device = open_device(context.target)
    reserve, trials = (1.0, 1) if context.tiny else (15.0, 16)
    for name, said in tuned(context, modules, reserve, trials, list(GEMM_POLICIES)):
        kind, k, n, rows = cases[name]
        opened = {p: Copies(device, context.work / f"{name}-{p}.rta", 2 * k * n) for p in GEMM_POLICIES}
        for m in rows:
            row: Row = {"key": f"{kind} {k} x {n}, M = {m}"}
            arrays = random_inputs(opened["measured"].executors[0].program, {"m": m}, 0)
            for policy, title in GEMM_POLICIES.items():
                row[f"{title}, us"] = opened[policy].secs({"m": m}, arrays) * 1e6
            row["TFLOP/s of the build"] = 2 * m * k * n / row["the build, us"] / 1e6
            row["cuBLAS / the build"] = row["cuBLAS, us"] / row["the build, us"]
            row["it runs"] = dispatched(opened["measured"].executors[0], {"m": m})
            row["ours runs"] = dispatched(opened["kernels"].executors[0], {"m": m})
            row["cuBLAS runs"] = dispatched(opened["library"].executors[0], {"m": m})
            yield row | {"tuned": said}
        for copies in opened.values():
            copies.close()
    device.close()


def peers(context: Context, *arguments: str) -> Iterator[Row]:
    """The rows that `peers.py` prints, in the Python that has torch."""
    if _version(context.peer_python) == "none":
        yield absent("torch", f"the package torch in {context.peer_python}")
        return
    command = [context.peer_python, "-m", "experiments.gpu.peers", *arguments, *["--tiny"] * context.tiny]
    command += ["--but", *sorted(context.done)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"peers.py {' '.join(arguments)} ended with status {process.returncode}")


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
        whole = load_hf(folder, bounds=bounds, cache_dtype="bf16")
        modules = {f"{name}-{f}": replace(whole, functions={f: whole.functions[f]}) for f in ("prefill", "decode")}
        device = open_device(context.target)
        if context.tiny:
            found = untuned(context, device, modules)
        else:
            part = replace(context, until=time.monotonic() + context.left() / (len(chosen) - number))
            found = tuned(
                part, {at: lambda m=m: m for at, m in modules.items()}, 5.0, 4, ["measured"], precision="bf16"
            )
        for at, said in found:
            function = at.split("-")[1]
            with load_artifact(context.work / f"{at}-measured.rta").open(device) as model:
                executor = model.executors[function]
                for length in lengths:
                    symbols = {"b": 1, "n" if function == "prefill" else "m": length}
                    results = executor.run(random_inputs(executor.program, symbols, 0))
                    if not all(np.isfinite(r.astype(np.float32)).all() for r in results):
                        raise SystemExit(f"{name} {function} {length}: results that are no numbers")
                    secs = median(seconds(device, [executor.bind(symbols).launches]))
                    tokens = length if function == "prefill" else 1
                    yield {
                        "key": f"{name} {function} {length}", "us": secs * 1e6, "tokens/s": tokens / secs,
                        "it runs": dispatched(executor, symbols), "tuned": said,
                    }  # fmt: skip
        device.close()


def untuned(context: Context, device: Device, modules: Mapping[str, IRModule]) -> Iterator[tuple[str, str]]:
    """As `tuned`, of builds that nothing was measured for."""
    for at, module in modules.items():
        job = device_job(module, device.info, MemoryStore(), Settings(target=context.target, precision="bf16"))
        job.artifact(job.build("generic")).save(context.work / f"{at}-measured.rta")
        yield at, "untuned"


def decoder_torch(context: Context) -> Iterator[Row]:
    chosen = ["tiny"] if context.tiny else ["small", "layer"]
    yield from peers(context, "decoder", *chosen)


def cluster(context: Context) -> Iterator[Row]:
    if importlib.util.find_spec("distributed") is None:
        yield absent("cluster", "the package distributed")
        return
    from relax_tune.tuner.measure.cluster.processes import start_scheduler, start_worker

    scheduler, address = start_scheduler()
    with scheduler, start_worker(address, [context.target]):
        yield {"key": "softmax, far"} | one_kernel(context, context.target.partition(":")[0], scheduler=address)


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
    yield {"key": "softmax, OpenCL"} | one_kernel(context, f"opencl:{names[0]}")


PARTS: Mapping[str, Callable[[Context], Iterator[Row]]] = {
    f.__name__: f
    for f in (
        *(card, tests, sanitizer, candidates, ceilings, memory, gemm, gemm_torch, warpgroups, decoder, decoder_torch),
        *(cluster, opencl),
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
