"""Questions to an ASGI application without a server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from relax_tune.tuner.dashboard.guard import App


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str


def ask(app: App, path: str, method: str = "GET", host: str = "127.0.0.1:8788", **headers: str) -> Answer:
    """Ask for a path; `headers` by name, with `_` for `-`."""
    sent: list[Any] = []
    path, _, query = path.partition("?")
    told = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope: dict[str, Any] = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"},
        **{
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "server": ("127.0.0.1", 8788),
        },
        "headers": [(name.encode(), value.encode()) for name, value in told.items()],
        "client": ("127.0.0.1", 1),
    }

    requests = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if not requests:
            await asyncio.Event().wait()  # the client stays
        return requests.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    start = next(m for m in sent if m["type"] == "http.response.start")
    body = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    return Answer(
        start["status"], {k.decode().lower(): v.decode() for k, v in start["headers"]}, body.decode("utf-8", "replace")
    )
