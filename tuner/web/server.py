"""The server of pages that run an artifact on the browser's WebGPU or WebAssembly, over Starlette.

Tests: `tests/tuner/web/test_web.py`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.runtime.generation.decoder import DECODE, ENCODE, PREFILL
from relax_tune.runtime.hashed_zip import digest_at_end
from relax_tune.tuner.dashboard.guard import App, Guard
from relax_tune.tuner.dashboard.listen import EXTRA
from relax_tune.tuner.web.wasm import WasmFiles, is_wasm, wasm_files

_STATIC = {
    "relax-tune.js": "text/javascript",
    "search.js": "text/javascript",
    "generate.js": "text/javascript",
    "wasm_worker.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_IDS = "input_ids"
_TEXT_INPUTS = {_IDS, "attention_mask", "token_type_ids"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An artifact to serve.

    path: the file; page: name of the page that runs it
    folder: the folder of its tokenizer, if any; ends: tokens that end a text
    gpu: whether the file is for WebGPU; wasm: its form for WebAssembly, if any
    """

    path: Path
    page: str
    folder: Path | None = None
    ends: tuple[int, ...] = ()
    gpu: bool = True
    wasm: WasmFiles | None = None

    def facts(self) -> dict[str, Any]:
        """Return what a page has to know before it downloads the artifact."""
        facts: dict[str, Any] = {"name": self.path.name, "tokenizer": self.folder is not None, "ends": list(self.ends)}
        if self.gpu:
            facts |= {"url": "model.rta", "bytes": os.path.getsize(self.path), "digest": digest_at_end(self.path)}
        if self.wasm is not None:
            facts["wasm"] = self.wasm.facts()
        return facts

    def file(self, name: str) -> Path | None:
        """Return the file that is downloaded under a name; None for an unknown name."""
        if self.wasm is not None and name in ("model.module", "model.weights"):
            return self.wasm.module if name == "model.module" else self.wasm.weights
        return self.path if self.gpu and name == "model.rta" else None


def served_model(
    path: Path, folder: Path | None = None, ends: tuple[int, ...] = (), fallback: Path | None = None
) -> ServedModel:
    """Verify an artifact, compile it where it is for WebAssembly, and choose its page.

    fallback: an artifact of the same functions, for browsers without WebGPU

    Raises: UserError for one that no page runs, and for a folder without a tokenizer; ArtifactError for one that cannot be read;
    BuildError for one that does not compile.
    """
    artifact = _checked(path)
    gpu = artifact.device_kind == "webgpu"
    if folder is not None and not os.path.isfile(folder / _TOKENIZER[0]):
        raise UserError(
            f"{folder}: expected a folder with a {_TOKENIZER[0]}, got none; leave --model out to write token ids"
        )
    page = _page_of(artifact)
    if fallback is None:
        return ServedModel(path, page, folder, ends, gpu, None if gpu else wasm_files(artifact))
    second = _checked(fallback)
    if not gpu or second.device_kind == "webgpu":
        raise UserError(
            f"--fallback {fallback}: expected a fallback for c:wasm32 of an artifact for webgpu, got a fallback for "
            f"{second.device_kind} of an artifact for {artifact.device_kind}"
        )
    if _page_of(second) != page:
        raise UserError(
            f"--fallback {fallback}: expected the functions of {path}, got others; build both from one model"
        )
    return ServedModel(path, page, folder, ends, gpu, wasm_files(second))


def _checked(path: Path) -> Artifact:
    """Load an artifact that browsers run. Raises UserError for another."""
    artifact = load_artifact(path)
    if artifact.device_kind != "webgpu" and not is_wasm(artifact):
        raise UserError(
            f"{path}: expected an artifact for webgpu or c:wasm32, which browsers run, got one for {artifact.device_kind}; build it "
            "with --target webgpu or --target c:wasm32"
        )
    if artifact.host_programs:
        names = ", ".join(sorted(p.name for p in artifact.host_programs))
        raise UserError(
            f"{path}: expected functions without branches, which the browser's runtime runs, got {names}; use `relax-tune run`"
        )
    return artifact


def _page_of(artifact: Artifact) -> str:
    """Return the name of the page that runs an artifact. Raises UserError for an artifact without one."""
    functions = set(artifact.functions)
    if {PREFILL, DECODE} <= functions and ENCODE not in functions:
        return "generate"
    if "main" in functions:
        program = artifact.function("main")
        names = {program.buffers[i].name for i in program.inputs}
        if names >= {_IDS} and names <= _TEXT_INPUTS and len(program.buffers[program.outputs[0]].shape) == 2:
            return "search"
    raise UserError(
        f"{artifact.path}: expected an encoder of {_IDS} with one row a text, or the functions {PREFILL} and {DECODE}, got "
        f"{', '.join(sorted(functions))}; a page of your own may import relax-tune.js (docs/guides/browser.md)"
    )


def make_web_app(model: ServedModel, token: str | None) -> App:
    """Return the guarded ASGI application: the page, the runtime, the artifact. Every route answers only GET.

    token: what clients have to give; None admits everybody on this machine

    Raises: UserError where Starlette is not installed."""
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import FileResponse, Response
        from starlette.routing import Route
    except ImportError:
        raise UserError(EXTRA.format("Starlette")) from None

    def packaged(name: str, media: str) -> Response:
        return Response(files("relax_tune.tuner.web").joinpath("static", name).read_bytes(), media_type=media)

    def page(request: Request) -> Response:
        return packaged(f"{model.page}.html", "text/html")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        return packaged(name, _STATIC[name]) if name in _STATIC else Response("not found", 404)

    def facts(request: Request) -> Response:
        try:
            return Response(json.dumps(model.facts()), media_type="application/json")
        except OSError as error:
            return Response(f"the artifact cannot be read: {error.strerror}", 503, media_type="text/plain")

    def file(request: Request) -> Response:
        name = request.path_params["name"]
        downloaded = model.file(name)
        if downloaded is not None:
            if not os.path.isfile(downloaded):
                return Response("the artifact is gone", 503, media_type="text/plain")
            return FileResponse(downloaded, media_type="application/octet-stream")
        path = None if model.folder is None else model.folder / name
        if path is None or path.name not in _TOKENIZER:
            return Response("not found", 404, media_type="text/plain")
        if path.name == _TOKENIZER[1] and not os.path.isfile(path):
            return Response("{}", media_type="application/json")
        return FileResponse(path, media_type="application/json")

    routes: list[Any] = [
        Route("/", page, methods=["GET"]),
        Route("/model.json", facts, methods=["GET"]),
        Route("/static/{name}", static, methods=["GET"]),
        Route("/{name}", file, methods=["GET"]),
    ]
    return Guard(Starlette(routes=routes), token, wasm=True)
