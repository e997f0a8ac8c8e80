"""torch on what `gpu_suite.py` times: products and decoders, eager and compiled. For a Python with torch; prints a line of JSON a row.

    python experiments/gpu_peers.py gemm KIND:K:N:M,M,... ... [--tiny]
    python experiments/gpu_peers.py decoder NAME ... [--tiny]

Recorded launches are timed, as ours are; weights are taken in turns from copies that the last cache does not hold. Without a GPU that
torch can use, `--tiny` runs on the processor, to see that everything works.
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
from e2e_models import Llama
from gpu_cases import DECODERS, LENGTHS, Decoder

SERIES_SECS, SERIES_MOST, SAMPLES = 2e-3, 200, 7
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
    timed(run, count)
    return median(timed(run, count) for _ in range(SAMPLES))


def gemm(cases: Sequence[str], tiny: bool) -> Iterator[dict[str, Any]]:
    for case in cases:
        kind, k, n, rows = case.split(":")
        dtype, wide, deep = KINDS[kind], int(n), int(k)
        copies = max(1, min(MOST_COPIES, math.ceil(2 * LAST_CACHE / (2 * wide * deep))))
        weights = [torch.randn(deep, wide, device=DEVICE, dtype=dtype) for _ in range(copies)]
        compiled = torch.compile(lambda x, w: x @ w, dynamic=True)
        for m in map(int, rows.split(",")):
            x = torch.randn(m, deep, device=DEVICE, dtype=dtype)
            row: dict[str, Any] = {"key": f"{kind} {k} x {n}, M = {m}"}
            for name, call in (("torch", torch.matmul), ("torch.compile", compiled)):
                if name == "torch.compile" and tiny and not GPU:
                    continue
                row[f"{name}, us"] = secs([lambda w=w, call=call, x=x: call(x, w) for w in weights]) * 1e6
            yield row


def decoder(names: Sequence[str], tiny: bool) -> Iterator[dict[str, Any]]:
    for name in names:
        d: Decoder = DECODERS[name]
        for function in ("prefill", "decode"):
            model = Llama(d, function == "decode").eval().to(DEVICE, torch.bfloat16)
            calls: dict[str, Any] = {"torch": model}
            if not (tiny and not GPU):
                calls["torch.compile"] = torch.compile(model, dynamic=True)
            for length in LENGTHS[name]:
                row: dict[str, Any] = {"key": f"{name} {function} {length}"}
                ids = torch.zeros((1, length if function == "prefill" else 1), dtype=torch.int64, device=DEVICE)
                shape = (1, d.groups, length, d.head_size)
                many = 2 * d.layers if function == "decode" else 0
                cache = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(many)]
                for title, call in calls.items():
                    took = secs([lambda call=call, ids=ids, cache=cache: call(ids, *cache)])
                    row |= {f"{title}, us": took * 1e6}
                    row |= {f"{title}, tokens/s": (length if function == "prefill" else 1) / took}
                yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gemm", "decoder"))
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not GPU and not args.tiny:
        print(json.dumps({"key": "torch", "absent": "a GPU that torch can use"}))
        return
    with torch.no_grad():
        for row in {"gemm": gemm, "decoder": decoder}[args.what](args.cases, args.tiny):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
