"""Weights of quantised checkpoints, read as float32: fp8, GPTQ, AWQ, compressed-tensors, bitsandbytes.

The formats store a matrix as integers or 8-bit floats with scales. Results are computed from the dequantised matrices: activations
are not quantised, even where the file states it.

Tests: `tests/ir/frontend/hf/test_quantized.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.transformer.parameters import Weights
from relax_tune.ir.frontend.hf.weights import HfWeights

Array = NDArray[Any]
CONFIG = "quantization_config"
METHODS = ("fp8", "gptq", "awq", "compressed-tensors", "bitsandbytes")
FORMATS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight neighbouring outputs


@dataclass(frozen=True, slots=True)
class Matrix:
    """The stored parts of one matrix (out, in).

    Attributes:
        name: of the linear layer
    """

    stored: HfWeights
    name: str
    shape: tuple[int, int]

    def part(self, key: str) -> str:
        return f"{self.name}.{key}"

    def has(self, key: str) -> bool:
        return self.part(key) in self.stored.names

    def floats(self, key: str) -> Array:
        """Read a part as float32. Scales in 8-bit integers are exponents of 2."""
        raw = self.stored.raw(self.part(key))
        if key.endswith("scale") and raw.dtype == np.uint8:
            return np.asarray(np.exp2(raw.astype(np.float32) - np.float32(127)))
        return np.asarray(raw, np.float32)

    def integers(self, key: str) -> Array:
        """Read a part as integers."""
        return self.stored.integers(self.part(key))

    def words(self, key: str) -> Array:
        """Read a part as unsigned 32-bit words."""
        return self.integers(key).astype(np.uint32)

    def wrong(self, key: str, expected: str) -> ParseError:
        shape = self.stored.shape(self.part(key))
        return ParseError(
            f"{self.stored.path}: {self.part(key)!r}: expected {expected} for a matrix of shape {self.shape}, got shape {shape}; "
            "do config.json and the weights belong together?"
        )


def unpacked(words: Array, bits: int, axis: int, order: Sequence[int] | None = None) -> Array:
    """Return the unsigned integers of 32-bit words along an axis, the lowest bits first. order: their places in a word"""
    moved = np.moveaxis(words, axis, -1)
    if 32 % bits:  # an integer may span two words
        one_by_one = np.unpackbits(np.ascontiguousarray(moved, "<u4").view(np.uint8), axis=-1, bitorder="little")
        count = one_by_one.shape[-1] // bits
        digits = one_by_one[..., : count * bits].reshape(*moved.shape[:-1], count, bits)
        values = digits @ (1 << np.arange(bits))
    else:
        places = np.arange(32 // bits) if order is None else np.asarray(order)
        values = (moved[..., None] >> (places * bits).astype(np.uint32)) & np.uint32(2**bits - 1)
        values = values.reshape(*moved.shape[:-1], -1)
    return np.moveaxis(values, -1, axis).astype(np.int32)


def spread(
    scale: Array, shape: tuple[int, int], block: Sequence[int] | None, refuse: Callable[[], ParseError]
) -> Array:
    """Return the scale of each element, or an array that broadcasts to it. block: sides of the blocks that share a scale"""
    if scale.size == 1:
        return scale.reshape(1, 1)
    if scale.ndim == 1:
        scale = scale[:, None]
    sides = [-(-n // k) for n, k in zip(shape, scale.shape)] if block is None else list(block)
    if scale.ndim != 2 or any(-(-n // side) != k for n, side, k in zip(shape, sides, scale.shape)):
        raise refuse()
    rows = np.repeat(scale, sides[0], 0)[: shape[0]]
    return np.repeat(rows, sides[1], 1)[:, : shape[1]]


def _gptq(m: Matrix, c: ConfigFields) -> Array:
    """Read GPTQ's form (Frantar et al. 2023): words along the inputs, and for groups of inputs scales and zero points."""
    out, width = m.shape
    words, zero_words, scales = m.words("qweight"), m.words("qzeros"), m.floats("scales")
    bits = _bits(c, (2, 3, 4, 8))
    dynamic = bool(c.data.get("dynamic"))  # layers may have other bits and groups than the file says
    if dynamic and words.ndim == 2:
        bits = next((n for n in (2, 3, 4, 8) if len(words) == -(-width * n // 32)), bits)
    shapes = (-(-width * bits // 32), out), (len(scales), -(-out * bits // 32)), (len(scales), out)
    if (words.shape, zero_words.shape, scales.shape) != shapes:
        raise m.wrong("qweight", f"words of {bits} bits, scales and zero points that fit")
    less = _form(c, "checkpoint_format", ("gptq", "gptq_v2")) == "gptq"
    # The first version of the format stores zero points less 1, subtracted from whole words.
    if less and 32 % bits == 0:
        zero_words = zero_words + np.uint32(sum(1 << k for k in range(0, 32, bits)))
    zeros = unpacked(zero_words, bits, 1)[:, :out]
    if less and 32 % bits:
        zeros = (zeros + 1) & (2**bits - 1)
    values = unpacked(words, bits, 0)[:width]
    # -1 means one group of all inputs.
    size = width if c.data.get("group_size") in (-1, None) else c.whole("group_size")
    size = -(-width // len(scales)) if dynamic else size
    # Activation order (act-order) assigns inputs to groups in any order, which `g_idx` lists.
    group = m.integers("g_idx") if m.has("g_idx") else np.arange(width) // size
    if group.shape != (width,) or np.any((group < 0) | (group >= len(scales))):
        raise m.wrong("g_idx" if m.has("g_idx") else "scales", f"groups of {size} inputs")
    return ((values - zeros[group]) * scales[group]).T


def _awq(m: Matrix, c: ConfigFields) -> Array:
    """Read AWQ's forms (Lin et al. 2024).

    Version `gemm` has words along the outputs, whose order is interleaved. Version `gemv` has words along the inputs, and columns of
    padding behind its scales and zero points."""
    if c.data.get("backend") == "llm-awq":
        raise c.wrong("backend", "'auto'")
    along = _form(c, "version", ("gemm", "gemv")) == "gemv"
    bits = _bits(c, (4,))
    out, width = m.shape
    values = unpacked(m.words("qweight"), bits, 1, None if along else AWQ_ORDER)
    scales = m.floats("scales")
    size = width if c.data.get("group_size") in (-1, None) else c.whole("group_size")
    zeros: Array = np.full(scales.shape, 2 ** (bits - 1))
    if m.has("qzeros"):
        zeros = unpacked(m.words("qzeros"), bits, 1, None if along else AWQ_ORDER)
    count = -(-width // size)
    if along:
        values, scales, zeros = values.T, scales[:, :count].T, zeros[:, :count].T
    if values.shape != (width, out) or scales.shape != (count, out) or zeros.shape != scales.shape:
        raise m.wrong("qweight", f"words, scales and zero points of groups of {size} inputs")
    group = np.arange(width) // size
    return ((values - zeros[group]) * scales[group]).T


def _fp8(m: Matrix, c: ConfigFields) -> Array:
    """Read 8-bit floats with a scale, or one for each block."""
    key = "weight_scale_inv" if m.has("weight_scale_inv") else "weight_scale"
    block = c.data.get("weight_block_size")
    block = None if block is None else c.wholes("weight_block_size", (), 2)
    scale = m.floats(key)
    return _plain(m) * spread(
        scale, m.shape, block if scale.ndim == 2 else None, lambda: m.wrong(key, f"blocks of {block}")
    )


def _plain(m: Matrix) -> Array:
    """Read the elements of a matrix as float32."""
    if m.stored.shape(m.part("weight")) != m.shape:
        raise m.wrong("weight", "that shape")
    return m.floats("weight")


def _compressed(m: Matrix, c: ConfigFields) -> Array:
    """Read the forms of compressed-tensors: integers or 8-bit floats, words of packed integers, or packed 4-bit floats."""
    out, width = m.shape
    packed = m.has("weight_packed")
    if packed and m.stored.raw(m.part("weight_packed")).dtype == np.uint8:
        return _small_floats(m)
    bits = 0
    if not packed and m.has("weight_zero_point"):
        values = _plain(m) - spread(
            m.floats("weight_zero_point"), m.shape, None, lambda: m.wrong("weight_zero_point", "groups")
        )
    elif not packed:
        values = _plain(m)
    else:
        words = m.words("weight_packed")
        # narrow matrices fit into as many words with several numbers of bits
        fitting = [n for n in range(1, 9) if words.shape == (out, -(-width * n // 32))]
        stated = {group["weights"].get("num_bits") for group in _groups(c) if isinstance(group.get("weights"), dict)}
        bits = next((n for n in fitting if n in stated), next((n for n in fitting if n in (4, 8)), 0))
        if not bits:
            raise m.wrong("weight_packed", "words of 1 to 8 bits that config.json states")
        # Packed integers are signed, stored with an offset of half their range.
        values = unpacked(words, bits, 1)[:, :width] - 2 ** (bits - 1)
    scale = m.floats("weight_scale")
    groups = scale.shape[1] if scale.ndim == 2 else 1
    group = m.integers("weight_g_idx") if m.has("weight_g_idx") else None
    if packed and m.has("weight_zero_point"):
        stored = m.words("weight_zero_point")
        zeros = unpacked(stored, bits, 0)[:out] - 2 ** (bits - 1)
        if zeros.shape != (out, groups):
            raise m.wrong("weight_zero_point", f"zero points of {groups} groups")
        values = values - (
            zeros[:, group]
            if group is not None
            else spread(zeros, m.shape, None, lambda: m.wrong("weight_zero_point", "groups"))
        )
    if group is not None:
        if group.shape != (width,) or np.any((group < 0) | (group >= groups)):
            raise m.wrong("weight_g_idx", f"one of {groups} groups for each input")
        return values * scale[:, group]
    return values * spread(scale, m.shape, None, lambda: m.wrong("weight_scale", "scales of rows, groups or blocks"))


def _groups(c: ConfigFields) -> list[Mapping[str, Any]]:
    """Return the groups of layers that config.json states."""
    groups = c.data.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _small_floats(m: Matrix) -> Array:
    """Read 4-bit floats with one bit of mantissa, two in a byte, the lower bits first; scales of groups, and one of all."""
    out, width = m.shape
    stored = m.stored.raw(m.part("weight_packed"))
    if stored.shape != (out, -(-width // 2)):
        raise m.wrong("weight_packed", "bytes of two numbers")
    codes = np.stack([stored & 15, stored >> 4], axis=2).reshape(out, -1)[:, :width]
    values = np.asarray(codes.view(ml_dtypes.float4_e2m1fn), np.float32)
    scale = m.floats("weight_scale")
    if m.has("weight_global_scale"):
        scale = scale / m.floats("weight_global_scale").reshape(1, 1)
    return values * spread(scale, m.shape, None, lambda: m.wrong("weight_scale", "scales of groups"))


def _bitsandbytes(m: Matrix, c: ConfigFields) -> Array:
    """Read the forms of bitsandbytes: 8-bit integers with a scale for each row, or 4-bit codes with one for each block."""
    if m.has("SCB"):
        return _plain(m) * (m.floats("SCB")[:, None] / np.float32(127))
    mark = f"{m.part('weight')}.quant_state.bitsandbytes__"
    name = next((n for n in m.stored.names if n.startswith(mark)), "")
    try:
        state = json.loads(m.stored.raw(name).tobytes())
        block, nested = int(state["blocksize"]), state.get("nested_blocksize")
        shape = tuple(state["shape"])
    except (ValueError, KeyError, TypeError, ParseError):
        raise ParseError(
            f"{m.stored.path}: expected a description {mark}nf4, got none that can be read; download it again"
        ) from None
    stored = np.ascontiguousarray(m.stored.raw(m.part("weight"))).view(np.uint8).ravel()
    count = m.shape[0] * m.shape[1]
    if shape != m.shape or len(stored) != -(-count // 2):
        raise m.wrong("weight", "two codes in a byte")
    scales = m.floats("weight.absmax")
    if nested is not None:
        rough = np.repeat(m.floats("weight.nested_absmax"), int(nested))[: len(scales)]
        scales = m.floats("weight.nested_quant_map")[m.integers("weight.absmax")] * rough + np.float32(
            state["nested_offset"]
        )
    codes = np.stack([stored >> 4, stored & 15], axis=1).ravel()[:count]
    values = m.floats("weight.quant_map")[codes] * np.repeat(scales, block)[:count]
    return np.asarray(values.reshape(m.shape))


def _form(c: ConfigFields, older: str, known: tuple[str, ...]) -> str:
    """Read the name of a layout, whose default is the first: the older field counts before `format`."""
    key = older if c.data.get(older) is not None else "format"
    value = c.data.get(key)
    name = known[0] if value is None else str(value).lower()
    if name not in known:
        raise c.wrong(key, f"one of {', '.join(known)}")
    return name


def _bits(c: ConfigFields, known: tuple[int, ...]) -> int:
    bits = c.whole("bits", 4)
    if bits not in known:
        raise c.wrong("bits", f"one of {', '.join(map(str, known))}")
    return bits


READERS: Mapping[str, tuple[Callable[[Matrix, ConfigFields], Array], tuple[str, ...]]] = {
    "fp8": (_fp8, ("weight_scale_inv", "weight_scale")),
    "gptq": (_gptq, ("qweight",)),
    "awq": (_awq, ("qweight",)),
    "compressed-tensors": (_compressed, ("weight_scale",)),
    "bitsandbytes": (_bitsandbytes, ("SCB", "weight.absmax")),
}  # fmt: skip


class QuantizedWeights:
    """Tensors of a quantised checkpoint; matrices are dequantised. Raises ParseError as `HfWeights` does."""

    def __init__(self, stored: HfWeights, c: ConfigFields) -> None:
        self._stored, self._c = stored, c
        self._read, marks = READERS[c.chosen("quant_method", "", METHODS)]
        ends = tuple(f".{mark}" for mark in marks)
        self._layers = {name.removesuffix(end) for name in stored.names for end in ends if name.endswith(end)}
        # The names of dequantised matrices are added, so that readers see the names of a model that is not quantised.
        self.names = stored.names | {f"{name}.weight" for name in self._layers}

    def get(self, name: str, shape: Sequence[int]) -> Array:
        """Read a tensor as float32."""
        layer, _, part = name.rpartition(".")
        if part != "weight" or layer not in self._layers:
            return self._stored.get(name, shape)
        if len(shape) != 2:
            raise ParseError(
                f"{self._stored.path}: {name!r}: expected a matrix, got the shape {tuple(shape)} of a quantised tensor"
            )
        out, width = shape
        return np.ascontiguousarray(self._read(Matrix(self._stored, layer, (out, width)), self._c), np.float32)


def open_weights(folder: Path, data: Mapping[str, Any], where: str) -> Weights:
    """Open the weights of a folder, dequantised if config.json says how.

    Raises:
        ParseError: for files that cannot be read, and for quantisations that are not imported.
    """
    settings = data.get(CONFIG, data.get("compression_config"))
    stored = HfWeights(folder)
    if settings is None:
        return stored
    if not isinstance(settings, dict):
        raise ConfigFields(data, where).wrong(CONFIG, "an object")
    c = ConfigFields(settings, f"{where}: {CONFIG}")
    if c.chosen("quant_method", "", METHODS) == "compressed-tensors":
        c.chosen("format", "dense", FORMATS)
        c.only("kv_cache_scheme", None)
        if (c.data.get("sparsity_config") or {}).get("format", "dense") != "dense":
            c.only("sparsity_config", None)
    return QuantizedWeights(stored, c)
