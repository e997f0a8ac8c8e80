"""The permitted values of an input that a tensor function of the model itself uses as an index: inside the indexed dims.

Operators are traced before lowering (`ir/deduce/index_ranges`).

Compiled loops read the nearest element for an index outside (`ir/op/indexing/indices`), which is safe but wrong for the user. So a
built model states the range of each such input, and the runtime refuses a call with other values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Load, as_int, loads
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.deduce.index_ranges import IndexRange
from relax_tune.runtime.program.program import Fill

Range = tuple[int, int]  # [low, high)
Numbers = Mapping[Buffer, int]


def index_range(func: PrimFunc, buffer: Buffer, numbers: Numbers) -> Range | None:
    """Return the values an element of `buffer` may have such that each index made from it is inside its dim.

    None if there is no such index, or none that can be judged: dims are symbols, or indices are computed in other ways.
    numbers: the values of parameters that are constants without dims
    """
    solver = _Solver(buffer, numbers)
    found: Range | None = None
    for block in blocks(func.body):
        for node in loads(block.body.value):
            if node.buffer is buffer:
                continue
            for index, dim in zip(node.indices, node.buffer.shape, strict=True):
                size = as_int(dim)
                allowed = None if size is None else solver.solve(index, 0, size)
                if allowed is not None:
                    found = meet(found or allowed, allowed)
    return found


def meet(a: Range, b: Range) -> Range:
    """Return the values in both ranges."""
    return max(a[0], b[0]), min(a[1], b[1])


def static_range(found: Sequence[IndexRange]) -> Range | None:
    """Return the values in all ranges; None if a size is a symbol or a range is of a column."""
    limits = [(as_int(r.low), as_int(r.high)) for r in found]
    known = [(low, high) for low, high in limits if low is not None and high is not None]
    return reduce(meet, known) if len(known) == len(found) and all(r.every == 1 for r in found) else None


def range_fill(allowed: Range | None) -> Fill:
    """Return the fill of a program's input with values in a range."""
    return Fill() if allowed is None else Fill("integers", allowed[0], allowed[1])


@dataclass(frozen=True, slots=True)
class _Solver:
    """Turns a range of an expression into one of the elements of `buffer` it is made of."""

    buffer: Buffer
    numbers: Numbers

    def solve(self, e: Expr, low: int, high: int) -> Range | None:
        """Return the values of an element for which `low <= e < high`; None if `e` is no simple function of one."""
        if isinstance(e, Load):
            return (low, high) if e.buffer is self.buffer else None
        if not e.op:
            return None
        if e.op == "cast" and e.args[0].dtype.is_int:
            return self.solve(e.args[0], low, high)
        if e.op in ("min", "max"):  # clamps of loops: an index that one would change is out of range
            inner = [a for a in e.args if a.value is None]
            return self.solve(inner[0], low, high) if len(inner) == 1 else None
        if e.op == "add":
            step = self.number(e.args[1])
            return None if step is None else self.solve(e.args[0], low - step, high - step)
        return self.from_the_end(e, low, high) if e.op == "select" else None

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
        """Return the value of a literal or of a constant parameter."""
        return self.numbers.get(e.buffer) if isinstance(e, Load) else as_int(e)
