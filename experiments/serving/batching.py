"""A sentence encoder behind one server: batches by measured times beside batches of a fixed window, and beside other runtimes.

    python -m experiments.serving.batching --model FOLDER --artifact FILE.rta [--onnx FILE.onnx] [--out NAME]

The requests are texts of this repository's pages, one a request, at random times (a Poisson process) that do not depend on the answers.
All contenders run in the server of `relax-tune serve`, each in a process of its own, and take turns. They differ in what runs the batch
(the artifact, ONNX Runtime, OpenVINO) and in how a batch is chosen:

* `measured`: as `relax-tune serve` does, for the bound `--p99-ms`;
* `window`: when `WINDOW_MS` have passed since the first request that waits, or `MOST` wait, they run together, padded to the longest;
* `single`: requests run one by one, in the order of arrival, without padding.

The peers compute the last hidden state of the ONNX file (`experiments.end_to_end.busy_neighbour --export MODEL FILE.onnx` writes it), which
is pooled with NumPy. They need onnxruntime and openvino in the Python that runs this; without `--onnx` they are left out.

Shown are p50 and p99 at the same rates for all, and the greatest of these rates at which the p99 is within the bound. Once half of the
answers of a contender are late, higher rates are left out for it. Without `--out` the results are only printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.pages import ROOT, environment, write_page
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.serve.batcher import Batcher
from relax_tune.tuner.serve.functions import CallArguments, ServedFunction
from relax_tune.tuner.serve.policy import Costs, PlannedBatch, Shape, Waiting
from relax_tune.tuner.serve.rows import Arrays

Connections = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
WINDOW_MS, MOST = 5.0, 8
POLICIES = ("measured", "window", "single")
CONTENDERS = ("ours-measured", "ours-window", *(f"{p}-{q}" for p in ("onnxruntime", "openvino") for q in POLICIES[1:]))


def first_come(waiting: Sequence[Waiting], now: float, costs: Costs, most: int | None) -> PlannedBatch:
    """Return the requests that came first, as many as a batch has, at the shape of the longest."""
    return _first(waiting, min(MOST, most or MOST))


def one_by_one(waiting: Sequence[Waiting], now: float, costs: Costs, most: int | None) -> PlannedBatch:
    """Return the request that came first."""
    return _first(waiting, 1)


def _first(waiting: Sequence[Waiting], count: int) -> PlannedBatch:
    members = tuple(sorted(waiting, key=lambda w: w.number)[:count])
    return PlannedBatch(members, Shape(len(members), max(w.length for w in members), 0.0))


class WindowBatcher(Batcher):
    """A queue whose batches wait until they are full or the window is over."""

    async def step(self) -> None:
        """Run one batch when it is full, or when its first request has waited for the window."""
        start = time.monotonic()
        while len(self) < MOST and time.monotonic() - start < WINDOW_MS / 1e3:
            await asyncio.sleep(2e-4)
        await super().step()


class PeerFunction(ServedFunction):
    """The function of an encoder with another runtime behind it: mean pooling and normalisation with NumPy."""

    def __init__(self, served: ServedFunction, kind: str, file: Path) -> None:
        super().__init__(served.model, served.name, served.joining)
        self._infer = _session(kind, file)

    def run(self, calls: Sequence[CallArguments], shape: Shape | None = None) -> list[Arrays]:
        assert self.joining is not None and shape is not None
        ids, mask, *_ = self.joining.join([call.arrays for call in calls], shape.rows, shape.length)
        hidden = self._infer({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
        pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
        pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
        return self.joining.divide([pooled], [(call.rows, call.own_length) for call in calls])


def _session(kind: str, file: Path) -> Any:
    if kind == "onnxruntime":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        return lambda given: session.run(None, {n: given[n] for n in names})[0]
    import openvino

    hint = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(str(file), "CPU", hint).create_infer_request()
    names = [i.any_name for i in request.model_inputs]
    return lambda given: next(iter(request.infer({n: given[n] for n in names}).values()))


def serve(contender: str, given: argparse.Namespace) -> None:
    """Serve a contender on a free port of loopback, which is printed, until interrupted."""
    from relax_tune.tuner.dashboard.listen import serve as listen
    from relax_tune.tuner.serve.app import make_serve_app, open_serving
    from relax_tune.tuner.serve.models import ModelArgument
    from relax_tune.tuner.serve.requests import ServerLimits

    kind, policy = contender.split("-")
    artifact = load_artifact(given.artifact)
    bound = given.p99_ms / 1e3
    argument = ModelArgument(given.artifact, "encoder", 1, given.model)
    limits = ServerLimits(active=4096, timeout_secs=600)
    with artifact.open() as model:
        serving = open_serving([argument], lambda *_: (artifact, model), limits, bound)
        (version,) = serving.repository.models
        ((name, function),) = version.functions.items()
        if kind != "ours":
            function = PeerFunction(function, kind, given.onnx)
        if policy != "measured":
            function.times.skip_all()
            batcher, choose = (WindowBatcher, first_come) if policy == "window" else (Batcher, one_by_one)
            version.batchers[name] = batcher(function, version.turn, bound, serving.metrics, version.labels, choose)
        app = make_serve_app(serving, None)
        listen(app, "127.0.0.1", 0, lambda url: print(url, flush=True), lifespan="on")


def texts(folder: Path, artifact: Path, count: int) -> list[list[int]]:
    """Return the tokens of sentences of this repository's pages, drawn with a fixed seed."""
    from relax_tune.tuner.text.folder import sentence_folder
    from relax_tune.tuner.text.tokens import limit_of, open_tokenizer

    pages = [p.read_text("utf-8") for p in sorted((ROOT / "docs").rglob("*.md"))]
    prose = re.sub(r"```.*?```", " ", "\n\n".join(pages), flags=re.S)
    sentences = [s.strip() for s in re.split(r"(?<=[.:])\s+|\n\n", prose) if len(s.split()) > 2 and "|" not in s]
    drawn = np.random.default_rng(0).choice(sentences, count)
    settings = sentence_folder(folder)
    return settings.tokenize(
        open_tokenizer(settings.tokens), [str(s) for s in drawn], limit_of(load_artifact(artifact), 1), lambda _: None
    )


def body_of(ids: Sequence[int]) -> bytes:
    """Return a request of the Open Inference Protocol with binary tensors, as HTTP."""
    array = np.asarray([ids], np.int64)
    tensors = [("input_ids", array), ("attention_mask", np.ones_like(array))]
    inputs = [
        {"name": n, "shape": list(a.shape), "datatype": "INT64", "parameters": {"binary_data_size": a.nbytes}}
        for n, a in tensors
    ]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    data = text + b"".join(a.tobytes() for _, a in tensors)
    head = f"POST /v2/models/encoder/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + f"Inference-Header-Content-Length: {len(text)}\r\n\r\n".encode() + data


async def exchange(port: int, body: bytes, idle: Connections) -> None:
    """Send a request over an idle connection or a new one, and read the answer. Raises RuntimeError unless its status is 200."""
    reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
    writer.write(body)
    head = await reader.readuntil(b"\r\n\r\n")
    size = re.search(rb"\r\ncontent-length: (\d+)", head)
    if not head.startswith(b"HTTP/1.1 200") or size is None:
        raise RuntimeError(f"expected status 200, got {head[:200]!r}")
    await reader.readexactly(int(size[1]))
    idle.append((reader, writer))


async def load(port: int, bodies: Sequence[bytes], rate: float, secs: float, seed: int) -> list[float]:
    """Send requests at random times for so many seconds; return the seconds from when each was due to its answer."""
    generator = np.random.default_rng(seed)
    due = np.cumsum(generator.exponential(1 / rate, max(1, round(rate * secs))))
    idle: Connections = []
    start = time.perf_counter()

    async def one(at: float, body: bytes) -> float:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        await exchange(port, body, idle)
        return time.perf_counter() - start - at

    chosen = generator.integers(0, len(bodies), len(due))
    times = await asyncio.gather(*(one(float(at), bodies[i]) for at, i in zip(due, chosen)))
    for _, writer in idle:
        writer.close()
    return list(times)


def measure(given: argparse.Namespace) -> dict[str, dict[float, list[float]]]:
    """Return the times of answers by contender and rate. Contenders take turns, each round with other arrival times."""
    bodies = [body_of(ids) for ids in texts(given.model, given.artifact, 512)]
    chosen = [c for c in given.contenders if c.startswith("ours") or given.onnx is not None]
    results: dict[str, dict[float, list[float]]] = {c: {r: [] for r in given.rates} for c in chosen}
    for number in range(given.rounds):
        for contender in chosen:
            command = [sys.executable, "-m", "experiments.serving.batching", *sys.argv[1:], "--serve", contender]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as child:
                assert child.stdout is not None
                port = int(re.findall(r":(\d+)/", child.stdout.readline())[0])
                try:
                    time.sleep(given.settle_secs)  # time in which idle servers time their shapes
                    asyncio.run(load(port, bodies, given.rates[0], 1.0, -number - 1 & 0xFFFF))
                    for rate in given.rates:
                        secs = asyncio.run(load(port, bodies, rate, given.secs, number))
                        results[contender][rate] += secs
                        if np.median(secs) > given.p99_ms / 1e3:
                            break
                finally:
                    child.terminate()
    return results


def table(results: dict[str, dict[float, list[float]]], p99_ms: float) -> list[str]:
    """Return the rows of p50 and p99 in milliseconds for each rate, and the greatest rate within the bound."""
    rates = list(next(iter(results.values())))
    lines = ["| contender | " + " | ".join(f"{r:g}/s" for r in rates) + f" | within {p99_ms:g} ms |"]
    lines.append("|---" * (len(rates) + 2) + "|")
    for contender, by_rate in results.items():
        cells, within = [], 0.0
        for rate, secs in by_rate.items():
            p50, p99 = (float(np.quantile(secs, q)) * 1e3 if secs else math.nan for q in (0.5, 0.99))
            cells.append(f"{p50:.1f}, {p99:.1f}" if secs else "-")
            within = max(within, rate) if p99 <= p99_ms else within
        lines.append(f"| {contender} | " + " | ".join(cells) + f" | {within:g}/s |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the encoder")
    parser.add_argument("--artifact", type=Path, required=True, help="the encoder, built with bounds of b and n")
    parser.add_argument("--onnx", type=Path, help="the same encoder for the peers")
    parser.add_argument("--rates", type=float, nargs="+", default=[5, 10, 20, 40, 80], help="requests per second")
    parser.add_argument("--secs", type=float, default=30.0, help="seconds at each rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle-secs", type=float, default=20.0, help="seconds before the first request")
    parser.add_argument("--p99-ms", type=float, default=200.0)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--out", help="name of the page of results")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given)
        return
    measured = environment()
    results = measure(given)
    rows = table(results, given.p99_ms)
    if given.out is None:
        print("\n".join(rows))
        return
    intro = (
        f"p50 and p99 in milliseconds of single texts at the same random times, by requests per second; {given.rounds} x "
        f"{given.secs:g} s of requests at each rate."
    )
    write_page(given.out, ["# Batches of a server", "", intro, "", *rows], results, measured)


if __name__ == "__main__":
    main()
