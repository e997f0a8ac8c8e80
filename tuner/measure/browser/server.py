"""The server of the measuring page, over Tornado: one page at a time, admitted by one-time tokens.

Tests: `tests/tuner/measure/browser/test_runner.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from importlib.resources import files
from typing import Any, cast

import tornado.httpserver
import tornado.netutil
import tornado.web
import tornado.websocket

from relax_tune.errors import UserError, system_reason
from relax_tune.tuner.measure.browser.address import Place
from relax_tune.tuner.measure.browser.page import DEPARTURE_CODES, Page, PageGone
from relax_tune.tuner.measure.browser.protocol import MOST_FRAME, Refusal, read_join, read_message, write_message
from relax_tune.tuner.measure.browser.tokens import TOKEN_SECS, Tokens

# package data, in the folder of the other pages for browsers
_PACKAGE, _FOLDER = "relax_tune.tuner.web", "static"
_FILES = {
    "": ("measure.html", "text/html"),
    "measure.js": ("measure.js", "text/javascript"),
    "style.css": ("style.css", "text/css"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
_JOIN_SECS, _PING_SECS = 15.0, 20.0
# Tornado closes the connection at larger frames; frames between MOST_FRAME and this limit get our message.
_MOST_READ = 4 * MOST_FRAME
_WAITING = 16
"""Connections that may be open without having joined. One more closes the oldest, so that idle connections keep no page out."""
_OPEN = 64
"""Connections that may be open in all. One more closes the oldest that is not the page's, so that they do not use up the descriptors."""
REFUSED = 4003
"""Close code for a page that must not reconnect automatically."""
# A close frame has at most 125 bytes, two of them for the status code (RFC 6455, 5.5).
_REASON_BYTES = 120


class PageServer:
    """The HTTP and WebSocket server, with the page that measures.

    A page that reconnects with its token replaces the connected page.

    Args:
        changed: called whenever a page has joined, is ready or is gone, from any thread.

    Raises:
        UserError: the server cannot listen at the address.
    """

    def __init__(self, place: Place, context: ssl.SSLContext | None, changed: Callable[[], None]) -> None:
        self.tokens = Tokens()
        self._changed = changed
        self.page: Page | None = None
        self.page_stream: Any = None
        self.waiting: dict[_Connection, None] = {}
        try:
            sockets = _listening(place)
        except OSError as error:
            raise UserError(
                f"--browser {place.host}:{place.port}: cannot listen there: {system_reason(error)}; give another address"
            ) from None
        port = sockets[0].getsockname()[1]
        self.url = place.url(port) if context is None else place.url(port).replace("http://", "https://")
        named = {self.url.partition("://")[2].rpartition(":")[0].lower()}
        if place.loopback:
            named |= {"localhost", "127.0.0.1", "[::1]"}
        self._hosts = {f"{name}:{port}" for name in named}
        if port == (80 if self.url.startswith("http:") else 443):  # browsers omit these from Host and Origin
            self._hosts |= named
        # Invalid requests from the network must not fill the job's log.
        logging.getLogger("tornado").addHandler(logging.NullHandler())
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(sockets, context, started), name="measure-browser-server", daemon=True
        )
        self._thread.start()
        started.wait()

    def call(self, work: Callable[[], Any]) -> None:
        """Run a function on the server's thread; no effect after `close`."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        """End the page and the server. May be called twice."""
        if self._thread.is_alive():
            self.call(self._loop.stop)
            self._thread.join()

    # The server's thread.

    def _run(self, sockets: list[socket.socket], context: ssl.SSLContext | None, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        settings: dict[str, Any] = {
            "websocket_max_message_size": _MOST_READ,
            "websocket_ping_interval": _PING_SECS,
            "websocket_ping_timeout": _PING_SECS,
            "log_function": lambda handler: None,  # no log of requests
        }
        routes = [
            (r"/measure", _Connection, {"server": self}),
            (r"/((?:static/)?)(measure\.js|style\.css|icon\.svg|)", _Static, {"server": self}),
        ]

        async def serve() -> _Server:
            server = _Server(
                # No request has a body.
                tornado.web.Application(routes, **settings),
                ssl_options=context,
                max_body_size=1,
                idle_connection_timeout=_JOIN_SECS,
            )
            server.pages = self
            server.add_sockets(sockets)
            return server

        server = self._loop.run_until_complete(serve())
        self._loop.call_soon(started.set)
        self._loop.run_forever()
        server.stop()
        self._loop.run_until_complete(server.close_all_connections())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def refusal(self, handler: tornado.web.RequestHandler) -> str | None:
        """Return why a request is rejected: its Host or Origin names another site (DNS rebinding); None if it is not."""
        if handler.request.host.lower() not in self._hosts:
            return f"This server is only reached as {self.url}."
        origin = handler.request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() not in self._hosts:
            return "Only the page of this server may connect."
        return None

    def join(self, connection: _Connection, frame: str | bytes) -> Page:
        """Admit a page by its token. Raises Refusal."""
        message, _ = read_message(frame)
        self.tokens.redeem(read_join(message))
        if self.page is not None and self.page.gone is None:
            self.page.end("the page was opened in another tab, which continues")
        page = Page(connection.send_soon, connection.part, self._changed)
        self.page, self.page_stream = page, connection.stream
        connection.returning = self.tokens.issue(None)
        connection.send_soon(write_message({"kind": "welcome", "token": connection.returning}))
        self._changed()
        return page


class _Server(tornado.httpserver.HTTPServer):
    """An HTTP server with at most `_OPEN` connections besides the page's."""

    pages: PageServer
    _streams: tuple[Any, ...] = ()

    def handle_stream(self, stream: Any, address: Any) -> None:
        """Serve a new connection; close the oldest if there are too many."""
        self._streams = (
            *(s for s in self._streams if not s.closed() and s is not self.pages.page_stream),
            stream,
        )
        for oldest in self._streams[:-_OPEN]:
            oldest.close()
        super().handle_stream(stream, address)


def _listening(place: Place) -> list[socket.socket]:
    """Open listening sockets at all addresses of the host, on one port."""
    return list(tornado.netutil.bind_sockets(place.port, place.host, reuse_port=False))


class _Static(tornado.web.RequestHandler):
    """The page and its files; GET only."""

    def initialize(self, server: PageServer) -> None:
        self._server = server

    def set_default_headers(self) -> None:
        self.clear_header("Server")

    def get(self, folder: str, name: str) -> None:
        """Answer with a file of the package."""
        refused = self._server.refusal(self)
        if refused is not None:
            # Misdirected Request (RFC 9110, 15.5.20).
            self.set_status(421)
            self.finish(refused)
            return
        if bool(folder) != bool(name):
            self.send_error(404)
            return
        file, media = _FILES[name]
        host = self.request.host
        policy = (
            "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
            f"connect-src 'self' ws://{host} wss://{host}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        for header, value in (
            ("Content-Type", f"{media}; charset=utf-8"),
            ("Content-Security-Policy", policy),
            ("Cache-Control", "no-store"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cross-Origin-Embedder-Policy", "require-corp"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.set_header(header, value)
        self.finish(files(_PACKAGE).joinpath(_FOLDER, file).read_bytes())


class _Connection(tornado.websocket.WebSocketHandler):
    """The WebSocket of one page."""

    def initialize(self, server: PageServer) -> None:
        self._server = server
        self._page: Page | None = None
        self.returning = ""
        self.stream = cast(Any, self.request.connection).stream

    def check_origin(self, origin: str) -> bool:
        """Return True: `prepare` has checked the origin already."""
        return True

    def prepare(self) -> None:
        refused = self._server.refusal(self)
        if refused is not None:
            self.set_status(403)
            self.finish(refused)

    def get_compression_options(self) -> dict[str, Any]:
        """Return the default of permessage-deflate (RFC 7692)."""
        return {}

    def open(self, *args: str, **kwargs: str) -> None:
        self._server.waiting[self] = None
        while len(self._server.waiting) > _WAITING:
            next(iter(self._server.waiting))._refuse(
                Refusal("expected a token sooner, got newer connections; load the page again")
            )
        asyncio.get_running_loop().call_later(_JOIN_SECS, self._hurry)

    def _hurry(self) -> None:
        if self._page is None and self.ws_connection is not None:
            self._refuse(Refusal(f"expected a token within {_JOIN_SECS:g} s, got none; load the page again"))

    def _arrived(self) -> None:
        self._server.waiting.pop(self, None)

    def on_message(self, message: str | bytes) -> None:
        try:
            if self._page is None:
                self._page = self._server.join(self, message)
                self._arrived()
            else:
                self._page.hear(message)
        except Refusal as refusal:
            self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> None:
        self._arrived()  # a client need not answer that it closes
        if self._page is not None:
            self._server.tokens.expire(self.returning, 0)
            self._page.leave(PageGone(f"was disconnected: {refusal}", True))
        self._write(write_message({"kind": "refused", "message": str(refusal)}))
        self.close(REFUSED, _short(str(refusal)))

    def on_close(self) -> None:
        self._arrived()
        if self._page is None:
            return
        self._server.tokens.expire(self.returning, TOKEN_SECS)
        if self.close_code in DEPARTURE_CODES:
            self._page.leave(PageGone("was closed, or hidden", True))
        else:
            self._page.leave(PageGone("is no longer reached, or broke the rules of WebSocket", False))

    # From any thread.

    def send_soon(self, frame: str | bytes) -> None:
        """Write a frame, in the order of calls."""
        self._server.call(lambda: self._write(frame))

    def part(self, why: str) -> None:
        """Close the connection after what was sent before."""
        self._server.call(lambda: self.close(REFUSED, _short(why)))

    def _write(self, frame: str | bytes) -> None:
        with contextlib.suppress(tornado.websocket.WebSocketClosedError):
            written = self.write_message(frame, binary=isinstance(frame, bytes))
            # asyncio logs the exception of a future that nobody asks for it.
            written.add_done_callback(lambda done: done.exception())


def _short(text: str) -> str:
    # The cut may split a character.
    return text.encode()[:_REASON_BYTES].decode(errors="ignore")
