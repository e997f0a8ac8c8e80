"""The cache of GroupQueryAttention that holds the positions of a window only, and evicts the oldest.

Its contract is in the documentation of the operator of ONNX Runtime 1.32: of `T` positions in total, the first `resident(T)` rows of a
cache of `C` rows are the latest ones in order, in any division into calls; the rows behind them are not specified.

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


def _column(w: Writer, value: Value) -> Value:
    return w.reshape(value, [*tensor_dims(value), const(1)])


def _row(w: Writer, size: Expr) -> Value:
    return w.reshape(w.iota(size), [const(1), size])


@dataclass(frozen=True, slots=True)
class WindowCache:
    """A cache of the latest positions of each batch.

    Attributes:
        before, ends: Number of positions of each batch before and after this call, (batch,) int64.
        capacity: Number of rows of the cache.
        length: Number of new positions of a call; the ones from `ends` on are padding.
        window: Number of positions that a query attends to, at most `capacity`.
    """

    before: Value
    ends: Value
    capacity: Expr
    length: Expr
    window: int

    def places(self, w: Writer, length: Expr) -> Value:
        """Return the positions of the new rows, (batch, length)."""
        return w.add(_column(w, self.before), _row(w, length))

    def resident(self, w: Writer, total: Value) -> Value:
        """Return how many of `total` positions the cache holds. total, result: (batch,) int64."""
        evicted = w.size(w.simplify(add(sub(self.capacity, const(self.window)), const(1))))
        over = w.maximum(w.sub(total, w.size(self.capacity)), 0)
        times = w.quotient(w.sub(w.add(over, evicted), 1), evicted)
        return w.sub(total, w.mul(times, evicted))

    def positions(self, w: Writer) -> Value:
        """Return the position of each row that queries attend to, in the old cache and then in the new rows, or `NOWHERE`.

        Result: (batch, capacity + length) int64.
        """
        filled = _column(w, self.resident(w, self.before))
        old = w.add(w.sub(_column(w, self.before), filled), _row(w, self.capacity))
        old = w.where(w.less(_row(w, self.capacity), filled), old, NOWHERE)
        new = w.add(_column(w, self.before), _row(w, self.length))
        new = w.where(w.less(new, _column(w, self.ends)), new, NOWHERE)
        return w.concat(1, old, new)

    def evicted(self, w: Writer, rows: Value) -> Value:
        """Return the cache after this call, (batch, heads, capacity, width); rows: of the old cache, then the new ones."""
        batch, heads, _, width = tensor_dims(rows)
        place = _row(w, self.capacity)
        left = w.sub(_column(w, self.ends), _column(w, self.resident(w, self.ends)))
        position = w.add(left, place)
        known = w.less(position, _column(w, self.ends))
        behind = w.sub(position, _column(w, self.before))
        first = w.sub(_column(w, self.before), _column(w, self.resident(w, self.before)))
        source = w.where(w.less(behind, 0), w.sub(position, first), w.add(behind, w.size(self.capacity)))
        source = w.where(known, source, 0)
        index = w.broadcast_to(
            w.reshape(source, [batch, const(1), self.capacity, const(1)]), [batch, heads, self.capacity, width]
        )
        taken = w.gather_elements(rows, index, 2)
        return w.where(w.reshape(known, [batch, const(1), self.capacity, const(1)]), taken, 0.0)
