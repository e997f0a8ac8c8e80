"""The guard before every page: methods, host names and tokens of requests, and security headers of answers.

A token comes in the address that the command prints (`?token=`), which a browser exchanges for a cookie at once, or in an
Authorization header.

Tests: `tests/tuner/dashboard/test_dashboard.py`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

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
OPEN = "without a token, every user and every program of this machine can read these pages"


def check_binding(host: str, token: str | None) -> None:
    """Raise `UserError` for an address beyond loopback without a token, and for a token that is easy to guess."""
    if token is not None and (
        len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token
    ):
        raise UserError(
            f"expected a token of at least {SHORTEST_TOKEN} letters, digits and signs without spaces; `openssl rand -hex 32` makes one"
        )
    if token is None and not is_loopback(host):
        raise UserError(
            f"--host {host!r:.80} can be reached from other machines, so a token is required; give --token-file FILE or "
            "RELAX_TUNE_DASHBOARD_TOKEN, or listen on 127.0.0.1"
        )


def token_for(given: str | None, no_token: bool) -> tuple[str | None, str]:
    """Return the token of a server, and the query of the address to print.

    Args:
        given: the token of a file or variable; None: make one.
        no_token: admit everybody on this machine.

    Raises:
        UserError: both are given.
    """
    if no_token:
        if given is not None:
            raise UserError("expected a token or --no-token, got both; leave one out")
        return None, ""
    if given is not None:
        return given, ""  # its owner knows it
    token = secrets.token_urlsafe(32)
    return token, f"?token={token}"


def authorised(header: str, token: str) -> bool:
    """Return True if an Authorization header contains the token: as Bearer, or as the password of Basic with any name.

    The comparison takes the same time for all wrong tokens.
    """
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            _, _, given = base64.b64decode(given.strip(), validate=True).decode().partition(":")
        except ValueError:
            return False
    elif scheme.lower() != "bearer":
        return False
    return _same(given.strip(), token)


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode())


def cookie_of(token: str) -> tuple[str, str]:
    """Return the name and the value of the cookie that stands for a token.

    Cookies are shared by all ports of a host, so servers of different tokens have cookies of different names.
    """
    name = hashlib.sha256(f"name {token}".encode()).hexdigest()[:16]
    return f"relax-tune-{name}", hmac.digest(token.encode(), b"cookie", "sha256").hex()


def _has_cookie(header: str, token: str) -> bool:
    name, value = cookie_of(token)
    try:
        cookies = SimpleCookie(header)
    except CookieError:
        return False
    return name in cookies and _same(cookies[name].value, value)


class Guard:
    """An ASGI application that checks requests to another one: methods, host name, token. It adds headers to answers.

    Args:
        token: None admits everybody on this machine. The Host header must then name loopback, so that no page of another site can
            reach the server through a host name that its owner resolves to 127.0.0.1 (DNS rebinding).
        wasm: Allow pages to compile WebAssembly.
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
        elif self._token is not None and not self._admits(headers):
            if "authorization" not in headers and _query_has(scope, self._token):
                await _answer(dressed, 303, "", ("location", _path_of(scope)), ("set-cookie", _set_cookie(self._token)))
                return
            await _answer(
                dressed,
                401,
                "This page expects the token: open the address that the command printed, or give the token as a password with any "
                "user name, or as Authorization: Bearer.",
                ("www-authenticate", 'Basic realm="relax-tune", charset="UTF-8"'),
            )
        elif self._token is None and not is_loopback(_name_of(headers.get("host", ""))):
            await _answer(dressed, 421, "Without a token this server is only reached as localhost.")
        else:
            await self._app(scope, receive, dressed)

    def _admits(self, headers: dict[str, str]) -> bool:
        token = self._token or ""
        return authorised(headers.get("authorization", ""), token) or _has_cookie(headers.get("cookie", ""), token)


def _query_has(scope: Scope, token: str) -> bool:
    try:
        given = parse_qs(scope.get("query_string", b"").decode("ascii"), max_num_fields=8).get("token", [])
    except ValueError:
        return False
    return len(given) == 1 and _same(given[0], token)


def _path_of(scope: Scope) -> str:
    """Return the requested path without its query, and never an address of another host."""
    return "/" + quote(scope["path"].lstrip("/\\"))


def _set_cookie(token: str) -> str:
    name, value = cookie_of(token)
    return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict"


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _answer(send: Send, status: int, text: str, *headers: tuple[str, str]) -> None:
    body = text.encode()
    all_headers = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body))), *headers]
    encoded = [(name.encode(), value.encode()) for name, value in all_headers]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
