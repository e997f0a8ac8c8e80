"""The models of a server: artifacts by name and version, with the folders of their tokenizers.

Tests: `tests/tuner/serve/test_app.py`, `tests/tuner/serve/test_serve_command.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from relax_tune.errors import UserError
from relax_tune.ir.frontend.source import find_model
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.generation.decoder import DECODE, ENCODE, PREFILL
from relax_tune.runtime.generation.paged import STEP
from relax_tune.runtime.model import Model
from relax_tune.tuner.serve.batcher import Batcher, DeviceTurn
from relax_tune.tuner.serve.functions import ServedFunction, swapped
from relax_tune.tuner.serve.generator import Generator
from relax_tune.tuner.serve.improve.sizes import ServedSizes, sample_sizes
from relax_tune.tuner.serve.metrics import Metrics
from relax_tune.tuner.serve.paged_generator import PagedGenerator
from relax_tune.tuner.serve.rows import Joining, sample, symbol_number
from relax_tune.tuner.serve.tensors import RequestError
from relax_tune.tuner.serve.texts import TextEncoder, encoder_joining

WARM_SIZES = 8
"""Served sizes that run once before an artifact is swapped in; each takes the device for the time of a call."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class ModelArgument:
    """A model to serve: a file, its name and version, the folder of its tokenizer, and the symbol of its independent rows."""

    path: Path
    name: str
    version: int = 1
    folder: Path | None = None
    rows: str | None = None


def read_arguments(artifacts: Sequence[str], folders: Sequence[str], rows: Sequence[str]) -> list[ModelArgument]:
    """Read the arguments `[NAME[:VERSION]=]FILE` and the options `--model [NAME=]FOLDER`, `--rows [NAME=]SYMBOL`.

    Raises:
        UserError: A name occurs twice with the same version, or an option names no model.
    """
    files = []
    for text in artifacts:
        label, separator, path = text.partition("=")
        if not separator or Path(text).exists():
            label, path = Path(text).name.removesuffix(".rta"), text
        name, separator, version = label.partition(":")
        if not _NAME.fullmatch(name) or (separator and not re.fullmatch(r"[1-9][0-9]{0,8}", version)):
            raise UserError(
                f"{text!r:.200}: expected [NAME[:VERSION]=]FILE, a name of letters, digits, . _ - and a version from 1; give such a name"
            )
        files.append(ModelArgument(Path(path), name, int(version or 1)))
    keys = [(m.name, m.version) for m in files]
    twice = [k for k in keys if keys.count(k) > 1]
    if twice:
        name, number = twice[0]
        raise UserError(f"expected each model once, got {name} version {number} twice; write NAME:VERSION=FILE")
    names = {m.name for m in files}
    by_folder, by_rows = by_name("--model", folders, names), by_name("--rows", rows, names)
    read = {name: _folder(text) for name, text in by_folder.items()}
    return [ModelArgument(m.path, m.name, m.version, read.get(m.name), by_rows.get(m.name)) for m in files]


def _folder(text: str) -> Path:
    folder = find_model(text)
    if not folder.is_dir():
        raise UserError(
            f"--model {text}: expected the folder of a model, got {folder}, which is none; correct the path"
        )
    return folder


def by_name(flag: str, values: Sequence[str], names: set[str]) -> dict[str, str]:
    """Read the values `[NAME=]VALUE` of an option, by name. Raises UserError for an unknown name, and for one that occurs twice."""
    chosen: dict[str, str] = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or (name not in names and len(names) == 1):
            if len(names) > 1:
                raise UserError(f"{flag} {text}: expected NAME=VALUE with a name among {', '.join(sorted(names))}")
            name, value = next(iter(names)), text
        if name not in names or name in chosen:
            raise UserError(
                f"{flag} {text}: expected each of {', '.join(sorted(names))} at most once, got {name!r:.80}"
            )
        chosen[name] = value
    return chosen


@dataclass(eq=False)
class ModelVersion:
    """A version of a model.

    Attributes:
        argument: How it was given.
        artifact: The artifact whose programs calls run now.
        functions: The function that `infer` calls; several, as `NAME.FUNCTION`, where none of them is `main`.
        batchers: Their queues, by name.
        encoder: Texts of an encoder.
        generator: Texts of a decoder.
        sizes: The sizes of its last calls.
    """

    argument: ModelArgument
    artifact: Artifact
    model: Model
    turn: DeviceTurn
    functions: dict[str, ServedFunction]
    metrics: Metrics
    sizes: ServedSizes
    batchers: dict[str, Batcher] = field(default_factory=dict)
    encoder: TextEncoder | None = None
    generator: Generator | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.argument.name

    @property
    def version(self) -> int:
        """Its version."""
        return self.argument.version

    @property
    def labels(self) -> tuple[str, str]:
        """Name and version, for metrics."""
        return self.name, str(self.version)

    async def swap(self, artifact: Artifact) -> None:
        """Run another artifact from the next call on; requests go on meanwhile (`Model.swap`).

        Raises:
            RelaxTuneError: It does not fit, or cannot be opened.
        """
        functions = await asyncio.to_thread(self._swapped, artifact)
        for label, function in functions.items():
            self.functions[label] = self.batchers[label].function = function
        self.artifact = artifact
        self.metrics.swap(self.labels)

    def _swapped(self, artifact: Artifact) -> dict[str, ServedFunction]:
        with _short_switches():
            joinings = dict[str, Joining | None]()
            for label, function in self.functions.items():
                joining = _joining(self.argument, artifact, function.name, self.encoder is not None)
                if _kind(joining) != _kind(function.joining):
                    raise UserError(
                        f"{label}: expected an artifact whose requests run together as before, got another; build it again"
                    )
                joinings[label] = joining
            self.model.swap(artifact, self._warm)
            return {label: swapped(f, joinings[label]) for label, f in self.functions.items()}

    def _warm(self, executors: Mapping[str, Executor]) -> None:
        """Run common sizes once, so that no request is the first one to touch the weights and to bind its kernels."""
        for (name, values), _ in sample_sizes(self.sizes.counts(), WARM_SIZES):
            executor = executors[name]
            record, executor.record = executor.record, None
            try:
                arrays = sample(executor.program, values, executor.bind(values).values)
                executor.run(arrays, in_place=True)
            except UserError:  # a size that the program refuses
                continue
            finally:
                executor.record = record


@contextlib.contextmanager
def _short_switches() -> Iterator[None]:
    """Have other threads wait for at most half a millisecond for Python's lock while an artifact is opened; by default it is 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _kind(joining: Joining | None) -> tuple[int, int | None] | None:
    return None if joining is None else (joining.batch, joining.padded)


def serve_model(
    argument: ModelArgument,
    artifact: Artifact,
    model: Model,
    turn: DeviceTurn,
    metrics: Metrics,
    bound_secs: float,
    sizes: ServedSizes,
) -> ModelVersion:
    """Prepare an opened artifact for requests. sizes: what `model` counts its calls in

    Raises:
        UserError: The folder or the symbol of rows does not fit the artifact.
    """
    paged = STEP in artifact.functions
    decodes = paged or {PREFILL, DECODE} <= set(artifact.functions)
    encoder = None if argument.folder is None or decodes else TextEncoder(artifact, argument.folder)
    single = "main" in artifact.functions or len(artifact.functions) == 1
    functions = dict[str, ServedFunction]()
    for name in artifact.functions if not single else [_only(artifact)]:
        label = argument.name if single else f"{argument.name}.{name}"
        functions[label] = ServedFunction(model, name, _joining(argument, artifact, name, encoder is not None))
    served = ModelVersion(argument, artifact, model, turn, functions, metrics, sizes, encoder=encoder)
    for label, function in functions.items():
        if argument.rows is not None and function.joining is not None:
            function.check_rows()
        observe = partial(sizes.timed, function.name)
        labels = label, str(argument.version)
        served.batchers[label] = Batcher(function, turn, bound_secs, metrics, labels, observe=observe)
        metrics.watch_queue(labels, served.batchers[label].__len__)
    if decodes and argument.folder is not None and ENCODE not in artifact.functions:
        kind = PagedGenerator if paged else Generator
        served.generator = kind(model, argument.folder, turn, metrics, served.labels)
    return served


def _only(artifact: Artifact) -> str:
    return "main" if "main" in artifact.functions else artifact.functions[0]


def _joining(argument: ModelArgument, artifact: Artifact, name: str, encodes: bool) -> Joining | None:
    """Return how requests of a function run together: as declared, as an encoder's texts, or as the build proved; else None."""
    program = next((p for p in artifact.programs if p.name == name), None)
    if program is None or name in {d.name for d in artifact.host_programs}:
        if argument.rows is not None:
            raise UserError(f"--rows {argument.rows}: expected a function of one program, got {name}; leave it out")
        return None
    if encodes and (joining := encoder_joining(program)) is not None:
        return joining
    if argument.rows is not None:
        return Joining(program, symbol_number(program, argument.rows))
    proved = artifact.independent_rows.get(name)
    if proved is None:
        return None
    try:
        return Joining(program, symbol_number(program, proved))
    except UserError:  # rows are independent, but they are not the first dims
        return None


class Repository:
    """The models of a server, by name and version."""

    def __init__(self, models: Sequence[ModelVersion]) -> None:
        self.models = tuple(sorted(models, key=lambda m: (m.name, m.version)))
        self.by_name: dict[str, dict[int, ModelVersion]] = {}
        for model in self.models:
            for label in {model.name, *model.functions}:
                self.by_name.setdefault(label, {})[model.version] = model

    def __str__(self) -> str:
        return ", ".join(f"{m.name} version {m.version}" for m in self.models)

    def find(self, name: str, version: str | None = None) -> ModelVersion:
        """Return a model; without a version the greatest one. Raises RequestError for an unknown one."""
        versions = self.by_name.get(name)
        if not versions:
            raise RequestError(f"expected a model among {', '.join(sorted(self.by_name))}, got {name!r:.80}", 404)
        if version is None:
            return versions[max(versions)]
        number = int(version) if re.fullmatch(r"[0-9]{1,9}", version) else -1
        if number not in versions:
            listed = ", ".join(str(v) for v in sorted(versions))
            raise RequestError(f"model {name}: expected a version among {listed}, got {version!r:.80}", 404)
        return versions[number]

    def find_function(self, name: str, version: str | None) -> tuple[ModelVersion, ServedFunction, Batcher]:
        """Return the function that a name of the protocol stands for. Raises RequestError for an unknown one."""
        model = self.find(name, version)
        if name not in model.functions:
            listed = ", ".join(sorted(model.functions))
            raise RequestError(f"model {name}: expected one of its functions, {listed}", 404)
        return model, model.functions[name], model.batchers[name]
