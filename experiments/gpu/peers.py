"""torch on the cases of `suite.py`: products and decoders, eager and compiled. For a Python with torch; prints one JSON line per row.

    python -m experiments.gpu.peers gemm KIND:K:N:M,M,... ... [--tiny] [--but KEY ...]
    python -m experiments.gpu.peers decoder NAME ... [--tiny] [--but KEY ...]

Cases that take long to compile come last; rows of the given keys are skipped. As for our kernels, recorded launches are timed, and
weights are taken in turns from copies that the last cache does not hold. Without a GPU that torch can use, `--tiny` runs on the
processor, as a check of the script.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from experiments.end_to_end.peers import Llama
from experiments.gpu.cases import DECODERS, LENGTHS, Decoder

SERIES_SECS, SERIES_MOST, SAMPLES, AWAKE_SECS = 2e-3, 200, 7, 0.03
LAST_CACHE, MOST_COPIES = 64 << 20, 4
KINDS = {"f16": torch.float16, "bf16": torch.bfloat16}
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
Run = Callable[[], Any]


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def timed(run: Run, count: int) -> float:
    began = time.perf_counter()
    run()
    wait()
    return (time.perf_counter() - began) / count


def recorded(turn: Run, turns: int) -> Run:
    """So many turns as one graph, or one after the other where that cannot be recorded."""

    def loop() -> None:
        for _ in range(turns):
            turn()

    if not GPU:
        return loop
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        turn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            loop()
    except RuntimeError:
        wait()
        return loop
    return graph.replay


def secs(runs: Sequence[Run]) -> float:
    """Median seconds of one run, taken in turns."""

    def turn() -> None:
        for run in runs:
            run()

    for _ in range(3):
        turn()
    wait()
    turns = max(1, min(SERIES_MOST, math.ceil(SERIES_SECS / timed(turn, 1))))
    run, count = recorded(turn, turns), turns * len(runs)
    awake = time.perf_counter() + AWAKE_SECS
    timed(run, count)
    while time.perf_counter() < awake:
        timed(run, count)
    return median(timed(run, count) for _ in range(SAMPLES))


Form = Callable[[Any], Any]


def forms(tiny: bool) -> dict[str, Form]:
    """Return the preparations of a function before it is called, by the name of the peer."""

    def compiled(function: Any) -> Any:
        torch.compiler.reset()  # nothing of the one before counts as one more shape of this one
        return torch.compile(function, dynamic=True)

    eager: dict[str, Form] = {"torch": lambda function: function}
    return eager if tiny and not GPU else eager | {"torch.compile": compiled}


def gemm(cases: Sequence[str], tiny: bool, done: frozenset[str]) -> Iterator[dict[str, Any]]:
    for title, form in forms(tiny).items():
        for case in cases:
            kind, k, n, rows = case.split(":")
            dtype, wide, deep = KINDS[kind], int(n), int(k)
            missing = {f"{kind} {k} x {n}, M = {m}, {title}": int(m) for m in rows.split(",")}
            missing = {key: m for key, m in missing.items() if key not in done}
            copies = max(1, min(MOST_COPIES, math.ceil(2 * LAST_CACHE / (2 * wide * deep)))) if missing else 0
            weights = [torch.randn(deep, wide, device=DEVICE, dtype=dtype) for _ in range(copies)]
            call = form(lambda x, w: x @ w)
            for key, m in missing.items():
                x = torch.randn(m, deep, device=DEVICE, dtype=dtype)
                took = secs([lambda w=w, call=call, x=x: call(x, w) for w in weights])
                yield {"key": key, "us": took * 1e6, "TFLOP/s": 2 * m * wide * deep / took / 1e12}


def decoder(names: Sequence[str], tiny: bool, done: frozenset[str]) -> Iterator[dict[str, Any]]:
    for title, form in forms(tiny).items():
        for name, function in ((name, f) for name in names for f in ("prefill", "decode")):
            d: Decoder = DECODERS[name]
            missing = {f"{name} {function} {n}, {title}": n for n in LENGTHS[name]}
            missing = {key: n for key, n in missing.items() if key not in done}
            if not missing:
                continue
            call = form(Llama(d, function == "decode").eval().to(DEVICE, torch.bfloat16))
            for key, length in missing.items():
                tokens = length if function == "prefill" else 1
                ids = torch.zeros((1, tokens), dtype=torch.int64, device=DEVICE)
                shape = (1, d.groups, length, d.head_size)
                many = 2 * d.layers if function == "decode" else 0
                cache = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(many)]
                took = secs([lambda call=call, ids=ids, cache=cache: call(ids, *cache)])
                yield {"key": key, "us": took * 1e6, "tokens/s": tokens / took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gemm", "decoder"))
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--but", nargs="*", default=[], metavar="KEY")
    args = parser.parse_args()
    if not GPU and not args.tiny:
        print(json.dumps({"key": "torch", "absent": "a GPU that torch can use"}))
        return
    with torch.no_grad():
        for row in {"gemm": gemm, "decoder": decoder}[args.what](args.cases, args.tiny, frozenset(args.but)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
