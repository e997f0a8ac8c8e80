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
METHODS: dict[str, tuple[Method, dict[str, Any]]] = {
    "fp8": (fp8, FP8),
    "fp8_rows": (fp8_rows, {**COMPRESSED, "format": "float-quantized"}),
    "int8_rows": (int8_rows, {**COMPRESSED, "format": "int-quantized"}),
    "gptq": (gptq, GPTQ),
    "gptq_v2": (partial(gptq, less=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq_moved": (partial(gptq, moved=True), GPTQ),
    "awq": (awq, AWQ),
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
        ("awq", {"quant_method": "bitsandbytes"}, "quant_method: expected one of fp8, gptq, awq, compressed-tensors"),
        ("awq", {"version": "gemv"}, "version: expected gemm, got 'gemv'"),
        ("gptq", {"bits": 3}, "bits: expected one of 2, 4, 8"),
        ("gptq", {"group_size": 5}, "'.*': expected groups of 5 inputs"),
        ("awq", {"group_size": 16}, "qweight': expected .*zero points of groups of 16"),
        ("packed", {"format": "nvfp4-pack-quantized"}, "format: expected one of float-quantized"),
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
