"""Generated and tuned kernels against kernels written by hand (prototypes.c, prototypes.cl) and torch, timed in turns.

    python -m experiments.kernels.bar --work FOLDER [--peer-python PYTHON] [--targets c,opencl] [--trials 64] [--kernels NAME,...]

Our builds are tuned on the table's static shapes and hold generated kernels only. The prototypes are C (prototypes.c) and OpenCL
(prototypes.cl), compiled for this processor; they are written for processors with 512-bit vectors. The last columns hold earlier times
of such prototypes on two Zen4 cores. Without an OpenCL prototype, the time to reach, marked `~`, is the C prototype's time here times
the ratio of OpenCL to C on Zen4. Records stay in the folder. Writes results/kernel_bar.json and .md.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import Contender, in_rounds, serve, summary
from experiments.harness.pages import environment, write_page
from experiments.kernels.model import Array, Kernel
from experiments.kernels.opencl_prototypes import Prototypes, cases
from experiments.kernels.static_kernels import tune_ours
from experiments.kernels.zoo import KERNELS

HERE = Path(__file__).parent
FLAGS = "-O3 -march=native -std=gnu11 -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp -shared -fPIC"
HEAD = 64
OPENCL = "prototype-opencl"
Call = tuple[str, list[Array | int]]


def _packed(w: Array) -> Array:
    """(K, N) as (N / 48, K, 48)."""
    k, n = w.shape
    return np.ascontiguousarray(w.reshape(k, n // 48, 48).transpose(1, 0, 2))


def _halves(numbers: Array) -> Array:
    """Numbers of 4 bits (N, K) in bytes (N, K / 2): of each 32 the first 16 in the low halves."""
    groups = numbers.reshape(len(numbers), -1, 2, 16)
    return np.ascontiguousarray((groups[:, :, 0] & 15) | (groups[:, :, 1] << 4)).astype(np.int8)


def _rows(a: Array) -> list[Array | int]:
    return [a.shape[0], a.shape[1]]


def call_of(kernel: Kernel, v: Mapping[str, Array]) -> tuple[Call, tuple[int, ...]] | None:
    """The prototype's name and arguments without the output, and the output's shape; None where there is no prototype. The output
    stands before the numbers."""
    name, x = kernel.name, next(iter(v.values()))
    if name == "softmax_4096x16":
        return ("softmax_of_16", [x, x.shape[0]]), x.shape
    if name.startswith("softmax"):
        return ("softmax", [x, *_rows(x)]), x.shape
    if name.endswith("layer_norm"):
        added = v.get("r", np.empty(0, np.float32))
        return ("layer_norm", [x, added, v["gamma"], v["beta"], *_rows(x)]), x.shape
    if name == "rms_norm":
        return ("rms_norm", [x, v["gamma"], *_rows(x)]), x.shape
    if name in ("gelu_4M", "silu_4M"):
        return (name[:4], [x, x.size]), x.shape
    if name == "sum_16M":
        return ("sum", [x, x.size]), ()
    if name == "transpose":
        b, n, h, d = x.shape
        return ("permute", [x, b, n, h]), (b, h, n, d)
    if name == "gather":
        return ("gather", [v["table"], v["i"], len(v["i"]), v["table"].shape[1]]), (len(v["i"]), v["table"].shape[1])
    if name == "mean_pool":
        return ("mean_pool", [x, v["mask"], *x.shape]), (x.shape[0], x.shape[2])
    if name.startswith("gemv"):
        n, k = v["w"].shape
        if kernel.bits == 32:
            return ("gemv", [x, v["w"], n, k]), (1, n)
        parts = kernel.quantized()
        numbers = parts["numbers"] if kernel.bits == 8 else _halves(parts["numbers"])
        return (name, [x, numbers, parts["scale"], n, k]), (1, n)
    if name.startswith("attention"):
        return ("attention", [x, v["k"], v["v"], x.shape[1], x.shape[2]]), x.shape
    if name.startswith("dense_") and "gelu" not in name:
        k, n = v["w"].shape
        return ("matmul", [x, _packed(v["w"]), x.shape[0], n, k]), (x.shape[0], n)
    return None


def bar_over(kernel: Kernel, name: str, row: Mapping[str, Mapping[str, float]]) -> str:
    """Return the prototype's time over that of our build `name`; `-` without a prototype."""
    if name not in row:
        return "-"
    ours, known = row[name]["median_us"], kernel.bar
    if "-opencl-" not in name:
        return f"{row['prototype']['median_us'] / ours:.2f}"
    if OPENCL in row:
        return f"{row[OPENCL]['median_us'] / ours:.2f}"
    if not {"c", "opencl"} <= set(known):
        return "-"
    return f"~{row['prototype']['median_us'] / ours * known['opencl'] / known['c']:.2f}"


def prototype_answer(library: Path) -> Callable[[str], tuple[Callable[[], Any], Callable[[], Sequence[float]]]]:
    loaded = ctypes.CDLL(str(library))

    def answer(case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        kernel = KERNELS[case]
        found = call_of(kernel, kernel.arrays() | kernel.weights())
        assert found is not None, case
        (name, given), shape = found
        held = [np.ascontiguousarray(a) for a in given if isinstance(a, np.ndarray)]
        out = np.zeros(shape, np.float32)
        args: list[Any] = [ctypes.c_void_p(a.ctypes.data if a.size else None) for a in (*held, out)]
        args += [ctypes.c_int64(a) for a in given if isinstance(a, int)]
        function = loaded[name]

        def run(keep: Sequence[Array] = (*held, out)) -> None:
            function(*args)

        return run, lambda: np.ravel(out)[:: max(1, out.size // HEAD)][:HEAD].tolist()

    return answer


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(Prototypes() if sys.argv[2] == OPENCL else prototype_answer(Path(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--targets", default="c,opencl")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kernels")
    args = parser.parse_args()
    with_bar = [k for k in KERNELS if KERNELS[k].bar or (k.startswith("dense_") and "gelu" not in k)]
    kernels = args.kernels.split(",") if args.kernels else with_bar
    args.work.mkdir(parents=True, exist_ok=True)
    library = args.work / "prototypes.so"
    subprocess.run(["gcc", *FLAGS.split(), str(HERE / "prototypes.c"), "-o", str(library)], check=True)
    took = tune_ours(args.work, kernels, args.targets.split(","), args.trials, (False,))
    contenders = [Contender("prototype", [sys.executable, "-m", "experiments.kernels.bar", "serve", str(library)])]
    if "opencl" in args.targets.split(","):
        command = [sys.executable, "-m", "experiments.kernels.bar", "serve", OPENCL]
        contenders.append(Contender(OPENCL, command, [k for k in kernels if k in cases()]))
    if args.peer_python:
        command = [args.peer_python, "-m", "experiments.kernels.peer_kernels", "serve", "torch"]
        contenders.append(Contender("torch", command))
    for name in took:
        command = [
            sys.executable,
            "-m",
            "experiments.kernels.tuned_kernels",
            "serve",
            name.split("-")[1],
            str(args.work / name),
        ]
        contenders.append(Contender(name, command))
    before = environment()
    found = summary(in_rounds(contenders, kernels, args.rounds, 5))
    for c in contenders:
        c.close()
    ours = list(took)
    head = [c.name for c in contenders]
    lines = [
        "# Kernels against hand-written ones",
        "",
        "Written by `experiments/kernels/bar.py`; medians in microseconds, in turns.",
        "",
    ]
    ratios = [f"bar / {n}" for n in ours]
    lines += ["| kernel | " + " | ".join([*head, *ratios, "Zen4 C", "Zen4 PoCL", "Zen4 torch", "sketches"]) + " |"]
    lines += ["|---" * (len(head) + len(ratios) + 5) + "|"]
    for kernel, row in found.items():
        cells = [f"{row[n]['median_us']:.1f}" if n in row else "-" for n in head]
        cells += [bar_over(KERNELS[kernel], n, row) for n in ours]
        cells += [str(KERNELS[kernel].bar.get(n, "-")) for n in ("c", "opencl", "torch")]
        sketches = "; ".join(s for n in ours for group in took[n][kernel]["sketches"].values() for s in group)
        lines.append(f"| {kernel} | " + " | ".join([*cells, sketches]) + " |")
    record = {"environment": before, "trials": args.trials, "times": found, "tuning": took}
    write_page("kernel_bar", lines, record, before)


if __name__ == "__main__":
    main()
