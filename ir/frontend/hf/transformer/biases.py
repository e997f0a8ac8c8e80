"""Attention biases by position: ALiBi, buckets of distances, offsets in grids, disentangled attention.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`, `tests/ir/frontend/hf/families/test_encoders.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import bf16
from relax_tune.ir.core.expr import add, const
from relax_tune.ir.core.graph import GVar, Value
from relax_tune.ir.frontend.hf.transformer.blocks import Blocks
from relax_tune.ir.frontend.hf.transformer.inputs import Patches
from relax_tune.ir.frontend.hf.transformer.spec import Alibi, Buckets, Disentangled, GridBias
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import BroadcastTo, ExpandDims, Permute, Reshape, Slice, Take
from relax_tune.ir.op.math.elementwise import Add, AddScalar, MaximumScalar, Minimum, Mul, MulScalar, Sigmoid, Sub
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm

LOWEST = float(np.finfo(np.float32).min)  # added to the scores of hidden positions, as in transformers


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of the paper; heads beyond a power of 2 take every second slope of twice as many heads."""
    power = 2 ** math.floor(math.log2(heads))

    def slopes(count: int) -> list[float]:
        base = np.float32(2 ** (-(2 ** -(math.log2(count) - 3))))
        return [float(base ** np.float32(i)) for i in range(1, count + 1)]

    return tuple(slopes(power) + slopes(2 * power)[: 2 * (heads - power) : 2])


def mpt_slopes(heads: int, largest: float) -> tuple[float, ...]:
    """Return the slopes of MPT: the slopes of the next power of 2, every second one first."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [1 / 2 ** (i * largest / power) for i in range(1, power + 1)]
    return tuple(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads])


def alibi_table(alibi: Alibi, heads: int, positions: int, scale: float) -> NDArray[np.float32]:
    """Return the biases of all columns, (heads, positions). scale: of the scores"""
    numbers = alibi_slopes(heads) if alibi.largest is None else mpt_slopes(heads, alibi.largest)
    slopes = np.asarray(numbers, np.float32)[:, None]
    # The paper's bias is slope * (column - row). Adding slope * row to a row does not change its softmax, so
    # positions of columns suffice, and the bias is the same for all rows.
    at = np.arange(1 - positions if alibi.from_end else 0, 1 if alibi.from_end else positions, dtype=np.float32)
    if alibi.half:
        # As in transformers: in bfloat16, positions beyond 256 lose their last digits.
        slopes, at = (t.astype(bf16.name).astype(np.float32) for t in (slopes, at))
    table = slopes * at
    table = table.astype(bf16.name).astype(np.float32) if alibi.half else table
    return np.ascontiguousarray(table * np.float32(scale) if alibi.scaled else table)


def alibi_bias(e: Blocks, alibi: Alibi, scale: float, positions: int) -> GVar:
    """Emit the biases of all columns: (1, heads, 1, past + n). positions: rows of the table"""
    table = e.constant("alibi", lambda: alibi_table(alibi, e.stack.heads, positions, scale))
    total = e.past + e.dims[1]
    start = positions - total if alibi.from_end else const(0)
    return e.g.call(ExpandDims((0, 2)), e.g.call(Slice(1, start, start + total), table, hint="alibi"))


def by_distance(e: Blocks, name: str, table: NDArray[Any]) -> GVar:
    """Emit rows of a table (2 r + 1, k) by the distances -r .. r of columns from rows: (k, n, past + n).

    Larger distances take the outermost rows."""
    g, rows, past, total = e.g, len(table), e.past, add(e.past, e.dims[1])
    columns = g.call(Iota(total), hint="columns")
    new = columns if past is const(0) else g.call(Slice(0, past, total), columns)
    distance = g.call(Sub(), g.call(ExpandDims((0,)), columns), g.call(ExpandDims((1,)), new), hint="distance")
    # Distances beyond the table share its first or last row.
    place = g.call(MaximumScalar(0), g.call(AddScalar((rows - 1) // 2), distance))
    place = g.call(Minimum(), place, e.scalar(f"last_of_{rows}", rows - 1, np.int64))
    return g.call(Permute((2, 0, 1)), g.call(Take(), e.constant(name, lambda: table), place), hint="by_distance")


def window_bias(e: Blocks, window: int) -> GVar:
    """Emit the bias that hides columns further away than `window`, in both directions."""
    # One row more at each end than the window has distances: these two rows stand for everything further away.
    near = np.zeros((2 * window + 3, 1), np.float32)
    near[[0, -1]] = LOWEST
    return by_distance(e, f"window_{window}", near)


def distance_bucket(distance: NDArray[Any], count: int, furthest: int, causal: bool = False) -> NDArray[Any]:
    """Return the buckets of distances of columns from rows (Raffel et al. 2020, section 2.1).

    Half of the buckets serve earlier columns, all if `causal`. The first half of these hold one distance each, the others
    logarithmically more, up to `furthest`."""
    half = count if causal else count // 2
    exact = half // 2
    far = np.maximum(-distance, 0) if causal else np.abs(distance)
    with np.errstate(divide="ignore"):
        ratio = np.log(far.astype(np.float32) / np.float32(exact)) / np.float32(np.log(furthest / exact))
        # Half of the buckets hold single distances, the others grow logarithmically up to `furthest`. float32
        # throughout: in float64 a distance at the border of two buckets may fall into the other one.
        large = exact + np.nan_to_num(ratio * np.float32(half - exact), neginf=0).astype(np.int64)
    bucket = np.where(far < exact, far, np.minimum(large, half - 1))
    return np.asarray(bucket if causal else bucket + half * (distance > 0))


def bucket_bias(e: Blocks, b: Buckets, path: str) -> GVar:
    """Emit the biases of buckets: (heads, n, past + n)."""
    name = f"{path}.{b.table}" if b.each_layer else b.table
    stored = e.parameters.get(f"{name}.weight", b.count, e.stack.heads)
    reach = np.arange(-b.furthest, b.furthest + 1)
    return by_distance(e, f"{name}.by_distance", stored[distance_bucket(reach, b.count, b.furthest, e.stack.causal)])


def gated_bias(e: Blocks, x: GVar, path: str, bias: Value) -> GVar:
    """Scale the biases of each row by a gate of its heads (Chen et al. 2022, WavLM, section IV-A). x: input of attention"""
    g, s = e.g, e.stack
    rows = g.call(Reshape((*e.dims, const(s.heads), const(s.size))), x)
    weight, shift = e.parameters.get(f"{path}_linear.weight", 8, s.size), e.parameters.get(f"{path}_linear.bias", 8)
    # each of the two gates sums four outputs, which equals a product with the sums of their rows
    w = e.constant(f"{path}.weight", lambda: np.ascontiguousarray(weight.reshape(2, 4, s.size).sum(1).T))
    gates = g.call(Matmul(), g.call(Permute((0, 2, 1, 3)), rows), w)
    gates = g.call(Add(), gates, e.constant(f"{path}.bias", lambda: shift.reshape(2, 4).sum(1)))
    first, second = (g.call(Slice(3, const(k), const(k + 1)), g.call(Sigmoid(), gates)) for k in (0, 1))
    gate = g.call(Mul(), second, e.weight(f"{path}_const", 1, s.heads, 1, 1))
    gate = g.call(Mul(), first, g.call(AddScalar(-1.0), gate))
    return g.call(Mul(), g.call(AddScalar(2.0), gate), bias, hint="gated_bias")


def grid_distance(height: int, width: int) -> NDArray[Any]:
    """Return the row of a table of biases for each pair of positions of a grid, by their offset: (n, n)."""
    y, x = (part.ravel() for part in np.mgrid[:height, :width])
    down, right = (p[:, None] - p[None, :] for p in (y, x))
    return np.asarray((down + height - 1) * (2 * width - 1) + right + width - 1)


def grid_bias(e: Blocks, b: GridBias, path: str) -> Value:
    """Return the biases of patches and of the token before them: (heads, n, n)."""
    p, heads = e.stack.embedding, e.stack.heads
    assert isinstance(p, Patches)
    rows, columns = p.grid
    # Offsets reach from -(n - 1) to n - 1 along an axis of n patches.
    count = (2 * rows - 1) * (2 * columns - 1) + 3
    place = np.full((p.positions, p.positions), count - 3)  # from the token to a patch
    place[:, 0], place[0, 0], place[1:, 1:] = count - 2, count - 1, grid_distance(rows, columns)
    names = [name for name in (b.shared, f"{path}.{b.each}" if b.each else "") if name]
    tables = [e.parameters.get(f"{name}.relative_position_bias_table", count, heads) for name in names]
    table = np.asarray(np.sum(tables, axis=0), np.float32)
    return e.constant(f"{path}.bias", lambda: np.ascontiguousarray(table[place].transpose(2, 0, 1)))


def log_bucket(distance: NDArray[Any], span: int, furthest: int | None) -> NDArray[Any]:
    """Return relative positions, logarithmic beyond half the span (He et al. 2023, DeBERTa V3)."""
    if furthest is None:
        return distance
    middle = span // 2
    far = np.maximum(np.abs(distance), 1).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(far / np.float32(middle)) / np.log(np.float32((furthest - 1) / middle))
    scaled = np.ceil(ratio * np.float32(middle - 1)) + middle
    return np.asarray(np.where(far <= middle, distance, scaled * np.sign(distance)), np.int64)


def disentangled_bias(
    e: Blocks, d: Disentangled, q: GVar, k: GVar, bias: Value | None, path: str, positions: int
) -> Value | None:
    """Add the scores between contents and relative positions (He et al. 2021, equation 4) to a bias.

    Args:
        positions: largest number of positions
    """
    g, s, get, length = e.g, e.stack, e.parameters.get, e.dims[1]
    table = get(d.table, 2 * d.span, s.hidden)
    if d.norm:
        gamma, beta = (get(f"{d.norm}.{part}", s.hidden) for part in ("weight", "bias"))
        # The table and its projections are weights, so that everything up to the products with queries and keys is
        # done at import.
        table = LayerNorm(s.norm.eps).evaluate([table, gamma, beta])
    reach = np.arange(1 - positions, positions)
    # columns before a row have negative distances, but positive relative positions
    near = np.clip(log_bucket(-reach, d.span, d.furthest) + d.span, 0, 2 * d.span - 1)
    place = by_distance(e, "relative_position", near[:, None])
    for term, rows, name in (("c2p", q, d.key), ("p2c", k, d.query)):
        if term not in d.terms:
            continue

        def projected(name: str = name) -> NDArray[Any]:
            product = table @ get(f"{path}.{name}.weight", s.heads * s.size, s.hidden).T
            if name != d.key or d.key_bias:
                product = product + get(f"{path}.{name}.bias", s.heads * s.size)
            return np.ascontiguousarray(product.reshape(-1, s.heads, s.size).transpose(1, 2, 0))

        scores = g.call(Matmul(), rows, e.constant(f"{path}.{name}.{term}", projected), hint=term)
        where = place if term == "c2p" else g.call(Permute((0, 2, 1)), place)
        where = g.call(BroadcastTo((e.dims[0], const(s.heads), length, length)), where)
        scores = g.call(GatherElements(3), scores, where)
        # The second term gathers by columns: keys meet the projected queries of positions, transposed back
        # afterwards.
        scores = scores if term == "c2p" else g.call(Permute((0, 1, 3, 2)), scores)
        scores = g.call(MulScalar(s.layers[0].scale), scores)
        bias = scores if bias is None else g.call(Add(), scores, bias)
    return bias
