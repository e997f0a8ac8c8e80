"""What all routes share: admission of requests, bodies, deadlines, clients that leave, errors, metrics and logs.

Tests: `tests/tuner/serve/test_app.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from relax_tune.errors import MeasureError, ModelStateError, RelaxTuneError, UserError
from relax_tune.printable import printable
from relax_tune.tuner.serve.metrics import Labels, Metrics
from relax_tune.tuner.serve.models import Repository
from relax_tune.tuner.serve.tensors import RequestError

T = TypeVar("T")
_LOG = logging.getLogger("relax_tune.serve")
DISCARD_SECS = 2.0
BODY_RATE = 1 << 20
"""Bytes per second that a body has to arrive with after its first seconds: a request holds its place while its body arrives."""
GONE = 499
"""Status in metrics and logs of a request whose client left before the answer."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server takes.

    Attributes:
        active: Requests that are read, wait or run at a time; further ones are refused.
        body_bytes: Largest body.
        timeout_secs: Longest time from the start of a request to its answer, or to the first part of a stream.
        body_secs: Longest time for a body to arrive, with a second for each `BODY_RATE` bytes.
    """

    active: int = 256
    body_bytes: int = 64 << 20
    timeout_secs: float = 60.0
    body_secs: float = 10.0


class Reported(Protocol):
    """A state that clients may read."""

    def to_json(self) -> Mapping[str, Any]: ...


@dataclass(eq=False)
class Serving:
    """The state of a server. It belongs to the thread of the event loop.

    Attributes:
        draining: Why new requests are refused; empty while they are not.
        active: Number of requests in progress.
        background: What runs next to requests until the server ends.
        improvements: States of the models that are improved, for `/improvement`.
    """

    repository: Repository
    limits: ServerLimits
    metrics: Metrics
    draining: str = "the server is starting"
    active: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    background: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    improvements: Sequence[Reported] = ()

    def __post_init__(self) -> None:
        self.metrics.watch(lambda: self.active)
        self.idle.set()

    def enter(self) -> None:
        """Admit a request. Raises RequestError while the server starts, ends or is full."""
        if self.draining:
            raise RequestError(self.draining, 503)
        if self.active >= self.limits.active:
            raise RequestError(
                f"{self.limits.active} requests are in progress, the limit of this server; try again", 503
            )
        self.active += 1
        self.idle.clear()

    def leave(self) -> None:
        """Note that an admitted request has ended."""
        self.active -= 1
        if not self.active:
            self.idle.set()


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in progress: handlers fill in the model's name and version.

    Attributes:
        expires: Time of `time.monotonic` at which it should be answered.
        unread: Whether its body is still to be read.
    """

    request: Request
    serving: Serving
    expires: float
    labels: Labels = ("", "")
    unread: bool = True

    async def body(self) -> bytes:
        """Read the body. Raises RequestError for one that is too large, compressed or too slow."""
        limit = self.serving.limits.body_bytes
        headers = self.request.headers
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestError("content-encoding: expected a body without compression", 415)
        self.unread = False
        announced = headers.get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
            raise RequestError(f"body: expected at most {limit} bytes, got {announced[:20]}", 413)
        parts, size, now = list[bytes](), 0, time.monotonic()
        slowest = min(self.expires - now, self.serving.limits.body_secs)
        try:
            async with asyncio.timeout(slowest) as timer:
                start = asyncio.get_running_loop().time()
                async for part in self.request.stream():
                    size += len(part)
                    if size > limit:
                        raise RequestError(f"body: expected at most {limit} bytes, got more", 413)
                    parts.append(part)
                    timer.reschedule(start + min(self.expires - now, slowest + size / BODY_RATE))
        except TimeoutError:
            raise RequestError("body: it did not arrive in time", 408) from None
        return b"".join(parts)

    async def discard(self) -> None:
        """Read the rest of a body that is not used: a client that still sends would not see the answer if the connection were closed."""
        if self.unread:
            with contextlib.suppress(TimeoutError, ClientDisconnect):
                size = 0
                async with asyncio.timeout(DISCARD_SECS):
                    async for part in self.request.stream():
                        size += len(part)
                        if size > self.serving.limits.body_bytes:
                            return

    async def json(self) -> Mapping[str, Any]:
        """Read the body as a JSON object. Raises RequestError for anything else."""
        body = await self.body()
        try:
            document = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"body: expected JSON, got: {error!s:.200}") from None
        if not isinstance(document, dict):
            raise RequestError(f"body: expected an object, got a {type(document).__name__}")
        return document

    async def until_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work while the client waits; cancel it when the client leaves or time is up.

        Raises:
            ClientDisconnect: The client has left.
            RequestError: Time is up.
        """
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
        try:
            left = None if math.isinf(self.expires) else max(self.expires - time.monotonic(), 0.0)
            done, _ = await asyncio.wait({task, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            if gone in done:
                raise ClientDisconnect
            raise RequestError("the request took longer than its timeout", 504)
        finally:
            for each in (task, gone):
                each.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass


Stream = AsyncIterator[bytes]
Handler = Callable[[ActiveRequest], Awaitable["Response | Stream"]]
ErrorBody = Callable[[int, str], Mapping[str, Any]]


def route(serving: Serving, path: str, endpoint: str, handle: Handler, error_body: ErrorBody) -> Route:
    """Return a route of POST that admits, times, counts and logs requests, and turns errors into the protocol's own.

    Args:
        serving: The state of the server.
        path: Path of the route.
        endpoint: Name of the route in metrics and logs.
        handle: Returns the answer, or the parts of a stream of server-sent events.
        error_body: Returns the body of an error from its status and message.
    """

    async def answer(request: Request) -> Response:
        start = time.monotonic()
        try:
            serving.enter()
        except RequestError as error:
            note(serving, endpoint, ("", ""), error.status, start, f"{error}")
            await ActiveRequest(request, serving, start).discard()
            return failure(error, error_body)
        call = ActiveRequest(request, serving, start + serving.limits.timeout_secs)
        status, reason, streams = 500, "", False
        try:
            result = await handle(call)
            if isinstance(result, Response):
                status = result.status_code
                return result
            streams = True
            return _streamed(call, endpoint, start, result)
        except ClientDisconnect:
            status = GONE
            return Response(status_code=GONE)
        except Exception as error:
            known = as_request_error(error)
            status, reason = known.status, f"{known}"
            await call.discard()
            return failure(known, error_body)
        finally:
            if not streams:
                serving.leave()
                note(serving, endpoint, call.labels, status, start, reason)

    return Route(path, answer, methods=["POST"])


def _streamed(call: ActiveRequest, endpoint: str, start: float, parts: Stream) -> Response:
    """Return the answer of a stream; the request is in progress until its end, or until the client leaves."""
    state = {"status": GONE}

    async def sent() -> Stream:
        try:
            async for part in parts:
                yield part
            state["status"] = 200
        finally:
            await parts.aclose()  # type: ignore[attr-defined]

    async def end() -> None:
        await body.aclose()  # type: ignore[attr-defined]
        call.serving.leave()
        note(call.serving, endpoint, call.labels, state["status"], start, "")

    body = sent()
    return _Stream(body, end)


class _Stream(StreamingResponse):
    """Server-sent events, with a function that is called at their end however they end."""

    def __init__(self, body: Stream, end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(body, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._end = end

    async def __call__(self, *given: Any) -> None:
        try:
            await super().__call__(*given)
        except ClientDisconnect:
            pass
        finally:
            await asyncio.shield(asyncio.ensure_future(self._end()))


def as_request_error(error: Exception) -> RequestError:
    """Return an error as an answer: mistakes of the request say what to correct, others are logged and say little."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserError):
        return RequestError(printable(f"{error}"), 400)
    if isinstance(error, ModelStateError):
        return RequestError("the model is closed", 503)
    if isinstance(error, MeasureError):
        _LOG.error("a call failed: %s", printable(f"{error}"))
        return RequestError("the device could not run this request", 503)
    if isinstance(error, RelaxTuneError):
        _LOG.error("a call failed: %s", printable(f"{error}"))
    else:
        _LOG.error("a request failed unexpectedly", exc_info=error)
    return RequestError("the server failed; its log has the reason", 500)


def failure(error: RequestError, error_body: ErrorBody) -> Response:
    """Return the answer of an error. It says when to try again to a client that is refused for now."""
    headers = {"Retry-After": "1", "Connection": "close"} if error.status == 503 else {}
    return JSONResponse(dict(error_body(error.status, f"{error}")), error.status, headers)


def note(serving: Serving, endpoint: str, labels: Labels, status: int, start: float, reason: str) -> None:
    """Count and log a request."""
    secs = time.monotonic() - start
    serving.metrics.request(endpoint, labels, status, secs)
    fields = {"endpoint": endpoint, "model": labels[0], "version": labels[1], "status": status, "secs": round(secs, 6)}
    _LOG.info("request", extra=fields | ({"reason": printable(reason)} if reason else {}))
