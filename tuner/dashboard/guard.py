"""The guard before every page: who may ask, from where, and what a browser may do with the answer."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from relax_tune.errors import UserError
from relax_tune.tuner.measure.cluster.address import is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
SHORTEST_TOKEN = 16


def check_binding(host: str, token: str | None) -> None:
    """Raise UserError for an address beyond loopback without a token, and for a token that is easily guessed."""
    if token is not None and (
        len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token
    ):
        raise UserError(
            f"wanted a token of at least {SHORTEST_TOKEN} letters, digits and signs without spaces, found another; "
            "`openssl rand -hex 32` makes one"
        )
    if token is None and not is_loopback(host):
        raise UserError(
            f"--host {host!r:.80} is reached by others, so it wants a token, found none; give --token-file FILE or "
            "RELAX_TUNE_DASHBOARD_TOKEN, or listen on 127.0.0.1"
        )


def authorised(header: str, token: str) -> bool:
    """Return True if an Authorization header carries the token: as Bearer, or as the password of Basic with any name.

    The comparison takes as long for each wrong token."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            _, _, given = base64.b64decode(given.strip(), validate=True).decode().partition(":")
        except ValueError:
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), token.encode())


class Guard:
    """An ASGI application around another: methods, host name, token, headers of answers.

    token: None lets everybody of this machine in. Then the Host header must name loopback, so that no page of another site reaches
    the server under a name of its own (DNS rebinding).
    wasm: lets pages compile WebAssembly.
    """

    def __init__(self, app: App, token: str | None, wasm: bool = False) -> None:
        self._app, self._token = app, token
        policy = POLICY.replace("script-src 'self'", "script-src 'self' 'wasm-unsafe-eval'") if wasm else POLICY
        self._extra = [
            (name.lower().encode(), value.encode())
            for name, value in {**HEADERS, "Content-Security-Policy": policy}.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._extra]}
            await send(message)

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(dressed, 405, "This server only answers GET.", ("allow", "GET, HEAD"))
        elif self._token is not None and not authorised(headers.get("authorization", ""), self._token):
            await _answer(
                dressed,
                401,
                "This page wants the token: as a password with any user name, or as Authorization: Bearer.",
                ("www-authenticate", 'Basic realm="relax-tune", charset="UTF-8"'),
            )
        elif self._token is None and not is_loopback(_name_of(headers.get("host", ""))):
            await _answer(dressed, 421, "Without a token this server is only reached as localhost.")
        else:
            await self._app(scope, receive, dressed)


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _answer(send: Send, status: int, text: str, *headers: tuple[str, str]) -> None:
    body = text.encode()
    told = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body))), *headers]
    encoded = [(name.encode(), value.encode()) for name, value in told]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
