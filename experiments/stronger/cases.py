"""Models, cases, classes of weights and inputs of `peers.py`, equal in every process. Needs only NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.harness.e2e_cases import SMALL, Array

# By model. minilm: batch x length; prefill: tokens; decode: tokens that went before the one of the step.
CASES: Mapping[str, tuple[str, ...]] = {
    "minilm": ("1x1", "1x8", "1x16", "1x32", "1x64", "1x128", "1x256", "1x384", "1x512", "8x16", "8x128"),
    "prefill": ("16", "64", "128", "512"),
    "decode": ("16", "128", "512"),
}
FEW: Mapping[str, tuple[str, ...]] = {"minilm": ("1x16", "8x16"), "prefill": ("16",), "decode": ("16",)}
BATCH, LENGTH, POSITIONS = 8, 512, 1024
THREADS = 2
DECODER = SMALL
NUMBERS = 1024


@dataclass(frozen=True, slots=True)
class Weights:
    """A class of weights. tolerance: of the difference from float32 results, its norm over theirs; names of contenders."""

    tolerance: float
    ours: tuple[str, ...]
    peers: tuple[str, ...]


REFERENCE = "torch.eager"
CLASSES: Mapping[str, Weights] = {
    "f32": Weights(
        1e-3,
        ("ours.f32",),
        (REFERENCE, "torch.compile", "onnxruntime.f32", "openvino.f32", "iree.f32", "llama.f32"),
    ),
    "16 bits": Weights(
        3e-2, ("ours.bf16", "ours.bf16.weights"), ("torch.bf16", "openvino.f16", "llama.f16", "llama.bf16")
    ),
    "8 bits": Weights(
        0.25,
        ("ours.int8", "ours.activations"),
        ("onnxruntime.int8", "onnxruntime.bits8", "openvino.int8", "openvino.quantized", "llama.q8_0"),
    ),
    "4 bits": Weights(
        0.6, ("ours.int4", "ours.int4.activations"), ("onnxruntime.bits4", "openvino.int4", "llama.q4_0")
    ),
}
# What a peer is served from, below the folder of its model.
SERVED: Mapping[str, str] = {
    "onnxruntime.f32": "model.onnx",
    "onnxruntime.int8": "model.int8.onnx",
    "onnxruntime.bits8": "model.bits8.onnx",
    "onnxruntime.bits4": "model.bits4.onnx",
    "openvino.f32": "model.onnx",
    "openvino.f16": "f16.xml",
    "openvino.int8": "int8.xml",
    "openvino.quantized": "quantized.xml",
    "openvino.int4": "int4.xml",
    "iree.f32": "model.vmfb",
    **{f"llama.{kind}": f"{kind}.gguf" for kind in ("f32", "f16", "bf16", "q8_0", "q4_0")},
}
# Of encoders alone.
ENCODERS_ONLY = ("openvino.quantized",)
MEANINGS: Mapping[str, str] = {
    "ours.bf16": "`--precision bf16`: what products read is stored so",
    "ours.bf16.weights": "`--weights bf16`: weights alone are, and multiplied with float32",
    "ours.activations": "`--activations int8`: products of whole numbers",
    "ours.int4.activations": "`--weights int4 --activations int8`",
    "torch.bf16": "torch eager, the module in bfloat16",
    "openvino.f16": "weights stored as float16, the precision that OpenVINO chooses by itself",
    "onnxruntime.int8": "`quantize_dynamic`, a scale a column",
    "onnxruntime.bits8": "MatMulNBits, 8 bits, blocks of 32, accuracy level 4",
    "onnxruntime.bits4": "MatMulNBits, 4 bits, blocks of 32, accuracy level 4",
    "openvino.int8": "`nncf.compress_weights`, INT8_SYM",
    "openvino.quantized": "`nncf.quantize`: weights and activations; MiniLM only",
    "openvino.int4": "`nncf.compress_weights`, INT4_SYM, groups of 32, all layers",
    "llama.f32": "keys and values in f32 too, without flash attention, which rounds; elsewhere its defaults; its GELU is a table in f16",
}


# Contenders that may stray further than their class: llama.cpp looks GELU up in a table of float16.
ALLOWED: Mapping[str, float] = {"llama.f32": 5e-3}


def tolerance_of(name: str) -> float:
    return ALLOWED.get(name, CLASSES[class_of(name)].tolerance)


def class_of(name: str) -> str:
    return next(c for c, w in CLASSES.items() if name in (*w.ours, *w.peers))


def given(model: str, case: str, folder: Path) -> tuple[Array, ...]:
    """Return the arguments of a call. minilm: ids and mask; prefill: ids; decode: one id, then the caches."""
    if model == "decode":
        with np.load(folder / f"past-{case}.npz") as kept:
            return kept["id"], *(kept[f"cache_{k}"] for k in range(2 * DECODER.layers))
    rows, length = map(int, case.split("x")) if model == "minilm" else (1, int(case))
    rng = np.random.default_rng([rows, length, len(model)])
    low, high = (1000, 30000) if model == "minilm" else (0, DECODER.vocabulary)
    ids = rng.integers(low, high, (rows, length))
    return (ids, np.ones_like(ids)) if model == "minilm" else (ids,)


def numbers(result: Array) -> list[float]:
    """Return up to NUMBERS of a result, spread over all of it."""
    flat = np.ravel(np.asarray(result, np.float32))
    return [float(x) for x in flat[:: -(-flat.size // NUMBERS)]]


def error(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the norm of the difference over that of the expected values; infinity for another number of values."""
    if len(found) != len(wanted):
        return float("inf")
    a, b = np.asarray(found, float), np.asarray(wanted, float)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b)) if np.isfinite(a).all() else float("inf")
