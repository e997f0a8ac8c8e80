"""GGUF files against the folders that they are converted from, interpreted."""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import decoder_families, gguf_files, tiny_decoders

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.gguf.file import GgufFile
from relax_tune.ir.frontend.gguf.weights import GgufWeights
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.interp_graph import run_function

gguf = pytest.importorskip("gguf", reason="needs the gguf package: pip install 'relax-tune[gguf]'")

WHOLE = {"use_sliding_window": False, "layer_types": ...}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
TINY: dict[str, dict[str, Any]] = {
    "llama": {}, "llama3": {"attention_bias": True}, "qwen2": {}, "mistral": {}, "gemma": {}, "qwen3": WHOLE,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_yarn": {"rope_parameters": YARN}, "phi3": {}, "phi3_short": {}, "phi3_partial": {}, "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3": {"query_pre_attn_scalar": 8}, "gpt2": {}, "falcon": {}, "falcon_new": {}, "mixtral": {}, "qwen3_moe": {}, "starcoder2": {},
}  # fmt: skip


def folder_of(path: Path, name: str) -> Path:
    if name in TINY:
        return tiny_decoders.write(path, name, **TINY[name])[0]
    return decoder_families.write_family(path, name, **FAMILIES[name])[0]


def results(module: IRModule) -> list[np.ndarray[Any, Any]]:
    """Logits and caches of a prompt and of one token behind it."""
    ids = np.array([[3, 7, 1, 9, 4], [5, 2, 8, 6, 3]])
    first = run_function(module, "prefill", [ids])
    return [*first, *run_function(module, "decode", [ids[:, :1], *first[1:]])]


def same(one: IRModule, other: IRModule, atol: float = 0.0) -> None:
    for a, b in zip(results(one), results(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TINY, *FAMILIES])
def test_gguf_of_floats_gives_the_results_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, name)
    spec = gguf_files.spec_of(folder)
    gguf_files.convert(folder, spec, tmp_path / "model.gguf")
    # factors of frequencies and of attention are stored in single precision
    same(load_model(tmp_path / "model.gguf"), load_hf(folder), 2e-5 if name in ("llama3", "phi3_short") else 0.0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_of_blocks_gives_the_results_of_the_decoded_weights(tmp_path: Path, kind: str) -> None:
    """Rows of 32 elements are quantised; the folder of what they decode to is the reference."""
    folder = decoder_families.write_family(tmp_path, "mixtral")[0]
    spec, of = gguf_files.spec_of(folder), getattr(gguf.GGMLQuantizationType, kind)
    wide = lambda name, w: of if w.ndim > 1 and w.shape[-1] % 32 == 0 else None
    decoded = gguf_files.convert(folder, spec, tmp_path / "model.gguf", wide)
    assert (tmp_path / "model.gguf").stat().st_size < (folder / "model.safetensors").stat().st_size
    again = gguf_files.write_decoded(folder, spec, tmp_path, decoded)
    same(load_model(tmp_path / "model.gguf"), load_model(again))


def test_gguf_of_an_unknown_type_loads_from_a_folder(tmp_path: Path) -> None:
    folder = decoder_families.write_family(tmp_path, "mixtral")[0]
    spec, path = gguf_files.spec_of(folder), tmp_path / "model.gguf"
    gguf_files.convert(folder, spec, path)
    same(load_model(path), load_model(folder))
    data, name = path.read_bytes(), b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(data[:at] + struct.pack("<I", int(gguf.GGMLQuantizationType.Q8_K)) + data[at + 4 :])
    message = refused(path)
    assert all(part in message for part in ("'token_embd.weight' at byte", "got Q8_K", "load the Hugging Face folder"))
    same(load_model(folder), load_hf(folder))


K_BLOCKS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ2_XXS", "IQ1_M", "TQ2_0", "NVFP4"]


@pytest.mark.parametrize("kind", K_BLOCKS)
def test_gguf_tensor_of_large_blocks_is_decoded_row_by_row(tmp_path: Path, kind: str) -> None:
    of = getattr(gguf.GGMLQuantizationType, kind)
    block, size = gguf.GGML_QUANT_SIZES[of]
    packed = np.random.default_rng(7).integers(0, 60, (5, 2 * size), np.uint8)  # small exponents of scales
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("before", np.ones(3, np.float32))
    writer.add_tensor("w.weight", packed, raw_dtype=of)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    weights = GgufWeights(GgufFile(tmp_path / "one.gguf"))
    decoded = weights.get("w.weight", (5, 2 * block))
    rows = [gguf.dequantize(packed[i : i + 1, k * size : (k + 1) * size], of) for i in range(5) for k in range(2)]
    np.testing.assert_array_equal(decoded, np.reshape(rows, (5, 2 * block)))
    assert decoded.any() and np.isfinite(decoded).all()
    assert weights.unread == {"before"}


def refused(path: Path) -> str:
    with pytest.raises(ParseError) as error:
        load_model(path)
    return str(error.value)


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """The GGUF file of a small Llama, with changed keys."""
    folder = folder_of(tmp_path, "llama")
    spec, out = gguf_files.spec_of(folder), tmp_path / "model.gguf"

    def make(**changed: Any) -> Path:
        gguf_files.convert(folder, spec, out, **changed)
        return out

    return make


@pytest.mark.parametrize("changed, message", [
    ({"general.architecture": "mamba"}, "expected general.architecture among llama, qwen2"),
    ({"attention.sliding_window": 8}, "got llama.attention.sliding_window too"),
    ({"general.file_type": 1, "split.count": 2}, "got llama.split.count too"),
    ({"rope.dimension_count": 4}, "rope.dimension_count of 8, the size of a head"),
    ({"rope.scaling.type": "su"}, "rope.scaling.type none, linear or yarn, got 'su'"),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1}, "no other keys of rope.scaling"),
    ({"context_length": 1 << 30}, "expected context_length from 1 to 16777216"),
    ({"context_length": ...}, "expected the key context_length of llama"),
    ({"block_count": 3}, "expected a tensor 'blk.2.attn_norm.weight', got none"),
    ({"block_count": 1}, "got 9 others: blk.1.attn_k.weight"),
    ({"block_count": 1 << 31}, "num_hidden_layers: expected"),
    ({"embedding_length": 1 << 31}, "hidden_size: expected a whole number"),
    ({"feed_forward_length": [24, 32]}, "llama.feed_forward_length: expected one value"),
    ({"attention.head_count_kv": 4}, "expected shape"),
    ({"attention.value_length": 16}, "expected attention.value_length of"),
    ({"general.alignment": 3}, "general.alignment"),
    ({"attention.head_count": "4"}, "llama.attention.head_count as int or ndarray"),
    ({"attention.head_count": 4.0}, "expected llama.attention.head_count as int"),
    ({"rope.freq_base": "1e4"}, "expected llama.rope.freq_base as int or float"),
    ({"rope.freq_base": float("nan")}, "rope_theta: expected"),
    ({"rope.scaling.type": 1}, "expected llama.rope.scaling.type as str, got 1"),
    ({"block_count": [2] * 5000}, "llama.block_count for at most 4096 layers"),
    ({"attention.head_count": 0}, "num_attention_heads: expected"),
    ({"tensor_data_layout": "Meta AI original pth"}, "tensor_data_layout None, got 'Meta AI original pth'"),
])  # fmt: skip
def test_gguf_of_another_model_is_refused_by_name(
    make_gguf: Callable[..., Path], changed: dict[str, Any], message: str
) -> None:
    assert message in refused(make_gguf(**changed))


def header(tensors: int = 0, keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def tensor(name: bytes, *dims: int, kind: int = 0, begin: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, begin)


HUGE = 1 << 62


@pytest.mark.parametrize("data, message", [
    (b"", "cannot mmap an empty file"), (b"GGML....", "which begins with GGUF"),
    (b"GGUF\x03", "expected 4 bytes of the header"),
    (header(version=1), "expected GGUF version 2 or 3"), (header(version=3 << 24), "got big-endian"),
    (header(HUGE), "expected at most"), (header(0, HUGE), "expected at most"), (header(9), "bytes of the header"),
    (header(0, 1, struct.pack("<Q", HUGE)), f"expected {HUGE} bytes of the name of a key"),
    (header(0, 1, text(b"\xff")), "the name of a key in UTF-8"),
    (header(0, 1, text(b"a") + struct.pack("<I", 13)), "the type of key a from 0 to 12"),
    (header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 6, HUGE)), f"expected {4 * HUGE} bytes of key a"),
    (header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, HUGE)), "at most 4194304 texts"),
    (header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, 99)), "bytes of"),
    (header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 9, 1)), "key a as an array of numbers"),
    (header(0, 2, 2 * (text(b"a") + struct.pack("<IB", 0, 1))), "each key once"),
    (header(1, 0, text(b"t") + struct.pack("<I", 1 << 31)), "expected 1 to 4 dims of tensor t"),
    (header(1, 0, tensor(b"t", 1 << 32, 1 << 32)), "dims of tensor t from 1 to"),
    (header(1, 0, tensor(b"t", 0)), "dims of tensor t from 1 to"),
    (header(1, 0, tensor(b"t", 4, begin=HUGE)), "got the end of the file after"),
    (header(1, 0, tensor(b"t", 4, begin=3)), "the place of tensor t in the file, a multiple of 32, got 3;"),
    (header(1, 0, tensor(b"t", 1 << 30) + bytes(64)), "bytes of tensor t"),
    (header(1, 0, tensor(b"t", 4, kind=77) + bytes(64)), "expected a type among F32, F16, BF16, Q4_0"),
    (header(1, 0, tensor(b"t", 4, kind=26) + bytes(64)), "got I32"),
    (header(1, 0, tensor(b"t", 33, kind=2) + bytes(64)), "expected rows of tensor t in blocks of 32"),
    (header(2, 0, tensor(b"t", 8) + tensor(b"u", 8) + bytes(99)), "tensor u after tensor t"),
    (header(2, 0, 2 * tensor(b"t", 8) + bytes(99)), "each tensor once"),
    (header(1, 0, tensor(b"t", 8) + bytes(99)), "expected general.architecture among"),
])  # fmt: skip
def test_gguf_with_impossible_sizes_is_a_parse_error(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(data)
    assert message in refused(tmp_path / "bad.gguf")


def test_gguf_cut_anywhere_is_a_parse_error(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    data = make_gguf().read_bytes()
    for size in [*range(0, 600, 7), *range(600, len(data) - 40, 997)]:
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        refused(tmp_path / "cut.gguf")


def test_gguf_cut_in_half_names_the_end_of_the_file(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    data = make_gguf().read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    assert f"got the end of the file after {len(data) // 2} bytes; download" in refused(tmp_path / "cut.gguf")


def test_gguf_without_a_tensor_lists_the_others(tmp_path: Path) -> None:
    (tmp_path / "none.gguf").write_bytes(header())
    (tmp_path / "two.gguf").write_bytes(header(2, 0, tensor(b"a", 8) + tensor(b"b", 8, begin=32) + bytes(99)))
    for name, present in (("none", "the file has no tensors;"), ("two", "there are a, b; is")):
        with pytest.raises(ParseError, match=present):
            GgufWeights(GgufFile(tmp_path / f"{name}.gguf")).shape("output.weight")


def test_gguf_keys_without_effect_are_accepted(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(**{"rope.scaling.finetuned": True, "rope.scaling.type": "none", "general.name": "a model"})
    same(load_model(path), load_model(make_gguf()))


def test_gguf_of_falcon_with_another_layout_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "falcon")
    spec, out = gguf_files.spec_of(folder), tmp_path / "model.gguf"
    gguf_files.convert(folder, spec, out, tensor_data_layout="jploski")
    same(load_model(out), load_hf(folder))
    gguf_files.convert(folder, spec, out, tensor_data_layout="other")
    assert "expected tensor_data_layout jploski, got 'other'" in refused(out)


def test_gguf_with_changed_bytes_is_read_or_a_parse_error(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    data, g = make_gguf().read_bytes(), np.random.default_rng(11)
    for _ in range(60):
        other = bytearray(data)
        for place in g.integers(4, 1500, 3):
            other[place] = g.integers(256)
        (tmp_path / "odd.gguf").write_bytes(other)
        with contextlib.suppress(ParseError):
            load_model(tmp_path / "odd.gguf", {"n": (1, 8), "m": (1, 8)})


def test_gguf_takes_options_of_decoders_alone(make_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf()
    module = load_model(path, {"n": (2, 5)}, cache_dtype="f16")
    assert [(b.var.name, b.lower, b.upper) for b in module.bounds if b.var.name == "n"] == [("n", 2, 5)]
    with pytest.raises(UserError, match=r"pooling 'cls' .*Hugging Face"):
        load_model(path, pooling="cls")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'relax-tune\[gguf\]'"):
        load_model(path)
