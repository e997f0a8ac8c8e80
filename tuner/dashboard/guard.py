"""The guard before every page: methods, host names and tokens of requests, and security headers of answers.

A token comes in the address that the command prints (`?token=`), which a browser exchanges for a cookie at once, or in an
Authorization header.

Tests: `tests/tuner/dashboard/test_dashboard.py`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
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
_TOKEN_BYTES = 4096
OPEN = "without a token, every user and every program of this machine can read these pages"


def check_binding(host: str, token: str | None, variable: str = "RELAX_TUNE_DASHBOARD_TOKEN") -> None:
    """Raise `UserError` for an address beyond loopback without a token, and for a token that is easy to guess.

    variable: of the environment, which may hold the token
    """
    if token is not None and (
        len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token
    ):
        raise UserError(
            f"expected a token of at least {SHORTEST_TOKEN} letters, digits and signs without spaces; `openssl rand -hex 32` makes one"
        )
    if token is None and not is_loopback(host):
        raise UserError(
            f"--host {host!r:.80} can be reached from other machines, so a token is required; give --token-file FILE or "
            f"{variable}, or listen on 127.0.0.1"
        )


def read_token(file: Path | None, variable: str) -> str | None:
    """Return the token of a file, or of a variable of the environment. No error shows what is in it.

    Raises:
        UserError: The file cannot be read, others can read it, or it has not one line.
    """
    if file is None:
        return os.environ.get(variable)
    try:
        with file.open("rb") as opened:
            content = opened.read(_TOKEN_BYTES + 1)
        mode = file.stat().st_mode
    except OSError as error:
        raise UserError(
            f"--token-file {file}: expected a file with a token, got: {error.strerror}; check the path"
        ) from None
    if mode & 0o077:
        raise UserError(
            f"--token-file {file}: expected a file that only you can read, but others can; chmod 600 {file}"
        )
    lines = content.decode("ascii", "replace").splitlines()
    if len(content) > _TOKEN_BYTES or len(lines) != 1:
        raise UserError(f"--token-file {file}: expected one line with a token, got {len(lines)}; correct it")
    return lines[0].strip()


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


def access(host: str, port: int, token_file: Path | None, no_token: bool, variable: str) -> tuple[str | None, str]:
    """Return the token of a server that a command starts, and the query of the address to print.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        token_file: File of the token; None: the variable, or a new token.
        no_token: Admit everybody on this machine.
        variable: Environment variable that may hold the token.

    Raises:
        UserError: The port is no port, or a server with this token may not listen on this address.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port expects a number from 0 to 65535, got {port}")
    given = read_token(token_file, variable)
    if given is None and not no_token and not is_loopback(host):
        check_binding(host, None, variable)  # a new token, which is printed to a log, would be no secret there
    token, query = token_for(given, no_token)
    check_binding(host, token, variable)
    return token, query


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
        methods: Methods that the application answers. Others than GET and HEAD are refused to pages of other sites.
        open_paths: Paths that need no token.
    """

    def __init__(
        self,
        app: App,
        token: str | None,
        wasm: bool = False,
        methods: Collection[str] = ("GET", "HEAD"),
        open_paths: Collection[str] = (),
    ) -> None:
        self._app, self._token, self._methods, self._open_paths = app, token, tuple(methods), frozenset(open_paths)
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
        reads = scope["method"] in ("GET", "HEAD")
        if scope["method"] not in self._methods:
            listed = " and ".join(m for m in self._methods if m != "HEAD")
            await _answer(dressed, 405, f"This server only answers {listed}.", ("allow", ", ".join(self._methods)))
        elif not reads and not _same_site(headers):
            await _answer(dressed, 403, "This server does not answer pages of other sites.")
        elif scope["path"] in self._open_paths and reads:
            await self._app(scope, receive, dressed)
        elif self._token is not None and not self._admits(headers):
            if reads and "authorization" not in headers and _query_has(scope, self._token):
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


def _same_site(headers: dict[str, str]) -> bool:
    """Return False for a request that a browser sends for a page of another site."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


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
