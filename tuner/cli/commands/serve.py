"""`relax-tune serve`: artifacts over HTTP.

Tests: `tests/tuner/serve/test_serve_command.py`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.model import Model
from relax_tune.runtime.shapes import ShapeRecorder
from relax_tune.tuner.cli.commands.options import Device, SettingFlags, with_settings
from relax_tune.tuner.cli.commands.run import RequireSignedOption, ThreadsOption, load_signed, open_model
from relax_tune.tuner.cli.report.console import make_console
from relax_tune.tuner.cli.report.logs import teller
from relax_tune.tuner.dashboard.guard import access
from relax_tune.tuner.dashboard.listen import serve as listen
from relax_tune.tuner.measure.cluster.address import is_loopback

if TYPE_CHECKING:
    import uvicorn

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
RecordShapes = Annotated[
    Path | None,
    typer.Option(
        "--record-shapes",
        metavar="FOLDER",
        help="Folder for the sizes of the last calls of each model, NAME.VERSION.shapes.json, which `tune --profile` reads; read "
        "again at the next start. [default: not written]",
    ),
]
Improve = Annotated[
    bool,
    typer.Option(
        "--improve",
        help="Tune models for the sizes they are served, in a process of the lowest priority, and swap in artifacts that are faster and "
        "compute the same. They are written next to the given file, as NAME.improved.rta, which a later start with --improve serves.",
    ),
]
ImproveSecs = Annotated[float, typer.Option(metavar="X.Y", help="Longest time of one tuning.")]
ImproveVia = Annotated[
    Literal["here", "jobs"],
    typer.Option(
        metavar="PLACE",
        help="Where models are tuned: here, in a child process; jobs, by a service of the database (`jobs work`).",
    ),
]
ImproveFrom = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]MODEL",
        help="The model that an artifact was built from. May be repeated. [default: the folder of --model]",
    ),
]
ImproveTolerance = Annotated[
    float,
    typer.Option(
        metavar="X.Y",
        help="Greatest difference of a result that a swap may make, relative to the result's largest element.",
    ),
]
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
    record_shapes: RecordShapes = None,
    improve: Improve = False,
    improve_secs: ImproveSecs = 600.0,
    improve_via: ImproveVia = "here",
    improve_from: ImproveFrom = None,
    improve_tolerance: ImproveTolerance = 1e-3,
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
    _check_numbers(improve_secs=improve_secs, improve_tolerance=improve_tolerance)
    if improve and require_signed is not None:
        raise UserError("--improve with --require-signed: improved artifacts are not signed; leave one out")
    token, query = access(host, port, token_file, no_token, TOKEN_VARIABLE)
    chosen = settings.load_any()
    tell = teller(chosen.logs, make_console(stderr=True), "serve")
    app, models = _imported("app", "serve"), _imported("models", "serve")
    start = _imported("improve.start", "serve,tune") if improve else None
    arguments = models.read_arguments(artifacts, model or (), rows or ())
    sources = models.by_name("--improve-from", improve_from or (), {a.name for a in arguments})
    with contextlib.ExitStack() as stack:

        def load(path: Path, sizes: ShapeRecorder) -> tuple[Artifact, Model]:
            loaded = load_signed(path, require_signed)
            served = loaded if start is None else start.load_improved(path, loaded, tell)
            return served, stack.enter_context(open_model(served, device, sizes, threads=threads))

        limits = app.ServerLimits(queue, body_mb << 20, timeout_secs)
        serving = app.open_serving(arguments, load, limits, p99_ms / 1e3, record_shapes)
        if record_shapes is not None:
            app.record_sizes(serving, record_shapes, tell)
        if start is not None:
            given = improve_secs, improve_tolerance, improve_via, chosen.db, chosen.files, sources, device, threads
            start.improve_models(serving, start.ImproveOptions(*given), tell)
        _warn(tell, host, token)
        started = lambda url: tell(f"serving {serving.repository} at {url}{query}; interrupt to end")
        make = partial(app.DrainingServer, serving=serving, drain_secs=drain_secs, tell=tell)
        _listen(app.make_serve_app(serving, token), host, port, started, make)


def _warn(tell: Callable[[str], None], host: str, token: str | None) -> None:
    """Say who can read and use what is served."""
    for sentence in [PLAIN] * (not is_loopback(host)) + [OPEN] * (token is None):
        tell(sentence)


def _listen(
    app: Any, host: str, port: int, started: Callable[[str], None], make: Callable[[uvicorn.Config], uvicorn.Server]
) -> None:
    """Serve an application until a signal, with limits for slow clients. Further arguments as of `listen`."""
    connections = _imported("connections", "serve")
    connections.many_files()
    more = {"lifespan": "on", "timeout_graceful_shutdown": 1, "http": connections.TimedConnection}
    listen(app, host, port, started, make, **more)


def _imported(name: str, extras: str) -> Any:
    """Return a module of the server. Raises UserError naming the extras that it needs."""
    try:
        return importlib.import_module(f"relax_tune.tuner.serve.{name}")
    except ImportError as error:
        raise UserError(
            f"serving needs {error.name}, which is not installed; pip install 'relax-tune[{extras}]'"
        ) from None


def _check_numbers(**numbers: float) -> None:
    """Raise UserError for a number that is not above 0."""
    for name, value in numbers.items():
        if not 0 < value < 1e9:
            raise UserError(f"--{name.replace('_', '-')} expects a number above 0, got {value}")
