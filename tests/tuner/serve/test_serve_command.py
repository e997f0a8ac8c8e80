"""`relax-tune serve`: the command, its token, and its end at SIGTERM while requests run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tuner.serve.served import Files, ask, infer_body, tensor
from tests.tuner.serve.test_app import long_body
from typer.testing import CliRunner

from relax_tune.tuner.cli.app import app

pytestmark = [pytest.mark.ccompiler, pytest.mark.process]
ROOT = Path(__file__).parents[3]
ONE_ROW = infer_body(tensor("x", "FP32", np.ones((1, 4))))


@dataclass
class Process:
    """A running command: its port, its token, and the lines of its log."""

    child: subprocess.Popen[str]
    port: int
    token: str
    lines: list[str] = field(default_factory=list)

    def ask(self, path: str, body: Any = None, headers: Any = ()) -> Any:
        return ask(self.port, path, body, headers={"Authorization": f"Bearer {self.token}", **dict(headers)})


@contextmanager
def command(arguments: Sequence[str], python: Sequence[str] = ("-m", "relax_tune")) -> Iterator[Process]:
    for package in ("starlette", "uvicorn", "prometheus_client", "pythonjsonlogger"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra serve)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, *python, "serve", "--port", "0", *arguments]
    child = subprocess.Popen(line, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    lines: list[str] = []
    try:
        for text in child.stderr:
            lines.append(text)
            match = re.search(r"at http://127\.0\.0\.1:(\d+)/(?:\?token=([\w-]+))?", text.replace("\n", ""))
            if match:
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=lambda: lines.extend(child.stderr or ()))
        reader.start()
        yield Process(child, int(match[1]), match[2] or "", lines)
    finally:
        child.kill()
        child.wait()
    reader.join(30)


def test_sigterm_answers_requests_in_progress_and_refuses_new_ones(files: Files) -> None:
    with command([str(files.artifact("slow")), "--logs", "json", "--p99-ms", "20"]) as process:
        assert len(process.token) >= 32
        body, headers = long_body(64)
        start = time.monotonic()
        assert process.ask("/v2/models/slow/infer", body, headers).status == 200
        rows = int(min(max(64 * 3 / (time.monotonic() - start), 64), 16384))
        body, headers = long_body(rows)
        with ThreadPoolExecutor(3) as pool:
            pending = [pool.submit(process.ask, "/v2/models/slow/infer", body, headers) for _ in range(2)]
            while "relax_tune_serve_active 2.0" not in process.ask("/metrics").body.decode():
                time.sleep(0.01)
            process.child.send_signal(signal.SIGTERM)
            while process.ask("/v2/health/ready").status == 200:
                time.sleep(0.01)
            assert process.ask("/v2/health/live").status == 200
            refused = process.ask("/v2/models/slow/infer", body, headers)
            assert refused.status == 503 and "ending" in refused.json["error"]
            assert [p.result().status for p in pending] == [200, 200]
        assert process.child.wait(30) == 0
    logged = [json.loads(line) for line in process.lines]
    requests = [(e["model"], e["status"]) for e in logged if e["message"] == "request"]
    assert requests.count(("slow", 200)) == 3 and ("", 503) in requests
    assert any("SIGTERM: 2 requests" in e["message"] for e in logged)


def test_command_without_token_admits_local_clients(files: Files) -> None:
    with command([f"net:3={files.artifact('dense')}", "--no-token"]) as process:
        assert process.token == "" and ask(process.port, "/v2/models/net/versions/3").status == 200
        assert ask(process.port, "/v2/models/net/infer", ONE_ROW).status == 200
        process.child.send_signal(signal.SIGINT)
        assert process.child.wait(30) == 0


@pytest.mark.parametrize(
    "arguments, subject",
    [
        (["--host", "0.0.0.0"], "token"),
        (["--no-token", "--host", "0.0.0.0"], "token"),
        (["--port", "99999"], "--port"),
        (["--p99-ms", "0"], "--p99-ms"),
        (["--queue", "-1"], "--queue"),
        (["--model", "absent=folder"], "absent"),
        (["--model", "folder"], "folder"),
        (["--rows", "k"], "symbols"),
        (["{path}"], "dense"),
        (["a:0={path}"], "version"),
        (["a/b={path}"], "NAME"),
        (["missing.rta"], "missing.rta"),
    ],
)
def test_command_refuses_wrong_arguments(files: Files, arguments: list[str], subject: str) -> None:
    path = str(files.artifact("dense"))
    done = CliRunner().invoke(app, ["serve", path, *(a.format(path=path) for a in arguments)])
    assert done.exit_code == 2 and subject in done.output
