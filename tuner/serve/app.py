"""The server: routes behind the guard, start and end of the queues, and the end at SIGTERM.

Tests: `tests/tuner/serve/test_app.py`, `tests/tuner/serve/test_serve_command.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.model import Model
from relax_tune.tuner.dashboard.guard import App, Guard
from relax_tune.tuner.serve.batcher import DeviceTurn
from relax_tune.tuner.serve.improve.recording import SizesRecorder
from relax_tune.tuner.serve.improve.sizes import ServedSizes, sizes_file
from relax_tune.tuner.serve.inference import OPEN_PATHS, inference_routes
from relax_tune.tuner.serve.metrics import Metrics
from relax_tune.tuner.serve.models import ModelArgument, Repository, serve_model
from relax_tune.tuner.serve.openai import openai_routes
from relax_tune.tuner.serve.requests import ServerLimits, Serving

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
START_SECS = 2.0
"""Seconds for which shapes are timed before the server is ready, for each function; the others are timed when it is idle."""
ENDING = "the server is ending"


def open_serving(
    arguments: Sequence[ModelArgument],
    load: Callable[[Path, ServedSizes], tuple[Artifact, Model]],
    limits: ServerLimits,
    bound_secs: float,
    recording: Path | None = None,
) -> Serving:
    """Open models for a server, with one turn for each kind of device.

    Args:
        arguments: The models.
        load: Returns an artifact and its open model, whose calls are counted; the caller closes it.
        limits: Of the server.
        bound_secs: Time within which requests should be answered.
        recording: Folder of the sizes that were served before.

    Raises:
        UserError: A folder or a symbol of rows does not fit its artifact.
    """
    metrics, turns, models = Metrics(), dict[str, DeviceTurn](), []
    for argument in arguments:
        sizes = (
            ServedSizes()
            if recording is None
            else ServedSizes.read(sizes_file(recording, argument.name, argument.version))
        )
        artifact, model = load(argument.path, sizes)
        turn = turns.setdefault(artifact.device_kind, DeviceTurn())
        models.append(serve_model(argument, artifact, model, turn, metrics, bound_secs, sizes))
    return Serving(Repository(models), limits, metrics)


def record_sizes(serving: Serving, folder: Path, tell: Callable[[str], None]) -> None:
    """Have a server write the sizes it is served. tell: receives a sentence when it cannot"""
    serving.background.append(SizesRecorder(serving.repository.models, folder, tell).work)


def make_serve_app(serving: Serving, token: str | None) -> App:
    """Return the guarded ASGI application. token: what clients have to give; None admits everybody on this machine"""

    async def metrics(request: Request) -> Response:
        return Response(serving.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def improvement(request: Request) -> Response:
        return JSONResponse({"models": [state.to_json() for state in serving.improvements]})

    async def missing(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"unknown path {request.url.path[:200]!r}"}, 404)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with _running(serving):
            yield

    own = [Route("/metrics", metrics, methods=["GET"]), Route("/improvement", improvement, methods=["GET"])]
    routes = [*own, *inference_routes(serving), *openai_routes(serving)]
    app = Starlette(routes=routes, exception_handlers={404: missing}, lifespan=lifespan)
    return Guard(app, token, methods=("GET", "HEAD", "POST"), open_paths=OPEN_PATHS)


@contextlib.asynccontextmanager
async def _running(serving: Serving) -> AsyncIterator[None]:
    """Run the queues of all models."""
    models = serving.repository.models
    batchers = [b for m in models for b in m.batchers.values()]
    for batcher in (b for m in models if m.generator is None for b in m.batchers.values()):
        if batcher.function.joining is not None:
            await batcher.measure(batcher.function.times.corners(), START_SECS)
    tasks = [asyncio.create_task(work) for b in batchers for work in (b.work(), b.measure_when_idle())]
    tasks += [asyncio.create_task(work()) for work in serving.background]
    serving.draining = ""
    try:
        yield
    finally:
        serving.draining = ENDING
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for generator in (m.generator for m in serving.repository.models if m.generator is not None):
            await generator.close()
        for turn in {m.turn for m in serving.repository.models}:
            turn.close()


class DrainingServer(uvicorn.Server):  # type: ignore[misc,unused-ignore]
    """A server that answers the requests in progress after SIGTERM or SIGINT, while it refuses new ones with status 503, and then ends.

    A second signal ends it at once.

    Args:
        config: Of uvicorn.
        serving: The state of the server.
        drain_secs: Longest time to wait for requests in progress.
        tell: Receives a sentence when the end begins.
    """

    def __init__(
        self, config: uvicorn.Config, serving: Serving, drain_secs: float, tell: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._serving, self._drain_secs, self._tell = serving, drain_secs, tell
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    async def serve(self, sockets: Any = None) -> None:
        """Serve until a signal comes."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the end at the first signal, and end at the second."""
        if self._serving.draining == ENDING or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self._serving.draining = ENDING
        self._loop.call_soon_threadsafe(self._begin, signal.Signals(sig).name)

    def _begin(self, name: str) -> None:
        active = self._serving.active
        self._tell(f"{name}: {active} requests in progress are answered, new ones are refused")
        self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_secs):
                await self._serving.idle.wait()
        self.should_exit = True
