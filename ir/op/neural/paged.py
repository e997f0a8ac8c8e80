"""Keys and values in blocks of a pool, read through tables (PagedAttention, Kwon et al. 2023).

Rows are tokens of several texts. Text `i` has the blocks `tables[i]`: position `c` of the text is element `c % size` of block
`tables[i, c // size]`. Blocks that several texts share are stored once.

Tests: `tests/ir/op/neural/test_paged.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import i32, i64
from relax_tune.ir.core.expr import (
    Expr,
    and_,
    call,
    cast,
    const,
    div,
    floordiv,
    floormod,
    le,
    lt,
    mul,
    select,
    sub,
)
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import Tensor
from relax_tune.ir.op.base import (
    Array,
    Deduction,
    IndexUse,
    OperatorBuilder,
    OperatorSpec,
    float_result,
    shape_of,
)
from relax_tune.ir.op.indexing.indices import inside, nearest, require_elements
from relax_tune.ir.op.neural.attention import Attention, attention_loops
from relax_tune.ir.op.reduction.reduce import lowest


def _check_places(name: str, tables: TensorInfo, requests: TensorInfo, positions: TensorInfo) -> None:
    """Raise DeduceError unless these are integers of 2 dims, 1 and 1."""
    for what, info, rank in (("tables", tables, 2), ("requests", requests, 1), ("positions", positions, 1)):
        if info.dtype not in (None, i32, i64) or info.ndim not in (None, rank):
            raise DeduceError(f"{name}: expected {what} of {rank} dims of int32 or int64, got {info!r}")


def _require_blocks(name: str, ctx: Deduction, pool: TensorInfo, tables: TensorInfo, rows: Sequence[Expr]) -> None:
    """Require blocks, positions, texts and tables to choose from, unless there are no rows."""
    for size in (*(pool.shape or ())[:2], *(tables.shape or ())):
        require_elements(name, ctx, size, rows)


def _places(sizes: Sequence[Expr], first: int) -> tuple[IndexUse, ...]:
    """Return the uses of tables, requests and positions, the arguments from `first` on.

    Args:
        sizes: blocks of the pool, positions of a block, texts, blocks of a table.
    """
    blocks, size, texts, width = sizes
    return IndexUse(first, blocks), IndexUse(first + 1, texts), IndexUse(first + 2, mul(width, size))


@dataclass(frozen=True, slots=True)
class PagedWrite(OperatorSpec):
    """Write the rows of new tokens to their places in a pool.

    pool: (p, size, heads, d); new: (t, heads, d) of the same type; tables: (r, w), requests: (t,), positions: (t,) integers. The
    result is the pool, in which row `i` is at position `positions[i]` of text `requests[i]`. Different rows have different places; of
    equal ones the last counts. In a function that returns the result, and reads the pool nowhere else, the pool is written in place
    (`ir/passes/memory/append`)."""

    name: ClassVar[str] = "paged_write"
    arity: ClassVar[int] = 5

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        pool, new, tables, requests, positions = self.tensors(infos)
        _check_places(self.name, tables, requests, positions)
        dtype = self.same_dtype((pool, new))
        if pool.ndim not in (None, 4) or new.ndim not in (None, 3):
            raise DeduceError(f"{self.name}: expected a pool of 4 dims and rows of 3, got {pool!r} and {new!r}")
        if pool.shape is not None and new.shape is not None:
            for p in (1, 2):
                ctx.require_equal(pool.shape[p + 1], new.shape[p], f"{self.name}: dim {p} of the rows")
            for info in (requests, positions):
                if info.shape is not None:
                    ctx.require_equal(new.shape[0], info.shape[0], f"{self.name}: number of rows")
            _require_blocks(self.name, ctx, pool, tables, new.shape)
        return TensorInfo(pool.shape, dtype, 4)

    def build(self, b: OperatorBuilder) -> None:
        dims, rows = b.shape(0), b.shape(1)
        names = ("pool", "new", "tables", "requests", "positions")
        pool, new, tables, requests, positions = (b.argument(p, name) for p, name in enumerate(names))
        y = b.output("y", dims, b.dtype(0))
        b.compute(y, lambda *i: pool[i], "paged_keep")
        place = _Place(tables, requests, positions, dims[1])
        b.store(
            y,
            rows,
            lambda row, head, at: ((*place.of_row(row, dims[0]), head, at), new[row, head, at]),
            "paged_write",
        )

    def indexed(self, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
        return _places((*shape_of(infos[0])[:2], *shape_of(infos[2])), 2)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        pool, new, tables, requests, positions = arrays
        result = np.array(pool)
        size = pool.shape[1]
        at = nearest(positions, tables.shape[1] * size)
        blocks = nearest(tables, len(pool))[nearest(requests, len(tables)), at // size]
        for row, (block, offset) in enumerate(zip(blocks, at % size, strict=True)):
            result[block, offset] = new[row]
        return result


@dataclass(frozen=True, slots=True)
class PagedAttention(OperatorSpec):
    """Attention of tokens to the earlier positions of their own texts: `softmax(scale * q @ k.T) @ v` with grouped-query heads.

    q: (t, g, s, d), `s` query heads for each of `g` key heads; keys: (p, size, g, d), values: (p, size, g, e), pools of blocks, perhaps
    of another float type; tables: (r, w), requests: (t,), positions: (t,) integers; result: (t, g, s, e). Row `i` sees the positions
    up to `positions[i]` of text `requests[i]`.

    Attributes:
        scale, window, softcap: as of `Attention`.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    name: ClassVar[str] = "paged_attention"
    arity: ClassVar[int] = 6

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        q, keys, values, tables, requests, positions = self.tensors(infos)
        _check_places(self.name, tables, requests, positions)
        for what, info in (("queries", q), ("keys", keys), ("values", values)):
            if (info.dtype is not None and not info.dtype.is_float) or info.ndim not in (None, 4):
                raise DeduceError(f"{self.name}: expected floating-point {what} of 4 dims, got {info!r}")
        self.same_dtype((keys, values))
        if q.shape is None or keys.shape is None or values.shape is None:
            return TensorInfo(None, q.dtype, 4)
        ctx.require_equal(q.shape[3], keys.shape[3], f"{self.name}: widths of queries and keys")
        ctx.require_equal(q.shape[1], keys.shape[2], f"{self.name}: key heads")
        for p, what in ((0, "blocks"), (1, "positions of a block"), (2, "heads")):
            ctx.require_equal(keys.shape[p], values.shape[p], f"{self.name}: {what} of keys and values")
        for info in (requests, positions):
            if info.shape is not None:
                ctx.require_equal(q.shape[0], info.shape[0], f"{self.name}: number of rows")
        result = (*q.shape[:3], values.shape[3])
        _require_blocks(self.name, ctx, keys, tables, result)
        return TensorInfo(result, q.dtype)

    def build(self, b: OperatorBuilder) -> None:
        names = ("q", "keys", "values", "tables", "requests", "positions")
        q, keys, values, tables, requests, positions = (b.argument(p, name) for p, name in enumerate(names))
        dims, (blocks, size, *_), dtype = b.shape(0), b.shape(1), b.dtype(0)
        place = _Place(tables, requests, positions, size)
        hidden = lowest(dtype)

        def read(pool: Tensor) -> Callable[..., Expr]:
            return lambda row, head, column, at: cast(pool[(*place.of_column(row, column, blocks), head, at)], dtype)

        def scored(product: Expr, row: Expr, head: Expr, shared: Expr, column: Expr) -> Expr:
            value: Expr = mul(product, const(self.scale, dtype))
            if self.softcap is not None:
                cap = const(self.softcap, dtype)
                value = mul(call("tanh", div(value, cap)), cap)
            own = cast(positions[row], i64)
            visible = le(column, own)
            if self.window is not None:
                visible = and_(visible, lt(sub(own, self.window), column))
            return select(visible, value, hidden)

        attention_loops(
            b,
            dims[:3],
            mul(b.shape(3)[1], size),
            (dims[3], b.shape(2)[3]),
            lambda *i: q[i],
            read(keys),
            read(values),
            scored,
            dtype,
            dtype,
        )

    def indexed(self, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
        return _places((*shape_of(infos[1])[:2], *shape_of(infos[3])), 3)

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        q, keys, values, tables, requests, positions = arrays
        result = np.zeros((*q.shape[:3], values.shape[3]))
        rows = nearest(tables, len(keys))[nearest(requests, len(tables))]
        for i, (blocks, last) in enumerate(zip(rows, positions.tolist(), strict=True)):
            # (blocks, size, g, d) -> (g, positions, d)
            k, v = (pool[blocks].reshape(-1, *pool.shape[2:]).swapaxes(0, 1) for pool in (keys, values))
            place = np.arange(k.shape[1])
            visible = place <= last
            visible = visible if self.window is None else visible & (last - self.window < place)
            attention = Attention(self.scale, softcap=self.softcap)
            result[i] = attention.evaluate(
                [q[i].astype(np.float64), k, v, np.broadcast_to(visible, (*q.shape[1:3], len(place)))]
            )
        return float_result(result, (q,), q.dtype)


@dataclass(frozen=True, slots=True)
class _Place:
    """Places of positions in a pool. size: positions of a block"""

    tables: Tensor
    requests: Tensor
    positions: Tensor
    size: Expr

    def of_row(self, row: Expr, blocks: Expr) -> tuple[Expr, Expr]:
        """Return block and element of a row's own position."""
        width = self.tables.buffer.shape[1]
        return self.of_column(row, inside(self.positions[row], mul(width, self.size)), blocks)

    def of_column(self, row: Expr, column: Expr, blocks: Expr) -> tuple[Expr, Expr]:
        """Return block and element of a position of a row's text."""
        texts = self.tables.buffer.shape[0]
        block = self.tables[inside(self.requests[row], texts), floordiv(column, self.size)]
        return inside(block, blocks), floormod(column, self.size)
