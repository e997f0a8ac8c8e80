"""Ranges of parameters that a tensor function of the model itself uses as indices.

Indices of operators are traced on the graph (`ir/deduce/index_ranges`). A function that a user wrote
either clamps its indices deliberately, or an element outside the dim is an error.

Tests: `tests/tuner/emit/test_moved_indices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import TRUE, Expr, Load, as_int
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks

Range = tuple[int, int]
"""[low, high)."""
Numbers = Mapping[Buffer, int]


def loaded_ranges(func: PrimFunc, numbers: Numbers) -> Iterator[tuple[int, Range]]:
    """Iterate over the inputs that are read whole and whose elements index dims of known size, each with its range.

    Args:
        numbers: the values of inputs that are constants without dims.
    """
    for block in blocks(func.body):
        for node in _always_loaded(block.body.value):
            for index, dim in zip(node.indices, node.buffer.shape, strict=True):
                size = as_int(dim)
                for position, buffer in enumerate(func.input_buffers):
                    if size is not None and buffer is not node.buffer:
                        limits = _Solver(buffer, numbers, block).solve(index, 0, size)
                        if limits is not None:
                            yield position, limits


def _always_loaded(e: Expr) -> Iterator[Load]:
    """Iterate over the reads that no condition guards."""
    if isinstance(e, Load):
        yield e
        parts: tuple[Expr, ...] = e.indices
    else:
        # The sides of a select are evaluated only if chosen, and a condition around an access is how a function
        # clamps its indices.
        parts = e.args[:1] if e.op == "select" else e.args
    for part in parts:
        yield from _always_loaded(part)


@dataclass(frozen=True, slots=True)
class _Solver:
    """Turns a range of an expression into a range of the elements of `buffer` that it reads."""

    buffer: Buffer
    numbers: Numbers
    block: Block

    def solve(self, e: Expr, low: int, high: int) -> Range | None:
        """Return the values of an element for which `low <= e < high`; None if `e` is no simple function of a single element."""
        if isinstance(e, Load):
            return (low, high) if e.buffer is self.buffer and self.whole(e) else None
        if not e.op:
            return None
        if e.op == "cast" and e.args[0].dtype.is_int:
            return self.solve(e.args[0], low, high)
        if e.op == "add":
            step = self.number(e.args[1])
            return None if step is None else self.solve(e.args[0], low - step, high - step)
        return self.from_the_end(e, low, high) if e.op == "select" else None

    def whole(self, e: Load) -> bool:
        """Return whether a block loads every element of the buffer."""
        extents: dict[Expr, Expr] = {i.var: i.extent for i in self.block.iters}
        distinct = self.block.predicate is TRUE and len(set(e.indices)) == len(e.indices)
        return distinct and all(extents.get(i) is d for i, d in zip(e.indices, e.buffer.shape, strict=True))

    def from_the_end(self, e: Expr, low: int, high: int) -> Range | None:
        """Solve `x + step if x < 0 else x`, which makes negative indices count from the end."""
        cond, moved, plain = e.args
        if not (cond.op == "lt" and cond.args[0] is plain and self.number(cond.args[1]) == 0):
            return None
        if not (moved.op == "add" and moved.args[0] is plain):
            return None
        step = self.number(moved.args[1])
        return self.solve(plain, low - step, high) if step is not None and low == 0 and step <= high else None

    def number(self, e: Expr) -> int | None:
        """Return the value of a literal or of a constant input."""
        return self.numbers.get(e.buffer) if isinstance(e, Load) else as_int(e)
