"""`relax-tune web`: an artifact in the browser.

Tests: `tests/tuner/web/test_web.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_tune.errors import UserError
from relax_tune.ir.frontend.source import find_model
from relax_tune.runtime.generation.config import read_token_ids
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.dashboard.guard import OPEN, token_for
from relax_tune.tuner.dashboard.listen import serve
from relax_tune.tuner.web.server import make_web_app, served_model


def web(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An .rta file of target webgpu or c:wasm32.")],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FOLDER",
            help="The folder with tokenizer.json. [default: none; the page takes token ids]",
        ),
    ] = None,
    fallback: Annotated[
        Path | None,
        typer.Option(
            "--fallback",
            metavar="ARTIFACT",
            help="The same model of target c:wasm32, for browsers without WebGPU. [default: none; they get a sentence]",
        ),
    ] = None,
    port: Annotated[int, typer.Option(metavar="PORT", help="The port to listen on; 0 for any that is free.")] = 8789,
    no_token: Annotated[bool, typer.Option("--no-token", help="Admit every user and program of this machine.")] = False,
) -> None:
    """Serve an artifact and a page that runs it in the browser.

    An encoder gets a page of sentence search, a decoder (functions prefill and decode) one of text generation. The server listens on
    127.0.0.1 only, and its printed address has a token, which the browser remembers; browsers offer WebGPU there and over https. An
    artifact of target c:wasm32 is compiled to WebAssembly first, by clang. The browser verifies what it downloads by hash, and keeps it
    for the next time.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port expects a number from 0 to 65535, got {port}")
    folder = None if model is None else find_model(model)
    ends = () if folder is None else _ends(folder)
    token, query = token_for(None, no_token)
    app = make_web_app(served_model(artifact, folder, ends, fallback), token)
    console = make_console(stderr=True)
    if token is None:
        say(console, OPEN)
    serve(
        app,
        "127.0.0.1",
        port,
        lambda address: say(console, f"serving {artifact} at {address}{query}; interrupt to end"),
    )


def _ends(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a text, as the model's folder says."""
    ids = read_token_ids(folder).get("eos_token_id")
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
