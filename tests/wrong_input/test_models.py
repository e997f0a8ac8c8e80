"""Paths that are no model, files that are damaged, configurations that lie, bounds the model contradicts."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples
from tests.tuner.cli.cli_model import HIDDEN, POSITIONS, WORDS, make_bert
from tests.wrong_input.tiny_model import paragraph

from relax_tune.errors import RelaxTuneError, UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.tuner.job.lowered_model import parse_bounds

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0\x90wS\xde"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def bert(whole: Path, tmp_path: Path) -> Path:
    """A model of this test's own."""
    return Path(shutil.copytree(whole, tmp_path / "bert"))


def refused(path: Any, bounds: Any = None) -> str:
    with pytest.raises(RelaxTuneError) as caught:
        load_model(path, bounds)
    text = paragraph(caught.value)
    assert ";" in text or "?" in text, f"says nothing of what to do: {text}"
    return text


# -- not a model -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "nowhere",
        "no/where",
        "nowhere.onnx",
        "",
        "x" * 300,
        "a\0b",
        "package:numpy/none",
        "package:",
        "package:numpy/" + "x" * 300,
        "package:__main__",
    ],
)
def test_load_model_of_missing_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused(name)
    refused(Path(name))


@pytest.mark.parametrize("contents", [b"", b"hello\n", bytes(range(256)) * 8, PNG])
@pytest.mark.parametrize("name", ["model", "model.bin", "model.safetensors", "model.onnx", "config.json"])
def test_load_model_of_other_file_is_refused(tmp_path: Path, name: str, contents: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(contents)
    assert name in refused(path)


@pytest.mark.parametrize("value", [None, 3, ["model"], b"model", object()])
def test_load_model_of_wrong_type_is_refused(value: Any) -> None:
    refused(value)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.safetensors"])
def test_load_model_of_weights_advises_a_folder_or_module(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK")
    assert "weights or a pickled module; give the folder with its config.json" in refused(tmp_path / name)


@pytest.mark.parametrize(
    ("value", "advice"), [(dict, "an instance"), ({"w": 1}, "weights are no model"), (abs, "that calls it")]
)
def test_load_model_of_an_object_gives_advice(value: Any, advice: str) -> None:
    assert advice in refused(value)


def test_load_model_of_other_folder_is_refused(tmp_path: Path, bert: Path) -> None:
    assert "config.json" in refused(tmp_path)
    (tmp_path / "model.onnx").mkdir()
    assert "config.json" in refused(tmp_path / "model.onnx")
    (bert / "config.json").unlink()
    (bert / "config.json").mkdir()
    assert "config.json" in refused(bert)
    assert "package" in refused("package:__main__/model")


def test_load_model_of_endless_file_is_refused(bert: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (bert / name).rename(bert / "kept")
        os.mkfifo(bert / name)
        assert name in refused(bert)
        (bert / name).unlink()
        (bert / name).symlink_to("/dev/zero")
        assert name in refused(bert)
        (bert / name).unlink()
        (bert / name).symlink_to(name)
        assert name in refused(bert)
        (bert / name).unlink()
        (bert / "kept").rename(bert / name)
    load_model(bert)


def test_weights_of_another_kind(bert: Path) -> None:
    (bert / "model.safetensors").rename(bert / "pytorch_model.bin")
    text = refused(bert)
    assert "the folder has pytorch_model.bin" in text and "save_pretrained(FOLDER)" in text
    (bert / "pytorch_model.bin").unlink()
    (bert / "model.safetensors").mkdir()
    assert "model.safetensors" in refused(bert)


# -- damaged weights ---------------------------------------------------------------------------------------------------------


def test_truncated_anywhere(bert: Path) -> None:
    path = bert / "model.safetensors"
    data = path.read_bytes()
    (header,) = struct.unpack("<Q", data[:8])
    for size in (0, 1, 7, 8, 9, 8 + header // 2, 8 + header - 1, 8 + header, 9 + header, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        text = refused(bert)
        assert "model.safetensors: expected a complete safetensors file" in text and "download it again" in text


@pytest.mark.parametrize("length", [0, 1, 10**6, 2**40, 2**63 - 1, 2**64 - 1])
def test_wrong_header_lengths(bert: Path, length: int) -> None:
    path = bert / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert "complete safetensors file" in refused(bert)


def test_bytes_too_many(bert: Path) -> None:
    with (bert / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    assert "complete safetensors file" in refused(bert)


def rewritten(bert: Path, **changes: Any) -> None:
    """Replace tensors by their dotted name with `_` for `.` at the ends of words given in full."""
    tensors = safetensors.numpy.load_file(bert / "model.safetensors")
    for name, array in changes.items():
        if array is None:
            del tensors[name]
        else:
            tensors[name] = array
    safetensors.numpy.save_file(tensors, bert / "model.safetensors")


WORD = "embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (None, f"expected a tensor '{WORD}' of shape ({len(WORDS)}, {HIDDEN}), got none"),
        (np.zeros((3, HIDDEN), np.float32), f"by config.json, got (3, {HIDDEN})"),
        (np.zeros((HIDDEN, len(WORDS)), np.float32), "got (32, 16)"),
        (np.zeros(len(WORDS) * HIDDEN, np.float32), f"got ({len(WORDS) * HIDDEN},)"),
        (np.zeros((), np.float32), "got ()"),
        (np.zeros((0, HIDDEN), np.float32), f"got (0, {HIDDEN})"),
        (np.zeros((len(WORDS), HIDDEN), np.int64), "among F16, BF16, F32, F64, got I64; save the model in float32"),
        (np.zeros((len(WORDS), HIDDEN), bool), "got BOOL"),
    ],
)  # fmt: skip
def test_wrong_tensors(bert: Path, array: Any, says: str) -> None:
    rewritten(bert, **{WORD: array})
    text = refused(bert)
    assert says in text and WORD in text and "model.safetensors" in text


def test_tensors_in_formats_numpy_does_not_know(bert: Path) -> None:
    """Eight-bit floats, written by hand."""
    path = bert / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    for entry in header.values():
        if "dtype" in entry:
            entry["dtype"] = "F8_E4M3"
            entry["data_offsets"] = [offset // 4 for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :][: (len(data) - 8 - size) // 4])
    assert "got F8_E4M3; save the model in float32" in refused(bert)


def test_other_precisions_are_read(bert: Path, whole: Path) -> None:
    table = safetensors.numpy.load_file(whole / "model.safetensors")[WORD]
    for dtype in (np.float16, np.float64):
        rewritten(bert, **{WORD: table.astype(dtype)})
        found = load_model(bert).constants[WORD]
        np.testing.assert_allclose(found, table, rtol=1e-3)


# -- weights in several files ------------------------------------------------------------------------------------------------


def shard(bert: Path) -> dict[str, Any]:
    """Cut the weights into two files with an index; returns the index."""
    tensors = safetensors.numpy.load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    names = sorted(tensors)
    places: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        safetensors.numpy.save_file({n: tensors[n] for n in part}, bert / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (bert / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_shards_are_the_same_model(bert: Path, whole: Path) -> None:
    shard(bert)
    wanted, found = load_model(whole).constants, load_model(bert).constants
    assert set(wanted) == set(found)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


def test_load_model_with_bad_shards_is_refused(bert: Path) -> None:
    index = shard(bert)
    path = bert / "model.safetensors.index.json"
    second = bert / "model-00002-of-00002.safetensors"
    data = second.read_bytes()
    second.write_bytes(data[:100])
    assert f"{second}: expected a complete safetensors file" in refused(bert)
    second.unlink()
    text = refused(bert)
    assert (
        "model-00002-of-00002.safetensors, which model.safetensors.index.json lists" in text and "download it" in text
    )
    second.write_bytes(data)
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"extra": second.name}}))
    assert "'extra', which model.safetensors.index.json lists, is missing" in refused(bert)
    path.write_text(json.dumps({"weight_map": {n: p for n, p in index["weight_map"].items() if n != WORD}}))
    assert WORD in refused(bert)
    for weight_map in (None, [], "x", {WORD: 3}, {WORD: None}):
        path.write_text(json.dumps({"weight_map": weight_map}))
        assert "weight_map" in refused(bert)
    for place in ("../bert/" + second.name, "/etc/passwd", "..", "", "."):
        path.write_text(json.dumps({"weight_map": index["weight_map"] | {"extra": place}}))
        refused(bert)
    path.write_text("{")
    assert "expected JSON" in refused(bert)


# -- config.json -------------------------------------------------------------------------------------------------------------


def configured(bert: Path, **changes: Any) -> None:
    config = json.loads((bert / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    (bert / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (b"", "expected JSON"),
        (b"{", "expected JSON"),
        (b"not json", "expected JSON"),
        (PNG, "expected JSON"),
        (b"\xff\xfe{\0}\0", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "expected JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "expected JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"null", "got NoneType"),
        (b"3", "got int"),
        (b'"bert"', "got str"),
        (b"{}", "expected a known model_type, got None"),
    ],
)
def test_config_of_wrong_json_type_is_refused(bert: Path, contents: bytes, says: str) -> None:
    (bert / "config.json").write_bytes(contents)
    text = refused(bert)
    assert says in text and "config.json" in text


@pytest.mark.parametrize("kind", ["patchtst", "", None, 3, ["bert"], {"bert": 1}, "x" * 10_000])
def test_unknown_architecture_error_names_near_ones_and_the_guides(bert: Path, kind: Any) -> None:
    configured(bert, model_type=kind)
    said = refused(bert)
    assert "expected a known model_type, got " in said and "docs/guides" in said and "torch.export" in said
    assert len(said) < 1000


SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
         "max_position_embeddings", "type_vocab_size")  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
def test_config_with_bad_sizes_is_refused(bert: Path, key: str) -> None:
    for value in (..., None, "32", 32.0, True, [32], {}, 0, -1, 10**30, "y" * 10_000):
        configured(bert, **{key: value})
        # a list gives the size of each layer
        each = f"{key}: expected a list of 2 whole numbers of at least 1" if key == "intermediate_size" else None
        expected = each if each is not None and isinstance(value, list) else f"{key}: expected a whole number from 1"
        assert expected in refused(bert)


@pytest.mark.parametrize("key", SIZES)
def test_config_sizes_contradicting_weights_are_refused(bert: Path, key: str) -> None:
    right = json.loads((bert / "config.json").read_text())[key]
    for value in (right * 3, 2**31 - 1):
        configured(bert, **{key: value})
        if key == "num_attention_heads" and HIDDEN % value == 0:
            continue
        refused(bert)
    configured(bert, **{key: right})
    load_model(bert)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "mish"), ("hidden_act", ["gelu"]), ("hidden_act", {"gelu": 1}), ("hidden_act", None),
        ("layer_norm_eps", "1e-12"), ("layer_norm_eps", float("nan")), ("layer_norm_eps", float("inf")),
        ("layer_norm_eps", -1), ("layer_norm_eps", True), ("layer_norm_eps", None), ("layer_norm_eps", 10**400),
        ("position_embedding_type", "relative_key"), ("position_embedding_type", []),
    ],
)  # fmt: skip
def test_other_fields(bert: Path, key: str, value: Any) -> None:
    configured(bert, **{key: value})
    assert f"{key}: expected" in refused(bert)


# -- bounds ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"seq": (1, 8)}, "symbols b (batch) and n (positions), got seq"),
        ({"": (1, 8)}, "expected the name of a symbol"),
        ({3: (1, 8)}, "expected the name of a symbol, got 3"),
        ({"n": (1, POSITIONS + 1)}, f"at most {POSITIONS} positions by this model, got {POSITIONS + 1}"),
        ({"n": (9, 3)}, "expected 0 <= lower <= upper and 1 <= upper"),
        ({"n": (0, 0)}, "got 0 and 0"),
        ({"n": (-4, 4)}, "got -4 and 4"),
        ({"n": (-4, -2)}, "got -4 and -2"),
        ({"b": (1, 2**31)}, "upper <= 2147483647, got 1 and 2147483648; correct the bound"),
        ({"b": (1, 10**400)}, "correct the bound"),
        ({"b": (1, 8.0)}, "expected two whole numbers (lower, upper), got (1, 8.0)"),
        ({"b": (1,)}, "expected two whole numbers"),
        ({"b": (1, 2, 3)}, "expected two whole numbers"),
        ({"b": 8}, "expected two whole numbers"),
        ({"b": "18"}, "expected two whole numbers"),
        ({"b": None}, "expected two whole numbers"),
        ([("b", (1, 8))], "expected a mapping from symbols to (lower, upper), got a list"),
        ("n=1:8", "expected a mapping from symbols"),
    ],
)  # fmt: skip
def test_bounds_the_model_contradicts(whole: Path, bounds: Any, says: str) -> None:
    assert says in refused(whole, bounds)


def test_numpy_numbers_are_bounds(whole: Path) -> None:
    module = load_model(whole, {"b": (np.int64(1), np.int32(4)), "n": [1, POSITIONS]})  # type: ignore[dict-item]
    assert [(b.lower, b.upper) for b in module.bounds] == [(1, 4), (1, POSITIONS)]


@pytest.mark.parametrize(
    "item",
    ["", "n", "n=", "=1:2", "n=1", "n=1:", "n=:2", "n=2:1", "n=-1:4", "n=1:4:8", "n=a:b", "n=1.0:2", "n=\u00b2:\u00b3", "n=\u0661:\u0662",
     "n= 1:2", "n=1_0:2_0", "n=1:" + "9" * 5000, "n" * 5000],
)  # fmt: skip
def test_bounds_on_the_command_line(item: str) -> None:
    with pytest.raises(UserError, match="--bound expects NAME=LOW:HIGH") as caught:
        parse_bounds([item])
    paragraph(caught.value)


def test_a_bound_given_twice() -> None:
    with pytest.raises(UserError, match="got n twice"):
        parse_bounds(["n=1:4", "b=1:2", "n=1:8"])


# -- anything at all ---------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(0, 64),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = st.sampled_from([*SIZES, "model_type", "hidden_act", "layer_norm_eps", "position_embedding_type"])


def survives(folder: Path) -> None:
    """The folder is a model, or is refused by a paragraph."""
    try:
        load_model(folder)
    except RelaxTuneError as error:
        paragraph(error)


@settings(max_examples=examples(150), deadline=None)
@given(changes=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3), removed=st.sets(FIELDS, max_size=2))
def test_mutated_configurations(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], removed: set[str]
) -> None:
    folder = _copy(tmp_path_factory)
    config = {k: v for k, v in json.loads((folder / "whole.json").read_text()).items() if k not in removed} | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((folder / "whole.safetensors").read_bytes())
    survives(folder)


EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "cut", "insert", "zero", "digit"]), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def mutated(data: bytes, edits: list[tuple[float, str, int]], focus: int) -> bytes:
    """Small damage, most of it within the first `focus` bytes."""
    raw = bytearray(data)
    for place, kind, value in edits:
        reach = min(len(raw), focus) if value % 4 else len(raw)
        at = min(int(place * reach), max(0, len(raw) - 1))
        if kind == "cut":
            del raw[at:]
        elif kind == "insert":
            raw[at:at] = bytes([value])
        elif raw:
            raw[at] = {"flip": raw[at] ^ (value or 1), "zero": 0, "digit": 48 + value % 10}[kind]
    return bytes(raw)


@settings(max_examples=examples(200), deadline=None)
@given(edits=EDITS, config=st.booleans())
def test_mutated_files(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[float, str, int]], config: bool
) -> None:
    folder = _copy(tmp_path_factory)
    text, weights = (folder / "whole.json").read_bytes(), (folder / "whole.safetensors").read_bytes()
    (folder / "config.json").write_bytes(mutated(text, edits, len(text)) if config else text)
    (folder / "model.safetensors").write_bytes(weights if config else mutated(weights, edits, 4000))
    survives(folder)


_COPIES: list[Path] = []


def _copy(factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples, with the undamaged files beside those that are damaged."""
    if not _COPIES:
        folder = make_bert(factory.mktemp("mutated"))
        (folder / "config.json").rename(folder / "whole.json")
        (folder / "model.safetensors").rename(folder / "whole.safetensors")
        _COPIES.append(folder)
    return _COPIES[0]
