"""Routes of the Open Inference Protocol, version 2, over REST, with the binary tensor data extension.

Source: https://github.com/kserve/open-inference-protocol.

Tests: `tests/tuner/serve/test_app.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from relax_tune.tuner.serve.functions import ServedFunction, spec_json
from relax_tune.tuner.serve.models import ModelVersion
from relax_tune.tuner.serve.requests import ActiveRequest, Serving, failure, route
from relax_tune.tuner.serve.tensors import HEADER, RequestError, read_request, write_response

T = TypeVar("T")
LARGE = 1 << 18
"""Bytes from which tensors are converted in a thread."""
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
"""Paths that probes reach without a token; they tell nothing but whether the server answers."""


def error_body(status: int, message: str) -> Mapping[str, Any]:
    """Return the protocol's error."""
    return {"error": message}


def inference_routes(serving: Serving) -> list[Route]:
    """Return the routes."""

    async def server(request: Request) -> Response:
        try:
            own = version("relax-tune")
        except PackageNotFoundError:
            own = "0"
        return JSONResponse({"name": "relax-tune", "version": own, "extensions": ["binary_tensor_data"]})

    async def live(request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(request: Request) -> Response:
        return JSONResponse({"ready": not serving.draining}, 503 if serving.draining else 200)

    def of_model(path: str, answer: Any) -> list[Route]:
        async def endpoint(request: Request) -> Response:
            name, number = request.path_params["model"], request.path_params.get("version")
            try:
                model, function, _ = serving.repository.find_function(name, number)
            except RequestError as error:
                return failure(error, error_body)
            return answer(name, model, function)  # type: ignore[no-any-return]

        return [Route(f"{start}{path}", endpoint, methods=["GET"]) for start in _STARTS]

    def metadata(name: str, model: ModelVersion, function: ServedFunction) -> Response:
        versions = [str(v) for v in sorted(serving.repository.by_name[name])]
        return JSONResponse(
            {
                "name": name,
                "versions": versions,
                "platform": f"relax_tune_{model.model.artifact.device_kind.replace(',', '_')}",
                "inputs": [spec_json(spec) for spec in function.inputs],
                "outputs": [spec_json(spec) for spec in function.outputs],
            }
        )

    def model_ready(name: str, model: ModelVersion, function: ServedFunction) -> Response:
        body = {"name": name, "ready": not serving.draining}
        return JSONResponse(body, 503 if serving.draining else 200)

    async def infer(call: ActiveRequest) -> Response:
        return await _infer(call)

    return [
        Route("/v2", server, methods=["GET"]),
        Route("/v2/health/live", live, methods=["GET"]),
        Route("/v2/health/ready", ready, methods=["GET"]),
        *of_model("", metadata),
        *of_model("/ready", model_ready),
        *(route(serving, f"{start}/infer", "infer", infer, error_body) for start in _STARTS),
    ]


_STARTS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")


async def _infer(call: ActiveRequest) -> Response:
    """Answer a request to infer."""
    parameters = call.request.path_params
    name = parameters["model"]
    model, function, batcher = call.serving.repository.find_function(name, parameters.get("version"))
    call.labels = name, str(model.version)
    body = await call.body()
    header = call.request.headers.get(HEADER)
    read = partial(read_request, body, header, function.inputs)
    request = await _in_thread(read, len(body))
    if request.timeout_secs is not None:
        call.expires = min(call.expires, time.monotonic() + request.timeout_secs)
    checked = function.check(request.arrays)
    results = await call.until_gone(batcher.infer(checked, call.expires))
    named = {spec.name: array for spec, array in zip(function.outputs, results, strict=True)}
    size = sum(array.nbytes for array in results)
    write = partial(write_response, name, str(model.version), request, named)
    text, header_length = await _in_thread(write, size)
    if header_length is None:
        return Response(text, media_type="application/json")
    return Response(text, media_type="application/octet-stream", headers={HEADER: str(header_length)})


async def _in_thread(function: Callable[[], T], size: int) -> T:
    """Call a function that converts tensors of `size` bytes: large ones in a thread, so that other requests go on meanwhile."""
    return function() if size < LARGE else await asyncio.to_thread(function)
