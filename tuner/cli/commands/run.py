"""`relax-tune run`: text to embeddings or to more text, or arrays to arrays.

Tests: `tests/tuner/cli/test_run_texts.py`, `tests/tuner/cli/test_run_head.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from relax_tune.errors import UserError
from relax_tune.ir.frontend.source import find_model
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.runtime.atomic_write import unused_name
from relax_tune.runtime.generation.decoder import DECODE, PREFILL
from relax_tune.runtime.model import Model, choose_function
from relax_tune.runtime.program.host_program import HostProgram
from relax_tune.runtime.program.program import SMALL, Program
from relax_tune.runtime.shapes import ShapeProfile, ShapeRecorder
from relax_tune.runtime.signature import TensorSpec, function_specs
from relax_tune.runtime.vm.policy import PlacementOptions
from relax_tune.tuner.array_files import read_arrays
from relax_tune.tuner.cli.commands.completions import (
    Beams,
    Completion,
    DecodingOptions,
    MaxNewTokens,
    RepetitionPenalty,
    Seed,
    Stop,
    Stream,
    Temperature,
    TopK,
    TopP,
    complete,
)
from relax_tune.tuner.cli.commands.options import Device, Function, Json, print_json
from relax_tune.tuner.cli.report.console import make_console, print_sections, say
from relax_tune.tuner.cli.signing import verify
from relax_tune.tuner.report.subject import Section, Table, table
from relax_tune.tuner.text.folder import SentenceFolder, sentence_folder
from relax_tune.tuner.text.tokens import cosine, encode, limit_of, open_tokenizer

ArtifactArgument = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An .rta file.")]
TextOption = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="To embed, or to go on with. May be repeated. [default: none, then --inputs]"),
]
ModelOption = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="With --text: the folder with tokenizer.json. [default: none]"),
]
InputsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE.npz", help="Arrays by parameter name, as numpy.savez. [default: none, then --text]"),
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FILE.npz", help="Where to save the results. [default: nowhere]")
]
TruncateOption = Annotated[
    bool,
    typer.Option(
        "--truncate",
        help="With --text, of an encoder: cut what is longer than the artifact takes, and say so on stderr, instead of refusing it.",
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="NAME",
        help="With --text, of an encoder: put this prompt of the folder's config_sentence_transformers.json before each text. "
        "[default: the folder's]",
    ),
]
RecordShapesOption = Annotated[
    Path | None,
    typer.Option(
        "--record-shapes",
        metavar="FILE.json",
        help="Count there how often each symbol had which value, on top of what the file counts already. [default: nowhere]",
    ),
]

RequireSignedOption = Annotated[
    Path | None,
    typer.Option(
        "--require-signed",
        metavar="KEY.pub",
        help="Open the artifact only if this key signed it (`relax-tune sign`): opening runs its kernels. [default: not asked]",
    ),
]

PlacingOption = Annotated[
    str | None,
    typer.Option(
        "--placing",
        metavar="POLICY",
        help="Of an artifact for several devices: plan, by shapes as built; load, by how busy devices are; or a device or placement "
        "(`plan ARTIFACT` lists them) for every call. [default: plan]",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        help="Threads of the kernels of target c. [default: the least of the usable processors, the container's quota and "
        "$OMP_NUM_THREADS]",
    ),
]
WhenLostOption = Annotated[
    str | None,
    typer.Option(
        "--when-lost",
        metavar="fail|move",
        help="Of an artifact for several devices: whether a call fails when a device is lost, or goes on without it. [default: fail]",
    ),
]


def run(
    artifact: ArtifactArgument,
    text: TextOption = None,
    model: ModelOption = None,
    inputs: InputsOption = None,
    out: OutOption = None,
    function: Function = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    beams: Beams = None,
    stop: Stop = None,
    stream: Stream = False,
    truncate: TruncateOption = False,
    prompt: PromptOption = None,
    record_shapes: RecordShapesOption = None,
    placing: PlacingOption = None,
    when_lost: WhenLostOption = None,
    require_signed: RequireSignedOption = None,
    device: Device = None,
    threads: ThreadsOption = None,
    json: Json = False,
) -> None:
    """Run an artifact on text or on arrays.

    An encoder gives embeddings of texts, whose cosine similarities are printed pair by pair, or the logits of its head. A decoder
    (functions prefill and decode) continues each text, by default with the most probable token. The model's folder gives the
    tokens that end a text, and tokens to force or suppress; its other settings of generation are not read.
    An encoder-decoder (a model that also has encode) reads each text and writes another. Arrays give output0, output1 ...
    """
    if bool(text) == (inputs is not None):
        raise UserError("expected either --text (once per sentence) or --inputs FILE.npz; give one of the two")
    options = DecodingOptions(
        max_new_tokens, temperature, top_k, top_p, repetition_penalty, seed, beams, tuple(stop or ()), stream
    )
    loaded, console = load_signed(artifact, require_signed), make_console(stderr=json)
    shapes = None if record_shapes is None else read_profile(record_shapes)
    on = device, shapes, _placing(placing, when_lost), threads
    if inputs is not None:
        given = read_arrays(inputs)
        if texts_only := [*options.given, *["--truncate"] * truncate, *["--prompt"] * (prompt is not None)]:
            raise UserError(f"{texts_only[0]} goes with --text; --inputs calls a function once")
        with open_model(loaded, *on) as opened:
            document, named = _call_once(opened, given, function, console)
    else:
        assert text is not None
        if model is None:
            raise UserError("--text expects --model FOLDER, the folder with the model's tokenizer.json; got none")
        if function is not None:
            raise UserError("--function goes with --inputs; --text runs what the artifact is for")
        document, named = _run_on_text(loaded, text, find_model(model), options, on, console, truncate, prompt)
    if record_shapes is not None and shapes is not None:
        shapes.save(record_shapes)
        document["shapes"] = str(record_shapes)
    _tell_results(document, named, out, console, json)


def _tell_results(
    document: dict[str, Any], named: Mapping[str, NDArray[Any]], out: Path | None, console: Console, json: bool
) -> None:
    """Save arrays by name if requested, and print the document for scripts."""
    if out is not None:
        write_arrays(out, named)
        say(console, f"wrote {out}")
        document["out"] = str(out)
    if json:
        print_json(document)


def _placing(policy: str | None, when_lost: str | None) -> PlacementOptions | None:
    given = policy is not None or when_lost is not None
    return PlacementOptions(policy or "plan", when_lost or "fail") if given else None


def load_signed(path: Path, public: Path | None) -> Artifact:
    """Load an artifact. public: key that must have signed the file, None for any"""
    signed = None if public is None else verify(path, public)
    loaded = load_artifact(path)
    if signed is not None:
        signed.check_same()
    return loaded


def _run_on_text(
    loaded: Artifact,
    texts: Sequence[str],
    folder: Path,
    options: DecodingOptions,
    on: tuple[str | None, ShapeProfile | None, PlacementOptions | None, int | None],
    console: Console,
    truncate: bool,
    prompt: str | None,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Continue texts with a decoder, or encode them; return the document of the results and the arrays by name."""
    cut = partial(say, make_console(stderr=True)) if truncate else None
    decodes = {PREFILL, DECODE} <= set(loaded.functions)
    if options.given and not decodes:
        raise UserError(
            f"{options.given[0]} expects a decoder, got an artifact of {', '.join(loaded.functions)}; leave it out"
        )
    if decodes and prompt is not None:
        raise UserError(f"--prompt expects an encoder, got an artifact of {', '.join(loaded.functions)}; leave it out")
    settings = SentenceFolder(folder, {}) if decodes else sentence_folder(folder).named(prompt)
    tokenizer = open_tokenizer(settings.tokens)
    if decodes:
        config = options.config(folder)
        with open_model(loaded, *on) as opened:
            return _completions(texts, complete(opened, tokenizer, texts, config, console, options.stream, cut))
    read = settings.tokenize(tokenizer, texts, limit_of(loaded, 1), cut)
    with open_model(loaded, *on) as opened:
        results = encode(opened, read, limit_of(loaded, 0).most, settings.prompt_length(tokenizer))
    (name, rows), *more = results.items()
    if more or rows[0].ndim != 1 or name.endswith(("logits", "scores")):
        return _show_results(texts, results, console)
    return _show_embeddings(texts, np.stack(rows), console)


def _call_once(
    opened: Model, given: Mapping[str, NDArray[Any]], function: str | None, console: Console
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Call a function on arrays; return the document of its results and the arrays by name."""
    results = opened.run(_with_types(opened, given, function), function)
    named = {f"output{n}": _as_array(f"output{n}", r) for n, r in enumerate(results)}
    for name, array in named.items():
        say(console, f"{name}: {array.dtype} {array.shape}")
    return {"outputs": {name: {"dtype": str(a.dtype), "shape": list(a.shape)} for name, a in named.items()}}, named


def _with_types(opened: Model, given: Mapping[str, NDArray[Any]], function: str | None) -> Mapping[str, NDArray[Any]]:
    """View bytes as the small type of their parameter, since files of arrays have no name for it."""
    every: dict[str, Program | HostProgram] = {p.name: p for p in opened.artifact.programs}
    every |= {d.name: d for d in opened.artifact.host_programs}
    specs, _ = function_specs(choose_function({n: every[n] for n in opened.functions}, function))
    small = {s.name: s.dtype for s in specs if isinstance(s, TensorSpec) and s.dtype.name in SMALL}
    return {n: a.view(small[n]) if n in small and a.dtype == np.uint8 else a for n, a in given.items()}


def _completions(
    texts: Sequence[str], completions: Sequence[Completion]
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the document of completed texts and the tokens by name."""
    document = {
        "texts": texts,
        "added": [c.added for c in completions],
        "tokens": [c.ids[0].tolist() for c in completions],
    }
    return document, {f"tokens{number}": c.ids for number, c in enumerate(completions)}


def _show_results(
    texts: Sequence[str], results: Mapping[str, Sequence[NDArray[Any]]], console: Console
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Print the results of a head for each text: numbers of a text, shapes of numbers per token."""
    named = {f"{name}{number}": row for name, rows in results.items() for number, row in enumerate(rows)}
    for number, text in enumerate(texts):
        for name, rows in results.items():
            row = rows[number]
            shown = (
                " ".join(f"{x:.4f}" for x in row) if row.ndim == 1 and len(row) <= 16 else f"{row.dtype} {row.shape}"
            )
            say(console, f"{text}: {name}{number}: {shown}")
    shapes = {name: {"dtype": str(a.dtype), "shape": list(a.shape)} for name, a in named.items()}
    return {"texts": texts, "outputs": shapes}, named


def _show_embeddings(
    texts: Sequence[str], embeddings: NDArray[Any], console: Console
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Print the cosine similarities of texts; return their document and the embeddings by name."""
    similarity = cosine(embeddings)
    print_sections(console, Section("similarity", tables=(_similarity_table(texts, similarity),)))
    document = {"texts": texts, "shape": list(embeddings.shape), "cosine": similarity.tolist()}
    return document, {"embeddings": embeddings}


def _similarity_table(texts: Sequence[str], similarity: NDArray[np.float64]) -> Table:
    """Return the similarities of every two texts."""
    numbers = [str(number + 1) for number in range(len(texts))]
    rows = [
        [number, text if len(text) <= 60 else text[:57] + "...", *(f"{value:.4f}" for value in values)]
        for number, text, values in zip(numbers, texts, similarity)
    ]
    return table(("", "text", *numbers), rows, numbers, "Cosine similarity")


def _as_array(name: str, value: Any) -> NDArray[Any]:
    """Convert a result to an array for a file: shapes and scalars too. Raises UserError for any other value."""
    try:
        array = np.asarray(value)
    except ValueError:  # a tuple of different things
        array = np.asarray(None)
    if array.dtype.kind == "O":
        raise UserError(
            f"{name}: expected arrays, shapes and numbers as results, got a {type(value).__name__}; call the model from Python"
        )
    return array


def read_profile(path: Path) -> ShapeProfile:
    """Read the counts in a file of shapes; return an empty profile when the file does not exist.

    Raises UserError for another kind of file.
    """
    return ShapeProfile.read(path) if path.exists() else ShapeProfile()


def open_model(
    artifact: Artifact,
    device: str | None,
    shapes: ShapeRecorder | None = None,
    placing: PlacementOptions | None = None,
    threads: int | None = None,
) -> Model:
    """Open the artifact on its device, and print warnings to stderr, a line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = artifact.open(device, shapes=shapes, placing=placing, threads=threads)
    console = make_console(stderr=True)
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            say(console, f"note: {warning.message}")
    return model


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an .npz file under exactly this name, whole or not at all. Raises UserError when it cannot be written."""
    plain = path.is_file() or not path.exists()
    partial = unused_name(path) if plain and path.name else path
    try:
        try:
            with partial.open("wb" if partial == path else "xb") as file:
                small = {
                    n: a.view(np.uint8) for n, a in arrays.items() if a.dtype.name in SMALL
                }  # the format lacks them
                np.savez(file, **{**arrays, **small})  # type: ignore[arg-type]
            if partial != path:
                partial.replace(path)
        except BaseException:
            if partial != path:
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"{path}: could not write the results: {error.strerror}; choose another place") from None
