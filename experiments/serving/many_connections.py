"""Many clients at once on one server: idle connections, heads that trickle, and a request from each, tried again when it is refused.

    python -m experiments.serving.many_connections --artifact FILE.rta [--connections 10000] [--out NAME]

The artifact takes one input of floats with the batch dim first. A probe sends a request every 20 ms all the time; its times show what the
other clients take from it. Needs as many file descriptors as connections, here and in the server (`ulimit -Hn`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.pages import environment, write_page
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.signature import TensorSpec
from relax_tune.tuner.serve.connections import many_files

PROBE_SECS = 0.02


def request_of(artifact: Path) -> bytes:
    """Return a request of one row of ones, as HTTP."""
    (spec,) = load_artifact(artifact).inputs
    assert isinstance(spec, TensorSpec)
    shape = [n if isinstance(n, int) else 1 for n in spec.shape]
    tensor = {"name": spec.name, "datatype": "FP32", "shape": shape, "data": np.ones(shape).ravel().tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    return (
        f"POST /v2/models/net/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )


async def ask(port: int, request: bytes) -> tuple[int, float]:
    """Send a request on a new connection; return the status and the seconds."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"\r\ncontent-length: (\d+)", head)
        await reader.readexactly(int(size[1]) if size else 0)
        return int(head[9:12]), time.perf_counter() - start
    finally:
        writer.close()


async def probe(port: int, request: bytes, results: list[tuple[int, float]]) -> None:
    """Send requests until cancelled."""
    while True:
        results.append(await ask(port, request))
        await asyncio.sleep(PROBE_SECS)


async def idle(port: int, request: bytes, count: int, sent: bytes) -> dict[str, Any]:
    """Open connections that send nothing or the part of a head, until the server has closed them."""
    start = time.perf_counter()
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in opened:
        writer.write(sent)
    opening = time.perf_counter() - start
    await asyncio.gather(*(reader.read() for reader, _ in opened), return_exceptions=True)
    for _, writer in opened:
        writer.close()
    return {"opened in s": opening, "closed by the server after s": time.perf_counter() - start}


async def all_ask(port: int, request: bytes, count: int, sent: bytes) -> dict[str, Any]:
    """Have each client send a request, again after a second when it is refused, until all are answered."""
    start, refused = time.perf_counter(), 0

    async def one() -> None:
        nonlocal refused
        while True:
            status, _ = await ask(port, request)
            if status == 200:
                return
            if status != 503:
                raise RuntimeError(f"expected status 200 or 503, got {status}")
            refused += 1
            await asyncio.sleep(float(np.random.default_rng().uniform(0.5, 1.5)))

    await asyncio.gather(*(one() for _ in range(count)))
    return {"answered in s": time.perf_counter() - start, "refused and tried again": refused}


async def measure(port: int, request: bytes, count: int, settle_secs: float = 3.0) -> list[dict[str, Any]]:
    """Return what each kind of clients saw, and the times of the probe meanwhile and `settle_secs` longer."""
    kinds = [
        ("no others", None, b""),
        ("idle connections", idle, b""),
        ("half a head", idle, b"GET /v2 HTTP/1.1\r\nX: "),
        ("a request each", all_ask, b""),
    ]
    rows = []
    for name, clients, sent in kinds:
        results = list[tuple[int, float]]()
        task = asyncio.create_task(probe(port, request, results))
        facts = {} if clients is None else await clients(port, request, count, sent)
        await asyncio.sleep(settle_secs)
        task.cancel()
        secs = [t for status, t in results if status == 200]
        p50, p99 = (float(np.quantile(secs, q)) * 1e3 for q in (0.5, 0.99))
        rows.append({"clients": name, "probes": len(results), "p50": p50, "p99": p99, **facts})
        rows[-1]["refused probes"] = len(results) - len(secs)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--out", help="name of the page of results")
    given = parser.parse_args()
    many_files()
    measured = environment()
    command = [sys.executable, "-m", "relax_tune", "serve", f"net={given.artifact}", "--port", "0", "--no-token"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as child:
        assert child.stderr is not None
        try:
            port = next(int(m[1]) for line in child.stderr if (m := re.search(r"127\.0\.0\.1:(\d+)/", line)))
            rows = asyncio.run(measure(port, request_of(given.artifact), given.connections))
        finally:
            child.terminate()
    names = ["clients", "probes", "refused probes", "p50", "p99"]
    lines = ["| " + " | ".join([*names, ""]) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        more = ", ".join(
            f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k not in names
        )
        cells = [f"{row[n]:.1f}" if isinstance(row[n], float) else str(row[n]) for n in names]
        lines.append("| " + " | ".join([*cells, more]) + " |")
    if given.out is None:
        print("\n".join(lines))
        return
    intro = f"{given.connections} connections; p50 and p99 of a probe's requests in milliseconds."
    write_page(given.out, ["# Many connections", "", intro, "", *lines], rows, measured)


if __name__ == "__main__":
    main()
