"""The cache of GroupQueryAttention that holds the positions of a window only, and evicts the oldest.

Its contract is in the documentation of the operator of ONNX Runtime 1.32: of `T` positions in total, the first `resident(T)` rows of a
cache of `C` rows are the latest ones in order, whatever calls they came in; the rows behind them are not specified.

Tests: `tests/ir/frontend/onnx/microsoft/test_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.ir.core.expr import Expr, add, const, sub
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import Writer

NOWHERE = 1 << 30
"""The position of a row that holds none: behind all positions."""


@dataclass(frozen=True, slots=True)
class WindowCache:
    """A cache of the latest positions of each batch.

    Attributes:
        before, ends: Number of positions of each batch before and after this call, (batch,) int64.
        capacity: Number of rows of the cache.
        length: Number of new positions of a call, of which those from `ends` on are padding.
        window: Number of positions that a query attends to, at most `capacity`.
    """

    before: Value
    ends: Value
    capacity: Expr
    length: Expr
    window: int

    @property
    def size(self) -> Expr:
        """Rows that queries attend to: those of the old cache, then the new ones."""
        return add(self.capacity, self.length)

    def places(self, w: Writer, length: Expr) -> Value:
        """Return the positions of the new rows, (batch, length)."""
        b = tensor_dims(self.before)[0]
        return w.add(w.reshape(self.before, [b, const(1)]), w.reshape(w.iota(length), [const(1), length]))

    def resident(self, w: Writer, total: Value) -> Value:
        """Return how many of `total` positions the cache holds. total, result: (batch,) int64."""
        evicted = w.size(w.simplify(add(sub(self.capacity, const(self.window)), const(1))))
        over = w.maximum(w.sub(total, w.size(self.capacity)), 0)
        times = w.quotient(w.sub(w.add(over, evicted), 1), evicted)
        return w.sub(total, w.mul(times, evicted))

    def positions(self, w: Writer) -> Value:
        """Return the position of each row that queries attend to, (batch, size) int64, or `NOWHERE`."""
        batch = tensor_dims(self.before)[0]
        column = lambda v: w.reshape(v, [batch, const(1)])
        row = lambda n: w.reshape(w.iota(n), [const(1), n])
        held = column(self.resident(w, self.before))
        old = w.add(w.sub(column(self.before), held), row(self.capacity))
        old = w.where(w.less(row(self.capacity), held), old, NOWHERE)
        new = w.add(column(self.before), row(self.length))
        new = w.where(w.less(new, column(self.ends)), new, NOWHERE)
        return w.concat(1, old, new)

    def evicted(self, w: Writer, rows: Value) -> Value:
        """Return the cache after this call, (batch, heads, capacity, width); rows: of the old cache, then the new ones."""
        batch, heads, _, width = tensor_dims(rows)
        column = lambda v: w.reshape(v, [batch, const(1)])
        place = w.reshape(w.iota(self.capacity), [const(1), self.capacity])
        left = w.sub(column(self.ends), column(self.resident(w, self.ends)))
        position = w.add(left, place)
        known = w.less(position, column(self.ends))
        behind = w.sub(position, column(self.before))
        first = w.sub(column(self.before), column(self.resident(w, self.before)))
        source = w.where(w.less(behind, 0), w.sub(position, first), w.add(behind, w.size(self.capacity)))
        source = w.where(known, source, 0)
        index = w.broadcast_to(
            w.reshape(source, [batch, const(1), self.capacity, const(1)]), [batch, heads, self.capacity, width]
        )
        taken = w.gather_elements(rows, index, 2)
        return w.where(w.reshape(known, [batch, const(1), self.capacity, const(1)]), taken, 0.0)
