"""The experiment with many clients, with few of them: each kind is served or closed, and the probe is answered."""

from __future__ import annotations

import asyncio
import importlib

import pytest
from tests.tuner.serve.conftest import files as files
from tests.tuner.serve.served import Files, running

pytestmark = [pytest.mark.ccompiler, pytest.mark.slow]


def test_each_kind_of_clients_is_served_or_closed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra serve)")
    many = importlib.import_module("experiments.serving.many_connections")
    connections = importlib.import_module("relax_tune.tuner.serve.connections")
    monkeypatch.setattr(connections.TimedConnection, "head_secs", 0.5)
    path = files.artifact("dense")
    with running([f"net={path}"], active=4) as server:
        rows = asyncio.run(many.measure(server.port, many.request_of(path), 20, 0.2))
    assert [row["clients"] for row in rows] == ["no others", "idle connections", "half a head", "a request each"]
    assert all(row["probes"] > row["refused probes"] and row["p50"] <= row["p99"] for row in rows)
