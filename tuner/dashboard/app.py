"""The pages of the dashboard: read-only routes of Starlette.

Tests: `tests/tuner/dashboard/test_dashboard.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.resources import files
from threading import Lock
from time import monotonic
from typing import Any

from relax_tune.errors import DatabaseError, RelaxTuneError, TryAgainLater, UserError
from relax_tune.printable import printable
from relax_tune.tuner.dashboard.guard import App, Guard
from relax_tune.tuner.dashboard.listen import EXTRA
from relax_tune.tuner.dashboard.metrics import CONTENT_TYPE, database_metrics
from relax_tune.tuner.dashboard.pages import Pages, html, trouble
from relax_tune.tuner.report.page import style
from relax_tune.tuner.report.subject import Subject

_LOG = logging.getLogger(__name__)
_STATIC = {"refresh.js": "text/javascript", "icon.svg": "image/svg+xml", "style.css": "text/css"}
FRESH_SECS = 2.0
"""Seconds for which a rendered page is reused, so that many readers cost no more than one."""
_MAX_PAGES = 64

Answer = tuple[int, str]
"""Status and page."""


class _Recent:
    """Recent answers of one route, by path. One thread makes an answer while other threads of the route wait for it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._answers: dict[str, tuple[float, Answer]] = {}

    def get(self, path: str, make: Callable[[], Answer]) -> Answer:
        with self._lock:
            now = monotonic()
            self._answers = {p: answer for p, answer in self._answers.items() if now - answer[0] < FRESH_SECS}
            if path not in self._answers:
                while len(self._answers) >= _MAX_PAGES:
                    self._answers.pop(next(iter(self._answers)))
                answer = make()
                self._answers[path] = (monotonic(), answer)
            return self._answers[path][1]


def _answer(make: Callable[[], Subject | None], what: str) -> Answer:
    """Return a page, or a page with the reason of a failure."""
    try:
        subject = make()
        if subject is not None:
            return 200, html(subject)
    except TryAgainLater as error:
        return 503, html(trouble("The database or the fleet cannot be reached", f"{error}"))
    except RelaxTuneError as error:
        _LOG.warning("%s could not be shown: %s", what, printable(f"{error}"))
        return 500, html(trouble("This cannot be shown", f"{error}"))
    return 404, html(trouble("Unknown page", f"This database has no such {what}."))


def make_app(pages: Pages, token: str | None) -> App:
    """Return the guarded ASGI application. Every route accepts only GET, and none writes.

    Raises:
        UserError: Starlette is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route
    except ImportError:
        raise UserError(EXTRA.format("Starlette")) from None

    def route(path: str, make: Callable[..., Subject | None], what: str) -> Route:
        """Return a route of pages. The endpoint is no coroutine, so Starlette runs it in a thread."""
        recent = _Recent()

        def endpoint(request: Request) -> Response:
            keys = request.path_params
            status, text = recent.get(request.url.path, lambda: _answer(lambda: make(**keys), what))
            return Response(text.encode("utf-8", "replace"), status, media_type="text/html")

        return Route(path, endpoint, methods=["GET"])

    def metrics(request: Request) -> Response:
        try:
            return Response(database_metrics(pages.store), media_type=None, headers={"content-type": CONTENT_TYPE})
        except DatabaseError as error:
            _LOG.warning("metrics could not be read: %s", printable(f"{error}"))
            return Response(printable(f"{error}").encode("utf-8", "replace"), 503, media_type="text/plain")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _STATIC:
            return Response("unknown file", 404, media_type="text/plain")
        text = (
            style()
            if name == "style.css"
            else files("relax_tune.tuner.dashboard").joinpath("static", name).read_text("utf-8")
        )
        return Response(text, media_type=_STATIC[name])

    def missing(request: Request, error: Exception) -> Response:
        page = html(trouble("Unknown page", "The dashboard has no such page."))
        return Response(page, 404, media_type="text/html")

    routes: list[Any] = [
        route("/", pages.overview, "page"),
        route("/jobs/{id}", pages.job, "job"),
        route("/runs/{id}", pages.run, "run"),
        route("/models/{id}", pages.model, "model"),
        route("/devices/{id}", pages.device, "device"),
        route("/devices/{id}/tasks/{workload}", pages.task, "task"),
        route("/fleet", pages.fleet, "fleet"),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/static/{name}", static, methods=["GET"]),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={404: missing}), token)
