"""Listening for HTTP: options of the socket."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from relax_tune.tuner.dashboard.listen import serve


def test_answers_are_sent_without_delay() -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra dashboard)")
    options = []

    class Server(uvicorn.Server):  # type: ignore[misc,name-defined]
        async def serve(self, sockets: Any = None) -> None:
            options.extend(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in sockets)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nothing is sent")

    serve(app, "127.0.0.1", 0, lambda url: None, Server)
    assert options == [1]
