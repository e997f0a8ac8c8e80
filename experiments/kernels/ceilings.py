"""Limits of a processor, and the shares of them that the kernels of whole models reach.

    python -m experiments.kernels.ceilings --work FOLDER [--rounds 7]

FOLDER is that of `stronger/peers.py`, with its decoder tuned. Limits are measured on two threads, the best of the rounds: products per
second of instructions on registers alone, and bytes per second read from arrays of several sizes. Then every launch of a prefill and of
a decoder's step is timed separately, in the order of the program: products, attention, and the rest. Writes results/ceilings.json and
.md. For processors with AVX2 and FMA.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from experiments.harness.pages import environment, write_page
from experiments.stronger.cases import given
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.c_compiler import find_compiler

THREADS = 2
PASSES, READS = 4_000_000, 1 << 28
# a loop's instructions, and the products of whole numbers or floats that they make
LOOPS: Mapping[str, tuple[Sequence[str], int]] = {
    "f32: vfmadd": ([f"vfmadd231ps %%ymm14,%%ymm15,%%ymm{i}" for i in range(12)], 12 * 8),
    "i16: vpmaddwd, vpaddd": (
        [
            line
            for i in range(10)
            for line in (
                f"vpmaddwd %%ymm14,%%ymm15,%%ymm{12 + i % 2}",
                f"vpaddd %%ymm{12 + i % 2},%%ymm{i},%%ymm{i}",
            )
        ],
        10 * 16,
    ),
    "i8, may saturate: vpmaddubsw, vpmaddwd, vpaddd": (
        [
            line
            for i in range(10)
            for line in (
                f"vpmaddubsw %%ymm14,%%ymm15,%%ymm{12 + i % 2}",
                f"vpmaddwd %%ymm14,%%ymm{12 + i % 2},%%ymm{12 + i % 2}",
                f"vpaddd %%ymm{12 + i % 2},%%ymm{i},%%ymm{i}",
            )
        ],
        10 * 32,
    ),
}
SIZES = {"8 MiB": 8 << 20, "16 MiB": 16 << 20, "52 MiB": 52 << 20, "104 MiB": 104 << 20, "512 MiB": 512 << 20}
CLASSES = ("ours.f32", "ours.bf16.weights", "ours.activations", "ours.int4.activations")
CASES = (("prefill", "64"), ("prefill", "512"), ("decode", "16"))
GROUPS = ("products", "attention", "others")
# elements of a constant that is a product's matrix
LARGE = 1 << 16


def source() -> str:
    """Return C with a function for each loop, and one that reads an array."""
    used = ", ".join(f'"ymm{i}"' for i in range(16))
    parts = ["#include <stdint.h>", "#include <immintrin.h>"]
    for number, (lines, _) in enumerate(LOOPS.values()):
        body = "\\n\\t".join(lines)
        parts.append(
            f"void loop{number}(int64_t n) {{\n#pragma omp parallel\n"
            f'  for (int64_t i = 0; i < n; i++) __asm__ volatile("{body}" ::: {used});\n}}'
        )
    parts.append(
        "void sums(const float *a, int64_t n, float *out) {\n#pragma omp parallel\n  {\n    __m256 t[8] = {0};\n"
        "#pragma omp for schedule(static)\n    for (int64_t i = 0; i < n / 64; i++)\n"
        "      for (int k = 0; k < 8; k++) t[k] = _mm256_add_ps(t[k], _mm256_loadu_ps(a + i * 64 + k * 8));\n"
        "    for (int k = 1; k < 8; k++) t[0] = _mm256_add_ps(t[0], t[k]);\n#pragma omp critical\n    *out += t[0][0];\n  }\n}"
    )
    return "\n".join(parts)


def ceilings(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure products per second of each loop, and bytes per second of each size of array."""
    (folder / "loops.c").write_text(source())
    compiler = find_compiler()
    subprocess.run(
        [compiler, "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "loops.c", "-o", "loops.so"],
        cwd=folder, check=True,
    )  # fmt: skip
    code = ctypes.CDLL(str(folder / "loops.so"))
    array = (ctypes.c_float * (max(SIZES.values()) // 4))()
    total = ctypes.c_float()
    products: dict[str, list[float]] = {name: [] for name in LOOPS}
    reads: dict[str, list[float]] = {name: [] for name in SIZES}
    for _ in range(rounds):
        for number, (name, (_, count)) in enumerate(LOOPS.items()):
            began = time.perf_counter()
            getattr(code, f"loop{number}")(ctypes.c_int64(PASSES))
            products[name].append(PASSES * count * THREADS / (time.perf_counter() - began))
        for name, nbytes in SIZES.items():
            times = max(1, READS // nbytes)
            began = time.perf_counter()
            for _ in range(times):
                code.sums(array, ctypes.c_int64(nbytes // 4), ctypes.byref(total))
            reads[name].append(times * nbytes / (time.perf_counter() - began))
    best = lambda held: {name: max(found) for name, found in held.items()}
    return {"products": best(products), "reads": best(reads)}


def group_of(name: str, weights: int) -> str:
    """Return the group of a launch by the name of its call and the elements of the largest constant that it reads."""
    if "attention" in name:
        return "attention"
    return "products" if weights >= LARGE and "embedding" not in name else "others"


def steps(artifact: Path, function: str, case: str, work: Path, rounds: int) -> dict[str, Any]:
    """Time every launch of a function; return seconds, products of weights, their bytes, and launches by group."""
    opened = load_artifact(artifact).open()
    executor, arrays = opened.executors[function], list(given(function, case, work / function))
    keys: list[tuple[int, ...]] = []
    executor.record = keys.append
    executor.run(arrays)
    bound = executor.bind(dict(zip((s.name for s in executor.program.symbols), keys[0])))
    bound.prepare()
    names = [c.name for c in executor.program.calls for _ in c.variants[bound.values[c.choice]].steps]
    times: list[list[float]] = [[] for _ in bound.steps]
    for _ in range(rounds):
        for launch, found in zip(bound.launches, times, strict=True):
            began = time.perf_counter()
            launch()
            executor.device.synchronize()
            found.append(time.perf_counter() - began)
    groups = {g: {"secs": 0.0, "products": 0, "bytes": 0, "launches": 0} for g in GROUPS}
    for name, step, found in zip(names, bound.steps, times, strict=True):
        fixed = [n for n in step.buffers if executor.program.buffers[n].role in ("const", "packed")]
        weights = max((prod(bound.shape(n)) for n in fixed), default=0)
        group = group_of(name, weights)
        held, out = groups[group], bound.shape(step.buffers[-1])
        held["secs"] += statistics.median(found)
        held["launches"] += 1
        held["bytes"] += sum(bound.nbytes(n) for n in fixed)
        if group == "products":
            held["products"] += weights * prod(out[:-1]) * (2 if "int4" in artifact.name else 1)  # two in a byte
    return groups


def page(most: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the page's lines."""
    lines = [
        "# Limits of the processor, and the share that kernels reach",
        "",
        "Written by `experiments/kernels/ceilings.py`. Two threads; the best of the rounds before and after the models.",
        "",
        "| products on registers | G/s |",
        "|---|---|",
        *(f"| {name} | {rate / 1e9:.0f} |" for name, rate in most["products"].items()),
        "",
        "| read from an array of | GB/s |",
        "|---|---|",
        *(f"| {name} | {rate / 1e9:.1f} |" for name, rate in most["reads"].items()),
        "",
        "Launches timed one by one, medians. Products are those of weights; their ceiling is that of the instruction that their class",
        "uses: vfmadd for f32 and bf16, vpmaddwd and vpaddd for 8 and 4 bits with `--activations int8`, whose sums are exact.",
        "",
        "| class | case | launches | sum, ms | products | attention | others | products, G/s | of the ceiling | weights, GB/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rates = list(most["products"].values())
    for key, groups in found.items():
        name, case = key.split(" ", 1)
        total, products = sum(g["secs"] for g in groups.values()), groups["products"]
        rate = products["products"] / products["secs"]
        shares = " | ".join(f"{100 * groups[g]['secs'] / total:.0f} %" for g in GROUPS)
        lines.append(
            f"| {name} | {case} | {sum(g['launches'] for g in groups.values())} | {1e3 * total:.2f} | {shares} | {rate / 1e9:.0f} | "
            f"{100 * rate / rates['activations' in name]:.0f} % | {products['bytes'] / products['secs'] / 1e9:.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    env = environment()
    with tempfile.TemporaryDirectory() as folder:
        before = ceilings(Path(folder), args.rounds)
        found = {
            f"{name} {function} {case}": steps(
                args.work / f"decoder/{name}.rta", function, case, args.work, args.rounds
            )
            for name in CLASSES
            for function, case in CASES
        }
        after = ceilings(Path(folder), args.rounds)
    most = {kind: {name: max(rate, after[kind][name]) for name, rate in held.items()} for kind, held in before.items()}
    write_page("ceilings", page(most, found), {"ceilings": most, "found": found, "environment": env}, env)


if __name__ == "__main__":
    main()
