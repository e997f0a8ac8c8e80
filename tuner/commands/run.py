"""`relax-tune run`: sentences to embeddings, or arrays to arrays."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from relax_tune.errors import UserError
from relax_tune.ir.frontend.load import find_model
from relax_tune.runtime.artifact import Artifact, Model, load_artifact
from relax_tune.runtime.scalars import WIDTH, Op
from relax_tune.tuner.commands.options import Device, Json, print_json
from relax_tune.tuner.report.console import make_console, make_table, say

IDS, MASK = "input_ids", "attention_mask"


def run(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An .rta file.")],
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="SENTENCE", help="A sentence to embed. May be repeated. [default: none, then --inputs]"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="With --text: the folder with tokenizer.json. [default: none]"),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Arrays by parameter name, as numpy.savez. [default: none, then --text]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Where to save the results. [default: nowhere]")
    ] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Run an artifact on sentences or on arrays.

    Sentences give embeddings, whose cosine similarities are printed pair by pair. Arrays give output0, output1 ...
    """
    if bool(text) == (inputs is not None):
        raise UserError("wanted either --text (once per sentence) or --inputs FILE.npz; give one of the two")
    loaded = load_artifact(artifact)
    console = make_console(stderr=json)
    if inputs is not None:
        given = read_arrays(inputs)
        with open_model(loaded, device) as opened:
            results = opened.run(given)
        named = {f"output{number}": array for number, array in enumerate(results)}
        for name, array in named.items():
            say(console, f"{name}: {array.dtype} {array.shape}")
        document: dict[str, Any] = {
            "outputs": {name: {"dtype": str(a.dtype), "shape": list(a.shape)} for name, a in named.items()}
        }
    else:
        assert text is not None
        if model is None:
            raise UserError("--text wants --model FOLDER, the folder with the model's tokenizer.json; found none")
        tokens = tokenize(find_model(model) / "tokenizer.json", text, _upper(loaded, 1))
        with open_model(loaded, device) as opened:
            embeddings = embed(opened, tokens, _upper(loaded, 0))
        similarity = cosine(embeddings)
        named = {"embeddings": embeddings}
        console.print(similarity_table(text, similarity))
        document = {"texts": text, "shape": list(embeddings.shape), "cosine": similarity.tolist()}
    if out is not None:
        write_arrays(out, named)
        say(console, f"wrote {out}")
        document["out"] = str(out)
    if json:
        print_json(document)


def open_model(artifact: Artifact, device: str | None) -> Model:
    """The artifact on its device; what there is to warn about goes to stderr, a line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = artifact.open(device)
    console = make_console(stderr=True)
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            say(console, f"note: {warning.message}")
    return model


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file, by name. Raises UserError for anything else."""
    what_to_do = "make it with numpy.savez(FILE, NAME=array, ...)"
    if os.path.exists(path) and not os.path.isfile(path):  # reading a device or a pipe may never end
        raise UserError(f"{path}: wanted an .npz file, found something else; {what_to_do}")
    try:
        with open(path, "rb") as file:
            start = file.read(6)
        if not start.startswith(
            (b"PK", b"\x93NUMPY")
        ):  # numpy would take it for a pickle and say how to load that unsafely
            raise UserError(f"{path}: wanted an .npz file of plain arrays, found another kind of file; {what_to_do}")
        data = np.load(path, allow_pickle=False)
        if isinstance(data, np.lib.npyio.NpzFile):
            with data:
                return {name: data[name] for name in data.files}
    except FileNotFoundError:
        raise UserError(f"{path}: wanted an .npz file, found no such file; {what_to_do}") from None
    except UserError:
        raise
    except Exception as error:  # what a damaged zip or array header makes numpy raise is not enumerable
        raise UserError(
            f"{path}: wanted an .npz file of plain arrays, found: {type(error).__name__}: {error!s:.200}; {what_to_do}"
        ) from None
    raise UserError(f"{path}: wanted an .npz file with an array per parameter, found a single array; {what_to_do}")


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an .npz file under exactly this name, whole or not at all. Raises UserError when it cannot be written."""
    plain = path.is_file() or not path.exists()
    partial = path.with_name(f"{path.name}.{os.getpid()}.part") if plain and path.name else path
    try:
        try:
            with partial.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            if partial != path:
                partial.replace(path)
        except BaseException:
            if partial != path:
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"{path}: could not write the results: {error.strerror}; choose another place") from None


def _upper(artifact: Artifact, dim: int) -> int | None:
    """The declared upper bound of a dim of the token ids. Raises UserError for an artifact that takes no token ids."""
    program = artifact.program
    inputs = {program.buffers[i].name: program.buffers[i] for i in program.inputs}
    if set(inputs) != {IDS, MASK} or len(inputs[IDS].shape) != 2:
        raise UserError(
            f"{artifact.path}: --text wants a model of {IDS} and {MASK}, found the parameters {', '.join(inputs)}; use --inputs"
        )
    slot = inputs[IDS].shape[dim] * WIDTH
    opcode, operand = program.scalars[slot : slot + 2]
    if opcode == Op.SYMBOL:
        return program.symbols[operand].upper
    return operand if opcode == Op.CONST else None


def tokenize(path: Path, texts: Sequence[str], longest: int | None) -> list[list[int]]:
    """Token ids of every text, at most `longest` of them. Raises UserError naming the extra, or the file that is missing."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"--text wants the package tokenizers, found {error}; pip install 'relax-tune[text]'") from None
    if not os.path.isfile(path):  # which a name too long does not disturb
        raise UserError(f"{path!s:.200}: no such file; --model wants a folder with a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for every defect of the file
        raise UserError(f"{path}: wanted a tokenizer, found: {error!s:.200}; download it again") from None
    tokenizer.no_padding()
    if longest is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(longest)
    try:
        return [list(e.ids) for e in tokenizer.encode_batch(list(texts))]
    except Exception as error:  # as above: bytes that are no text, words without an entry for unknown ones
        raise UserError(
            f"{path}: wanted a tokenizer that can read --text, found: {error!s:.200}; is every text valid UTF-8?"
        ) from None


def embed(model: Model, tokens: Sequence[Sequence[int]], largest: int | None) -> NDArray[np.float32]:
    """(texts, width) f32: in batches of at most `largest`, each padded to its longest text."""
    parts = []
    step = largest or len(tokens)
    for at in range(0, len(tokens), step):
        batch = tokens[at : at + step]
        width = max(1, *(len(t) for t in batch))
        ids = np.zeros((len(batch), width), np.int64)
        mask = np.zeros((len(batch), width), np.int64)
        for row, found in enumerate(batch):
            ids[row, : len(found)] = found
            mask[row, : len(found)] = 1
        parts.append(model.run({IDS: ids, MASK: mask})[0])
    return np.concatenate(parts)


def cosine(embeddings: NDArray[np.float32]) -> NDArray[np.float64]:
    """(texts, texts): the cosine of the angle between every two rows."""
    wide = embeddings.astype(np.float64)
    unit = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-30)
    return np.asarray(unit @ unit.T)


def similarity_table(texts: Sequence[str], similarity: NDArray[np.float64]) -> Table:
    """The similarities of every two texts."""
    numbers = [str(number + 1) for number in range(len(texts))]
    table = make_table("", "text", *numbers, right=numbers, title="Cosine similarity")
    for number, text in enumerate(texts):
        shown = text if len(text) <= 60 else text[:57] + "..."
        table.add_row(str(number + 1), shown, *(f"{value:.4f}" for value in similarity[number]))
    return table
