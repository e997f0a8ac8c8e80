"""The server of the dashboard: routes that only read, over Starlette; uvicorn runs them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.resources import files
from threading import Lock
from time import monotonic
from typing import Any

from relax_tune.errors import DatabaseError, RelaxTuneError, TryAgainLater, UserError
from relax_tune.tuner.dashboard.guard import App, Guard
from relax_tune.tuner.dashboard.metrics import CONTENT_TYPE, database_metrics
from relax_tune.tuner.dashboard.pages import Pages
from relax_tune.tuner.printable import printable
from relax_tune.tuner.report.page import style

_LOG = logging.getLogger(__name__)
_STATIC = {"refresh.js": "text/javascript", "icon.svg": "image/svg+xml", "style.css": "text/css"}
FRESH_SECS = 2.0
"""A page is made at most once in so long, however many ask for it."""
_MOST_KEPT = 64
EXTRA = "wanted {} to serve pages, found it not installed; pip install 'relax-tune[dashboard]'"

Answer = tuple[int, str]
"""Status and page."""


class _Recent:
    """Answers of one route in the last moments, by path. One thread makes an answer, and others of this route wait for it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[str, tuple[float, Answer]] = {}

    def get(self, path: str, make: Callable[[], Answer]) -> Answer:
        with self._lock:
            now = monotonic()
            self._kept = {p: kept for p, kept in self._kept.items() if now - kept[0] < FRESH_SECS}
            if path not in self._kept:
                while len(self._kept) >= _MOST_KEPT:
                    self._kept.pop(next(iter(self._kept)))
                answer = make()
                self._kept[path] = (monotonic(), answer)
            return self._kept[path][1]


def _answer(pages: Pages, make: Callable[[str], str | None], id: str, what: str) -> Answer:
    """Return a page, or one that says why there is none."""
    try:
        page = make(id)
    except TryAgainLater as error:
        return 503, pages.trouble("The database or the fleet is away", f"{error}")
    except RelaxTuneError as error:
        _LOG.warning("%s could not be shown: %s", what, printable(f"{error}"))
        return 500, pages.trouble("This cannot be shown", f"{error}")
    if page is None:
        return 404, pages.trouble("Not found", f"This database has no such {what}.")
    return 200, page


def make_app(pages: Pages, token: str | None) -> App:
    """Return the guarded ASGI application. Every route answers GET alone, and none writes.

    Raises UserError where Starlette is not installed."""
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route
    except ImportError:
        raise UserError(EXTRA.format("Starlette")) from None

    def html(make: Callable[[str], str | None], what: str) -> Callable[[Request], Response]:
        """Return an endpoint of pages. It is no coroutine, so Starlette runs it in a thread."""
        recent = _Recent()

        def endpoint(request: Request) -> Response:
            id = request.path_params.get("id", "")
            status, text = recent.get(request.url.path, lambda: _answer(pages, make, id, what))
            return Response(text.encode("utf-8", "replace"), status, media_type="text/html")

        return endpoint

    def metrics(request: Request) -> Response:
        try:
            return Response(database_metrics(pages.store), media_type=None, headers={"content-type": CONTENT_TYPE})
        except DatabaseError as error:
            _LOG.warning("metrics could not be read: %s", printable(f"{error}"))
            return Response(printable(f"{error}").encode("utf-8", "replace"), 503, media_type="text/plain")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _STATIC:
            return Response("not found", 404, media_type="text/plain")
        text = (
            style()
            if name == "style.css"
            else files("relax_tune.tuner.dashboard").joinpath("static", name).read_text("utf-8")
        )
        return Response(text, media_type=_STATIC[name])

    def missing(request: Request, error: Exception) -> Response:
        return Response(pages.trouble("Not found", "There is no such page."), 404, media_type="text/html")

    routes: list[Any] = [
        Route("/", html(lambda _: pages.overview(), "page"), methods=["GET"]),
        Route("/jobs/{id}", html(pages.job, "job"), methods=["GET"]),
        Route("/runs/{id}", html(pages.run, "run"), methods=["GET"]),
        Route("/models/{id}", html(pages.model, "model"), methods=["GET"]),
        Route("/devices/{id}", html(pages.device, "device"), methods=["GET"]),
        Route("/fleet", html(lambda _: pages.fleet(), "fleet"), methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/static/{name}", static, methods=["GET"]),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={404: missing}), token)


def serve(app: App, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serve until interrupted. started: receives the address once the port is open

    Raises UserError where uvicorn is not installed, and for an address that cannot be listened on."""
    try:
        import uvicorn
    except ImportError:
        raise UserError(EXTRA.format("uvicorn")) from None
    # no log of requests: it would hold what clients send, and tokens with it; the server's name says nothing of its version
    config = uvicorn.Config(
        app, host=host, port=port, access_log=False, log_config=None, server_header=False, lifespan="off"
    )
    try:
        opened = config.bind_socket()
    except SystemExit:
        raise UserError(
            f"--host {host} --port {port}: wanted to listen there, but the address cannot be used; give another"
        ) from None
    opened.listen()  # so that whoever reads the address can connect
    name, bound = opened.getsockname()[:2]
    started(f"http://{f'[{name}]' if ':' in name else name}:{bound}/")
    try:
        uvicorn.Server(config).run(sockets=[opened])
    except KeyboardInterrupt:
        return
    finally:
        opened.close()
