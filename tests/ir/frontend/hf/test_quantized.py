"""Quantised checkpoints against the matrices that they were made of: fp8, GPTQ, AWQ, compressed-tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.support.decoder_families import inputs, write_family

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.interp.reference import evaluate_function

Array = np.ndarray[Any, Any]
Parts = dict[str, Array]
Method = Callable[[Array, np.random.Generator], tuple[Parts, Array]]
"""Stores a matrix; returns the parts of the file, and the matrix that they stand for."""
GROUP = 8


def pack(values: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Array:
    """Pack unsigned integers into words along an axis. order: the value at each place of a word"""
    count = 32 // bits
    moved = np.moveaxis(values, axis, -1)
    moved = moved.reshape(*moved.shape[:-1], -1, count)
    words = sum(moved[..., v].astype(np.uint32) << np.uint32(bits * k) for k, v in enumerate(order or range(count)))
    return np.ascontiguousarray(np.moveaxis(np.asarray(words, np.uint32), -1, axis)).view(np.int32)


def fp8(w: Array, rng: np.random.Generator, block: int = 16, key: str = "weight_scale_inv") -> tuple[Parts, Array]:
    out, width = w.shape
    scale = rng.uniform(0.5, 2, (-(-out // block), -(-width // block))).astype(np.float32) / 64
    wide = np.repeat(np.repeat(scale, block, 0)[:out], block, 1)[:, :width]
    small = (w / wide).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": small, key: scale}, small.astype(np.float32) * wide


def fp8_rows(w: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
    scale = np.abs(w).max(1, keepdims=True) / np.float32(448)
    small = (w / scale).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale}, small.astype(np.float32) * scale


def int8_rows(w: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
    scale = np.abs(w).max(1, keepdims=True) / np.float32(127)
    small = np.round(w / scale).astype(np.int8)
    return {"weight": small, "weight_scale": scale}, small * scale


def gptq(w: Array, rng: np.random.Generator, less: int = 1, moved: bool = False) -> tuple[Parts, Array]:
    out, width = w.shape
    group = np.arange(width) // GROUP
    group = rng.permutation(group) if moved else group
    shape = (width // GROUP, out)
    zeros, scales = rng.integers(1, 15, shape), rng.uniform(0.01, 0.1, shape).astype(np.float16)
    values = rng.integers(0, 16, (width, out))
    parts = {"qweight": pack(values, 4, 0), "qzeros": pack(zeros - less, 4, 1), "scales": scales}
    if moved:
        parts["g_idx"] = group.astype(np.int32)
    return parts, ((values - zeros[group]) * scales.astype(np.float32)[group]).T


def stream(values: Array, bits: int) -> Array:
    """Pack unsigned integers along the first axis without gaps, one bit at a time."""
    count, columns = values.shape
    words = np.zeros((-(-count * bits // 32), columns), np.uint32)
    for at in range(count * bits):
        bit = (values[at // bits] >> (at % bits)) & 1
        words[at // 32] |= bit.astype(np.uint32) << np.uint32(at % 32)
    return words.view(np.int32)


def gptq_bits(w: Array, rng: np.random.Generator, bits: int = 3) -> tuple[Parts, Array]:
    """Zero points from 1, less 1 as the first version stores them; an order of groups by activation."""
    out, width = w.shape
    group = rng.permutation(np.arange(width) // GROUP)
    zeros, scales = rng.integers(1, 2**bits, (width // GROUP, out)), rng.uniform(0.01, 0.1, (width // GROUP, out))
    values = rng.integers(0, 2**bits, (width, out))
    parts = {
        "qweight": stream(values, bits), "qzeros": np.ascontiguousarray(stream((zeros - 1).T, bits).T),
        "scales": scales.astype(np.float32), "g_idx": group.astype(np.int32),
    }  # fmt: skip
    return parts, ((values - zeros[group]) * parts["scales"][group]).T


def gptq_borrowed(w: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
    """Zero points from 0, of which whole words less 1 in each place are stored."""
    parts, dense = gptq(w, rng, less=0)
    stored = parts["qzeros"].view(np.uint32)
    parts["qzeros"] = (stored - np.uint32(0x11111111)).view(np.int32)
    return parts, dense


def awq_rows(w: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
    """Version gemv: words along the inputs, in order; scales and zero points have columns of padding."""
    out, width = w.shape
    count = width // GROUP
    zeros, scales = rng.integers(0, 16, (out, count)), rng.uniform(0.01, 0.1, (out, count)).astype(np.float16)
    values, wide = rng.integers(0, 16, (out, width)), ((0, 0), (0, 32 - count))
    parts = {
        "qweight": np.ascontiguousarray(stream(values.T, 4).T), "scales": np.pad(scales, wide),
        "qzeros": np.ascontiguousarray(stream(np.pad(zeros, wide).T, 4).T),
    }  # fmt: skip
    return parts, (values - np.repeat(zeros, GROUP, 1)) * np.repeat(scales.astype(np.float32), GROUP, 1)


NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 4-bit floats, whose highest bit is the sign


def small_floats(w: Array, rng: np.random.Generator, powers: bool = False) -> tuple[Parts, Array]:
    """Two 4-bit floats in a byte. powers: scales are powers of 2, else 8-bit floats, and there is one scale of all"""
    out, width = w.shape
    codes = rng.integers(0, 16, (out, width))
    values = np.take(NUMBERS, codes % 8) * np.where(codes > 7, -1, 1)
    parts: Parts = {"weight_packed": (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)}
    if powers:
        exponents = rng.integers(-9, -3, (out, width // GROUP))
        parts["weight_scale"], scale = (exponents + 127).astype(np.uint8), 2.0**exponents
    else:
        small = rng.uniform(1, 200, (out, width // GROUP)).astype(ml_dtypes.float8_e4m3fn)
        parts |= {"weight_scale": small, "weight_global_scale": np.array([1600.0], np.float32)}
        scale = small.astype(np.float64) / 1600
    return parts, values * np.repeat(scale, GROUP, 1)


def fp8_powers(w: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
    """Blocks of 8-bit floats whose scales are powers of 2, in the type for these."""
    parts, _ = fp8(w, rng)
    exponents = rng.integers(-9, -3, parts["weight_scale_inv"].shape)
    parts["weight_scale_inv"] = (2.0**exponents).astype(ml_dtypes.float8_e8m0fnu)
    wide = np.repeat(np.repeat(2.0**exponents, 16, 0), 16, 1)[: w.shape[0], : w.shape[1]]
    return parts, parts["weight"].astype(np.float64) * wide


def byte_rows(w: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
    scale = rng.uniform(0.5, 3, len(w)).astype(np.float32)
    small = rng.integers(-127, 128, w.shape).astype(np.int8)
    return {"weight": small, "SCB": scale, "weight_format": np.array(0, np.uint8)}, small * scale[:, None] / 127


def nf4(w: Array, rng: np.random.Generator, nested: bool = False) -> tuple[Parts, Array]:
    """Codes of blocks of 32 numbers, the first in the high half of a byte. nested: scales are codes of blocks too"""
    codes, table = rng.integers(0, 16, w.size), rng.uniform(-1, 1, 16).astype(np.float32)
    scales = rng.uniform(0.05, 0.2, w.size // 32).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 32, "dtype": "float32", "shape": list(w.shape)}
    parts: Parts = {
        "weight": (16 * codes[::2] + codes[1::2]).astype(np.uint8)[:, None], "weight.quant_map": table, "weight.absmax": scales
    }  # fmt: skip
    if nested:
        small, rough = (
            rng.integers(0, 256, len(scales)).astype(np.uint8),
            rng.random(-(-len(scales) // 4)).astype(np.float32),
        )
        fine = rng.uniform(-0.1, 0.1, 256).astype(np.float32)
        parts |= {"weight.absmax": small, "weight.nested_absmax": rough, "weight.nested_quant_map": fine}
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.125}
        scales = np.array([fine[s] * rough[at // 4] + 0.125 for at, s in enumerate(small)])
    parts["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return parts, (table[codes] * np.repeat(scales, 32)).reshape(w.shape)


def awq(w: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
    out, width = w.shape
    shape, order = (width // GROUP, out), (0, 2, 4, 6, 1, 3, 5, 7)
    zeros, scales = rng.integers(0, 16, shape), rng.uniform(0.01, 0.1, shape).astype(np.float16)
    values, group = rng.integers(0, 16, (width, out)), np.arange(width) // GROUP
    parts = {"qweight": pack(values, 4, 1, order), "qzeros": pack(zeros, 4, 1, order), "scales": scales}
    return parts, ((values - zeros[group]) * scales.astype(np.float32)[group]).T


def packed(w: Array, rng: np.random.Generator, bits: int = 4, zeroed: bool = False) -> tuple[Parts, Array]:
    out, width = w.shape
    shape, half = (out, width // GROUP), 2 ** (bits - 1)
    values, scale = rng.integers(-half, half, w.shape), rng.uniform(0.01, 0.1, shape).astype(np.float32)
    parts = {"weight_packed": pack(values + half, bits, 1), "weight_scale": scale, "weight_shape": np.array(w.shape)}
    zeros = rng.integers(-half, half, shape) if zeroed else np.zeros(shape, np.int64)
    if zeroed:
        parts["weight_zero_point"] = pack(zeros + half, bits, 0)
    return parts, (values - np.repeat(zeros, GROUP, 1)) * np.repeat(scale, GROUP, 1)


COMPRESSED = {"quant_method": "compressed-tensors", "kv_cache_scheme": None}
PACKED = {**COMPRESSED, "format": "pack-quantized"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
METHODS: dict[str, tuple[Method, dict[str, Any]]] = {
    "fp8": (fp8, FP8),
    "fp8_rows": (fp8_rows, {**COMPRESSED, "format": "float-quantized"}),
    "int8_rows": (int8_rows, {**COMPRESSED, "format": "int-quantized"}),
    "gptq": (gptq, GPTQ),
    "gptq_v2": (partial(gptq, less=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq_v2_of_format": (partial(gptq, less=0), {**GPTQ, "format": "gptq_v2"}),
    "gptq_moved": (partial(gptq, moved=True), GPTQ),
    "awq": (awq, AWQ),
    "gptq_3_bits": (gptq_bits, {**GPTQ, "bits": 3, "desc_act": True}),
    "gptq_8_bits": (partial(gptq_bits, bits=8), {**GPTQ, "bits": 8, "desc_act": True}),
    "gptq_dynamic": (partial(gptq_bits, bits=2), {**GPTQ, "dynamic": {"+:.*proj": {"bits": 2}}}),
    "gptq_borrowed": (gptq_borrowed, GPTQ),
    "awq_gemv": (awq_rows, {**AWQ, "version": "gemv"}),
    "nvfp4": (small_floats, {**COMPRESSED, "format": "nvfp4-pack-quantized"}),
    "mxfp4": (partial(small_floats, powers=True), {**COMPRESSED, "format": "mxfp4-pack-quantized"}),
    "fp8_powers": (fp8_powers, FP8),
    "int8": (byte_rows, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": (nf4, BITS),
    "nf4_nested": (partial(nf4, nested=True), BITS),
    "packed": (packed, PACKED),
    "packed_zeros": (partial(packed, zeroed=True), PACKED),
    "packed_bytes": (partial(packed, bits=8), PACKED),
}


def write(root: Path, method: Method, settings: dict[str, Any]) -> tuple[Path, Path]:
    """Write a small Llama quantised, and the same model with the matrices that the parts stand for."""
    (root / "plain").mkdir()
    (root / "stored").mkdir()
    plain, _ = write_family(root / "plain", "arcee")
    stored, _ = write_family(root / "stored", "arcee", quantization_config=settings)
    tensors, rng = load_file(plain / "model.safetensors"), np.random.default_rng(0)
    small: Parts = {}
    for name, w in list(tensors.items()):
        if not name.endswith("proj.weight"):
            small[name] = w
            continue
        parts, dense = method(w, rng)
        tensors[name] = np.ascontiguousarray(dense, np.float32)
        small |= {f"{name.removesuffix('.weight')}.{key}": part for key, part in parts.items()}
    save_file(tensors, plain / "model.safetensors")
    save_file(small, stored / "model.safetensors")
    return stored, plain


@pytest.mark.parametrize("name", METHODS)
def test_quantised_checkpoint_equals_the_dequantised_one(name: str, tmp_path: Path) -> None:
    stored, plain = write(tmp_path, *METHODS[name])
    given = [inputs(2, 7)]
    results = [evaluate_function(load_hf(folder), given, "prefill")[0] for folder in (stored, plain)]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("awq", {"quant_method": "hqq"}, "quant_method: expected one of fp8, gptq, awq, compressed-tensors"),
        ("awq", {"version": "marlin"}, "version: expected one of gemm, gemv, got 'marlin'"),
        ("awq", {"version": None, "format": "gemv_fast"}, "format: expected one of gemm, gemv, got 'gemv_fast'"),
        ("awq", {"backend": "llm-awq"}, "backend: expected 'auto', got 'llm-awq'"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: expected one of gptq, gptq_v2"),
        ("gptq", {"bits": 5}, "bits: expected one of 2, 3, 4, 8"),
        ("gptq", {"bits": 2}, "qweight': expected words of 2 bits"),
        ("gptq_8_bits", {"bits": 4}, "qweight': expected words of 4 bits"),
        ("gptq", {"group_size": 5}, "'.*': expected groups of 5 inputs"),
        ("awq", {"group_size": 16}, "qweight': expected .*zero points of groups of 16"),
        ("packed", {"format": "marlin-24"}, "format: expected one of float-quantized"),
        ("packed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: expected None"),
        ("fp8", {"weight_block_size": [8, 8]}, "weight_scale_inv': expected blocks of .8, 8."),
    ],
)
def test_unknown_quantisation_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    method, settings = METHODS[name]
    stored, _ = write(tmp_path, method, {**settings, **changes})
    with pytest.raises(ParseError, match=message):
        load_hf(stored)
    assert json.loads((stored / "config.json").read_text())["quantization_config"]


FOURS: tuple[dict[str, Any], ...] = (
    {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, {"bnb_4bit_quant_type": "fp4"},
)  # fmt: skip
SCHEMES: dict[str, dict[str, Any]] = {
    "pack-quantized": {"num_bits": 4, "group_size": 8, "strategy": "group", "symmetric": False},
    "pack-quantized of 3 bits": {"num_bits": 3, "group_size": 8, "strategy": "group"},
    "pack-quantized of rows": {"num_bits": 8, "strategy": "channel"},
    "int-quantized": {"num_bits": 8, "strategy": "channel"},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "float-quantized of blocks": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 8]},
    "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 8},
    "mxfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 8, "scale_dtype": "torch.uint8"},
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_matrices_of_compressed_tensors_equal_the_decompressed_ones(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    library = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    form, small = name.partition(" ")[0], name.startswith("nvfp4")
    args = library.quantization.QuantizationArgs(**SCHEMES[name])
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = library.compressors.BaseCompressor.get_value_from_registry(form)

    def compressed(w: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
        x = torch.from_numpy(w)
        rows, columns = args.block_structure or (1, args.group_size or w.shape[1])
        blocks = x.reshape(w.shape[0] // rows, rows, w.shape[1] // columns, columns)
        one = {"global_scale": torch.tensor([6 * 448 / float(x.abs().max())])} if small else {}
        scale, zero = utils.calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args, **one)
        given = {"weight": x, "weight_scale": scale, "weight_zero_point": zero}
        stored = compressor.compress({**given, **{f"weight_{k}": v for k, v in one.items()}}, scheme)
        parts = {}
        for key, value in stored.items():
            eighth = value.dtype == torch.float8_e4m3fn
            parts[key] = value.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) if eighth else value.numpy()
        return parts, compressor.decompress(stored, scheme)["weight"].float().numpy()

    settings = {**COMPRESSED, "format": form, "config_groups": {"group_0": {"weights": SCHEMES[name]}}}
    stored, plain = write(tmp_path, compressed, settings)
    results = [evaluate_function(load_hf(folder), [inputs(2, 7)], "prefill")[0] for folder in (stored, plain)]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=0.05 if small else 1e-5)  # nvfp4 is decompressed to bfloat16


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"load_in_8bit": True}, *({"load_in_4bit": True, **s} for s in FOURS)])
def test_folder_of_bitsandbytes_has_the_logits_of_dequantised_matrices(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    pytest.importorskip("accelerate", reason="needs accelerate")
    library = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 37,
    }
    plain = tmp_path / "plain"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(plain)
    config = transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "stored")
    for layer in [m for m in model.modules() if isinstance(m, torch.nn.Module)]:
        for name, child in list(layer.named_children()):
            w = getattr(child, "weight", None)
            if isinstance(child, library.nn.Linear4bit):
                dense = library.functional.dequantize_4bit(w.data, w.quant_state)
            elif isinstance(child, library.nn.Linear8bitLt):
                scale = child.state.SCB if w.SCB is None else w.SCB
                dense = w.data.float() * scale[:, None] / 127
            else:
                continue
            linear = torch.nn.Linear(child.in_features, child.out_features, bias=False)
            linear.weight.data = dense.float()
            setattr(layer, name, linear)
    with torch.no_grad():
        expected = model(torch.from_numpy(inputs(2, 7))).logits.numpy()
    found = evaluate_function(load_hf(tmp_path / "stored", every_position=True), [inputs(2, 7)], "prefill")[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.torch
@pytest.mark.slow
def test_blocks_of_fp8_have_the_logits_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    stored, _ = write(tmp_path, partial(fp8, block=8), {**FP8, "weight_block_size": [8, 8]})
    config = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        stored, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    with torch.no_grad():
        expected = model.float()(torch.from_numpy(inputs(2, 7))).logits.numpy()
    found = evaluate_function(load_hf(stored, every_position=True), [inputs(2, 7)], "prefill")[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
