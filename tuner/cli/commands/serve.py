"""`relax-tune serve`: artifacts over HTTP.

Tests: `tests/tuner/serve/test_serve_command.py`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.model import Model
from relax_tune.tuner.cli.commands.options import Device, SettingFlags, with_settings
from relax_tune.tuner.cli.commands.run import RequireSignedOption, ThreadsOption, load_signed, open_model
from relax_tune.tuner.cli.report.console import make_console
from relax_tune.tuner.cli.report.logs import teller
from relax_tune.tuner.dashboard.guard import access
from relax_tune.tuner.dashboard.listen import serve as listen
from relax_tune.tuner.measure.cluster.address import is_loopback

TOKEN_VARIABLE = "RELAX_TUNE_SERVE_TOKEN"
OPEN = "without a token, every user and every program of this machine can use these models"
PLAIN = "the token and all tensors travel as they are: where others could listen, put a server with TLS before this one"

Artifacts = Annotated[
    list[str],
    typer.Argument(
        metavar="ARTIFACT...",
        help="Each an .rta file, or NAME=FILE, or NAME:VERSION=FILE. [default: the file's name, version 1]",
    ),
]
Folders = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="[NAME=]FOLDER",
        help="The folder with the model's tokenizer.json, for /v1. May be repeated. [default: none, only /v2]",
    ),
]
Rows = Annotated[
    list[str] | None,
    typer.Option(
        "--rows",
        metavar="[NAME=]SYMBOL",
        help="Declare that rows along this symbol are independent, so that requests run together. May be repeated. "
        "[default: as the build proved, and texts of encoders]",
    ),
]
Host = Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")]
Port = Annotated[int, typer.Option(metavar="PORT", help="The port to listen on; 0 for any that is free.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=f"A file whose one line is the token that clients give; the variable {TOKEN_VARIABLE} holds one too. [default: a new one, in "
        "the printed address]",
    ),
]
NoToken = Annotated[
    bool, typer.Option("--no-token", help="Admit every user and program of this machine, on 127.0.0.1.")
]
P99Ms = Annotated[
    float, typer.Option("--p99-ms", metavar="X.Y", help="Milliseconds within which requests should be answered.")
]
Queue = Annotated[
    int, typer.Option(metavar="N", help="Requests in progress; further ones are refused with status 503.")
]
BodyMb = Annotated[int, typer.Option(metavar="N", help="Largest body of a request, in MiB.")]
TimeoutSecs = Annotated[float, typer.Option(metavar="X.Y", help="Longest time from a request to its answer.")]
DrainSecs = Annotated[float, typer.Option(metavar="X.Y", help="Longest time for requests in progress after SIGTERM.")]


@with_settings("serve")
def serve(
    artifacts: Artifacts,
    *,
    settings: SettingFlags,
    model: Folders = None,
    rows: Rows = None,
    host: Host = "127.0.0.1",
    port: Port = 8790,
    token_file: TokenFile = None,
    no_token: NoToken = False,
    p99_ms: P99Ms = 100.0,
    queue: Queue = 256,
    body_mb: BodyMb = 64,
    timeout_secs: TimeoutSecs = 60.0,
    drain_secs: DrainSecs = 30.0,
    require_signed: RequireSignedOption = None,
    device: Device = None,
    threads: ThreadsOption = None,
) -> None:
    """Serve artifacts over HTTP, with batches by measured times.

    /v2 is the Open Inference Protocol for any artifact. With --model, /v1/embeddings serves encoders, and /v1/completions and
    /v1/chat/completions serve decoders, in the form of OpenAI's API. /metrics is for Prometheus. Clients give the token as a Bearer
    token. The address is plain HTTP: put a server with TLS before it where others could listen.
    """
    _check_numbers(p99_ms=p99_ms, queue=queue, body_mb=body_mb, timeout_secs=timeout_secs, drain_secs=drain_secs)
    token, query = access(host, port, token_file, no_token, TOKEN_VARIABLE)
    tell = teller(settings.load_any().logs, make_console(stderr=True), "serve")
    try:
        from relax_tune.tuner.serve.app import DrainingServer, make_serve_app, open_serving
        from relax_tune.tuner.serve.models import read_arguments
        from relax_tune.tuner.serve.requests import ServerLimits
    except ImportError as error:
        raise UserError(
            f"serving needs {error.name}, which is not installed; pip install 'relax-tune[serve]'"
        ) from None
    limits = ServerLimits(queue, body_mb << 20, timeout_secs)
    with contextlib.ExitStack() as stack:

        def load(path: Path) -> tuple[Artifact, Model]:
            loaded = load_signed(path, require_signed)
            return loaded, stack.enter_context(open_model(loaded, device, threads=threads))

        serving = open_serving(read_arguments(artifacts, model or (), rows or ()), load, limits, p99_ms / 1e3)
        for sentence in [PLAIN] * (not is_loopback(host)) + [OPEN] * (token is None):
            tell(sentence)
        listen(
            make_serve_app(serving, token),
            host,
            port,
            lambda address: tell(f"serving {serving.repository} at {address}{query}; interrupt to end"),
            lambda config: DrainingServer(config, serving, drain_secs, tell),
            lifespan="on",
            timeout_graceful_shutdown=1,
        )


def _check_numbers(**numbers: float) -> None:
    """Raise UserError for a number that is not above 0."""
    for name, value in numbers.items():
        if not 0 < value < 1e9:
            raise UserError(f"--{name.replace('_', '-')} expects a number above 0, got {value}")
