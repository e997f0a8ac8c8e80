"""Tokens per second of 1, 4 and 16 texts that are generated at a time, over paged and over contiguous caches.

    python -m experiments.serving.streams --work FOLDER [--tiny] [--effort quick] [--rounds 5] [--out NAME]

A Llama-style decoder with weights from a seed, in float32, two threads. All texts arrive at once, with prompts of 16 to 64 tokens, and get
64 tokens each, the likeliest ones. A time is that of all tokens of all texts, prompts included. Contenders run in processes of their own,
one after the other in each round:

* `paged`: `rt.generate` over paged caches, texts together;
* `apart`: `rt.generate` over contiguous caches, texts one by one.

The page states how many texts got the tokens of `apart`; rounding may change a few. Without `--out` the results are only printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import relax_tune as rt
from experiments.harness.decoder_folder import write_folder
from experiments.harness.e2e_cases import Decoder, decoder_of
from experiments.harness.pages import environment, write_page

STREAMS, ADDED, POSITIONS, THREADS = (1, 4, 16), 64, 256, 2
BOUNDS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "paged": {"t": (1, 256), "r": (1, 16), "w": (1, POSITIONS // 16)},
    "apart": {"b": (1, 1), "n": (1, 64), "m": (0, POSITIONS - 1)},
}
Generate = Callable[[list[list[int]]], list[list[int]]]
"""Returns the added tokens of prompts."""


def prompts_of(count: int, vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(1, vocabulary, rng.integers(16, 65)).tolist() for _ in range(count)]


def ours(kind: str, work: Path) -> Generate:
    model = rt.load(work / f"{kind}.rta", threads=THREADS)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        together = [prompts] if kind == "paged" else [[p] for p in prompts]
        rows = [row for part in together for row in rt.generate(model, part, ADDED)]
        return [row[len(p) :].tolist() for p, row in zip(prompts, rows, strict=True)]

    return generate


def decoder_at(work: Path) -> Decoder:
    return decoder_of(work.joinpath("tiny").exists())


def run(contender: str, work: Path) -> None:
    """Print seconds and tokens of every number of texts, as JSON."""
    generate = ours(contender, work)
    results = {}
    for count in STREAMS:
        prompts = prompts_of(count, decoder_at(work).vocabulary)
        generate(prompts)  # the first call of a shape may compile or allocate
        start = time.perf_counter()
        texts = generate(prompts)
        results[count] = {"secs": time.perf_counter() - start, "texts": texts}
    print(json.dumps(results))


def prepare(work: Path, tiny: bool, effort: str) -> list[str]:
    """Write the model of every contender; return the contenders."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "tiny").touch() if tiny else (work / "tiny").unlink(missing_ok=True)
    decoder = decoder_of(tiny)
    folder = write_folder(work / "decoder", decoder, POSITIONS)
    for kind, bounds in BOUNDS.items():
        model = rt.load_model(folder, bounds=bounds, kv_cache="paged" if kind == "paged" else "contiguous")
        store = f"sqlite:///{work / 'records.db'}"
        if effort != "none":
            rt.tune(model, target="c", db=store, effort=effort)
        rt.build(model, target="c", db=store if effort != "none" else "memory://").save(work / f"{kind}.rta")
    return list(BOUNDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a decoder of two narrow layers, to try the script")
    parser.add_argument("--effort", default="quick", help="of tuning; none: predicted kernels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--contender", choices=BOUNDS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.contender:
        run(a.contender, a.work)
        return
    facts = environment()
    contenders = prepare(a.work, a.tiny, a.effort)
    times: dict[str, dict[int, list[float]]] = {n: {count: [] for count in STREAMS} for n in contenders}
    texts: dict[str, Any] = {}
    for _ in range(a.rounds):
        for name in contenders:
            command = [sys.executable, "-m", "experiments.serving.streams", "--work", a.work, "--contender", name]
            variables = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
            done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True, env=variables)
            answered = json.loads(done.stdout.splitlines()[-1])
            for count in STREAMS:
                times[name][count].append(answered[str(count)]["secs"])
            texts[name] = answered
    lines = page(times, {n: agreement(texts[n], texts["apart"]) for n in contenders}, a.rounds)
    print("\n".join(lines))
    if a.out:
        write_page(a.out, lines, {"seconds": times, "environment": facts}, facts)


def agreement(texts: Any, reference: Any) -> str:
    pairs = [pair for count in reference for pair in zip(texts[count]["texts"], reference[count]["texts"])]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def page(times: Mapping[str, Mapping[int, list[float]]], same: Mapping[str, str], rounds: int) -> list[str]:
    lines = ["# Texts generated at a time", ""]
    lines += [
        f"Tokens per second, medians of {rounds} rounds; {ADDED} tokens a text (`experiments/serving/streams.py`).",
        "",
    ]
    lines += [
        f"| | {' | '.join(f'{n} texts' for n in STREAMS)} | texts as `apart` |",
        "|---|" + "---|" * (len(STREAMS) + 1),
    ]
    for name, by in times.items():
        rates = [f"{count * ADDED / statistics.median(by[count]):.0f}" for count in STREAMS]
        lines.append(f"| {name} | {' | '.join(rates)} | {same[name]} |")
    return lines


if __name__ == "__main__":
    main()
