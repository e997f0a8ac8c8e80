"""Weights quantised in blocks: products with them, and rows of tables of them.

Tests: `tests/ir/frontend/onnx/microsoft/test_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from relax_tune.ir.core.dtype import DType, f32, u8
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.tensors import Array
from relax_tune.ir.frontend.shared.handlers.neural import matmul
from relax_tune.ir.frontend.shared.operators import element_of
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.math.quantize import Dequantize, Pack4, Unpack4

_FP4 = [0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25]
FP4 = np.array(_FP4 + [-x for x in _FP4], np.float32)
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
"""The 16 numbers of `fp4` and `nf4` of bitsandbytes (Dettmers et al. 2023)."""


def unpacked(packed: Array, bits: int, count: int) -> Array:
    """Return the unsigned integers of packed bytes (..., bytes), the lowest bits of a byte first, as (..., count) uint8."""
    each = 8 // bits
    shifts = np.arange(each, dtype=np.uint8) * bits
    numbers: Array = (packed[..., None] >> shifts) & (2**bits - 1)
    whole: Array = numbers.reshape(*packed.shape[:-1], packed.shape[-1] * each)[..., :count].astype(np.uint8)
    return whole


def weights_of_blocks(
    w: Writer, name: str, numbers: Array, scales: Array, zeros: Array | None, bits: int, block: int, target: DType
) -> Value:
    """Emit the weights (..., k, n) of unsigned integers that are dequantised by blocks along k.

    Args:
        numbers: (..., n, k) uint8, of `bits` bits.
        scales: (..., n, blocks) of a float type.
        zeros: (..., n, blocks) integers, or floats; None for half the range.
        block: Elements of a block.
    """
    half = 1 << (bits - 1)
    turned = np.ascontiguousarray(np.swapaxes(numbers, -1, -2))
    axis, size = turned.ndim - 2, turned.shape[-2]
    plain = zeros is None or bool((zeros == half).all())
    # numbers without a zero point are signed: the dequantisation is one product
    stored = (
        turned.view(np.int8) - np.int8(half)
        if plain and bits < 8
        else (turned ^ 128).view(np.int8)
        if plain
        else turned
    )
    if bits == 4:
        packed = w.tensor(w.constant(Pack4(axis).evaluate([stored]), name))
        value = w.emit(Unpack4(axis, const(size), plain), packed)
    else:
        value = w.tensor(w.constant(np.ascontiguousarray(stored), name))
    by = w.cast(w.tensor(w.constant(np.ascontiguousarray(np.swapaxes(scales, -1, -2)), f"{name}.scale")), target)
    back = Dequantize(axis, block)
    if plain or zeros is None:
        return w.emit(back, value, by)
    turned_zeros = np.ascontiguousarray(np.swapaxes(zeros, -1, -2))
    if zeros.dtype.kind != "f":
        return w.emit(back, value, by, w.tensor(w.constant(turned_zeros, f"{name}.zero")))
    # a fractional zero point is a summand: (q - zero) * scale = q * scale - zero * scale, by blocks
    shift = (turned_zeros.astype(np.float32) * np.swapaxes(scales, -1, -2).astype(np.float32)).astype(target.numpy)
    # The last block may be incomplete, so the repeated numbers are cut to the size.
    spread = np.take(np.repeat(shift, block, axis=axis), np.arange(size), axis=axis)
    return w.sub(w.emit(back, value, by), w.tensor(w.constant(spread, f"{name}.shift")))


def constant(node: OnnxNode, w: Writer, position: int, what: str) -> Array:
    """Return an input that must be constant. Raises ParseError."""
    array = w.numbers(node.item(position))
    if array is None:
        raise node.refuse(f"expected constant {what}, got {node.item(position).info!r}")
    return array


def _matmul_n_bits(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import MatMulNBits: a product with weights of 2, 4 or 8 bits in blocks along their rows."""
    n, k, bits, block = (node.integer(a, d) for a, d in (("N", None), ("K", None), ("bits", 4), ("block_size", None)))
    if bits not in (2, 4, 8) or node.integer("weight_prepacked", 0):
        raise node.refuse(f"expected 2, 4 or 8 bits and weights that are not prepacked, got {bits}")
    x, count = node.item(0), -(-k // block)
    packed = constant(node, w, 1, "weights")
    scales = constant(node, w, 2, "scales").reshape(n, count)
    numbers = unpacked(packed.reshape(n, -1), bits, k)
    zeros = None
    if node.has(3):
        zeros = constant(node, w, 3, "zero points")
        zeros = zeros.reshape(n, count) if zeros.dtype.kind == "f" else unpacked(zeros.reshape(n, -1), bits, count)
    name, value, row = node.item(1).name, w.tensor(x), x.ndim == 1
    groups = constant(node, w, 4, "group indices").reshape(-1)[:k] if node.has(4) else np.arange(k) // block
    order = np.argsort(groups, kind="stable")
    if np.array_equal(groups[order], np.arange(k) // block):
        if not np.array_equal(order, np.arange(k)):
            # GPTQ's act-order: in the order of their groups, the rows of a block are neighbours
            numbers, value = numbers[:, order], w.take(value, x.ndim - 1, w.tensor(w.constant(order, f"{name}.order")))
        weights = weights_of_blocks(w, name, numbers, scales, zeros, bits, block, x.dtype)
    else:
        # Groups of other sizes than a block have no form in blocks: the matrix is stored as floats.
        middle = np.float32(1 << (bits - 1)) if zeros is None else zeros[:, groups].astype(np.float32)
        dense = (numbers.astype(np.float32) - middle) * scales[:, groups].astype(np.float32)
        weights = w.tensor(w.constant(np.ascontiguousarray(dense.T).astype(x.dtype.numpy), name))
    y = w.matmul(w.expand_dims(value, (0,)) if row else value, weights)
    y = w.reshape(y, [const(n)]) if row else y
    return w.of(w.add(y, node.operand(w, 5)) if node.has(5) else y)


def _matmul_bnb4(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import MatMulBnb4: a product with weights (n, k) of 4-bit numbers of a table, scaled by blocks of n * k elements."""
    n, k, block, kind = (node.integer(name) for name in ("N", "K", "block_size", "quant_type"))
    if kind not in (0, 1) or not node.integer("transB", 1) or node.flag("training_mode"):
        raise node.refuse(f"expected quant_type 0 or 1, transB and no training_mode, got {dict(node.attributes)}")
    packed, scales = constant(node, w, 1, "weights").reshape(-1), constant(node, w, 2, "scales").reshape(-1)
    # the first number of a byte has its high bits
    codes = np.stack([packed >> 4, packed & 15], -1).reshape(-1)[: n * k]
    numbers = (NF4 if kind else FP4)[codes] * np.repeat(scales.astype(np.float32), block)[: n * k]
    x = node.item(0)
    weights = np.ascontiguousarray(numbers.reshape(n, k).T).astype(x.dtype.numpy)
    return matmul(w, replace(node, inputs=(x, w.constant(weights, node.item(1).name))))


def _gather(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import GatherBlockQuantized: rows of a table, dequantised by blocks; an index out of range gives zeros."""
    data, indices = node.item(0), node.item(1)
    bits, block = node.integer("bits", 4), node.integer("block_size", 128)
    table = constant(node, w, 0, "data")
    if data.dtype is u8:
        table = unpacked(table, bits, table.shape[-1] * (8 // bits))
    axis, along = (
        node.normalised(node.integer("gather_axis", 0), data.ndim),
        node.normalised(node.integer("quantize_axis", 1), data.ndim),
    )
    by = constant(node, w, 2, "scales")
    zeros = _zeros(w, node, data.dtype, bits, by.shape)
    if not block or table.shape[along] > block * by.shape[along]:
        raise node.refuse(f"expected a scale for each block of {block} elements, got {by.shape} for {table.shape}")
    value = w.tensor(indices)
    value = w.where(w.less(value, 0), w.add(value, table.shape[axis]), value)
    inside = w.logical_and(w.less_equal(0, value), w.less(value, table.shape[axis]))
    # Clamped only so that the access is inside; the flags below put zeros in place of such rows.
    places = w.minimum(w.maximum(value, 0), table.shape[axis] - 1)
    name, of_blocks = data.name, w.quotient(places, block) if axis == along else places
    q = w.take(w.tensor(w.constant(np.ascontiguousarray(table), name)), axis, places)
    scale = w.take(w.tensor(w.constant(by, f"{name}.scale")), axis, of_blocks)
    zero = None
    if zeros is not None:
        zero = w.take(w.tensor(w.constant(zeros.astype(table.dtype), f"{name}.zero")), axis, of_blocks)
    if axis == along:
        # one scale for each element that was taken
        q = w.cast(q, f32)
        q = q if zero is None else w.sub(q, w.cast(zero, f32))
        y = w.cast(w.mul(q, w.cast(scale, f32)), element_of(scale))
    else:
        # The taken axis is replaced by the dims of the indices, which moves the axes behind it.
        where = along if along < axis else along + indices.ndim - 1
        y = w.emit(Dequantize(where, block), q, scale, *([] if zero is None else [zero]))
    flags = w.reshape(inside, [*indices.shape, *[const(1)] * (len(w.of(y).shape) - axis - indices.ndim)])
    return w.of(w.where(flags, y, 0.0))


def _zeros(w: Writer, node: OnnxNode, element: DType, bits: int, shape: tuple[int, ...]) -> Array | None:
    """Return the zero points of a table: 0 by default, of packed bytes half their range."""
    if node.has(3):
        zeros = constant(node, w, 3, "zero points")
        return unpacked(zeros, bits, shape[-1]) if element is u8 else zeros
    return np.full(shape, 1 << (bits - 1), np.uint8) if element is u8 else None


HANDLERS: Mapping[str, Handler] = {
    "MatMulNBits": _matmul_n_bits, "GatherBlockQuantized": _gather, "MatMulBnb4": _matmul_bnb4,
}  # fmt: skip
