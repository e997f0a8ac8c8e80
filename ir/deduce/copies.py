"""Copies of a computed float that are compared with one another, which must be equal to the last bit.

Compilers may contract a product and a sum to one rounding in some copies of the code and not in others, and vectorised functions round
differently from scalar ones. So an element computed at two places may be greater than itself: ranks are then no permutation, and no
element equals the maximum. Such values are computed once and stored.

Tests: `tests/ir/codegen/test_repeated_operands.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Const, Expr, Load, loads, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.plain_loops import block_loads, plain_blocks
from relax_tune.ir.core.scalar_ops import MATH, SCALAR_OPS
from relax_tune.ir.core.stmt import Block

ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
COMPARISONS = frozenset(o.name for o in SCALAR_OPS.values() if o.kind == "comparison")


def rounds(block: Block) -> bool:
    """Return whether a block computes floats with rounding."""
    return any(_is_float(n) and (n.op in ARITHMETIC or n.op in MATH) for n in postorder((block.body.value,)))


def contracts(value: Expr) -> bool:
    """Return whether two copies of an expression may be rounded differently: a product in a sum, or a function."""
    return any(
        _is_float(n) and (n.op in MATH or (n.op in ("add", "sub") and any(c.op == "mul" for c in n.children)))
        for n in postorder((value,))
    )


def compares_copies(buffer: Buffer, readers: Iterable[Block], inlined: Callable[[Expr], Expr] | None = None) -> bool:
    """Return whether blocks would compare copies of elements of a buffer, if these were computed where they are read.

    A comparison reads the buffer at two places that may coincide, or together with the result of another reader, such as the maximum.

    Args:
        inlined: computes the elements; then only comparisons of values that may be rounded differently count.
    """
    if not buffer.dtype.is_float:
        return False
    readers = tuple(b for b in readers if any(x.buffer is buffer for x in block_loads(b)))
    # A reader's result (the row maximum) holds a copy of an element, so comparing an element with it compares two
    # copies.
    writers = {b.body.buffer: b for b in readers}
    for b in readers:
        for c in (n for n in postorder(b.own_exprs) if n.op in COMPARISONS):
            read = [x for x in loads(*c.children) if x.buffer is buffer]
            reads_others = any(writers.get(x.buffer, b) is not b for x in loads(*c.children))
            # Two different elements may be compared freely: rounding one of them differently gives another result,
            # but no contradiction.
            if not any(_may_meet(x, y) for x, y in combinations(read, 2)) and not (read and reads_others):
                continue
            sides = (e for e in c.children if any(x.buffer is buffer for x in loads(e)))
            if any(inlined is None or contracts(inlined(e)) for e in sides):
                return True
    return False


def _may_meet(x: Load, y: Load) -> bool:
    """Return whether two reads may touch one element in some iterations."""
    return not any(isinstance(a, Const) and isinstance(b, Const) and a is not b for a, b in zip(x.indices, y.indices))


def compares_copies_of(func: PrimFunc, buffer: Buffer) -> bool:
    """Return whether an unscheduled function compares copies of an input with one another."""
    return compares_copies(buffer, plain_blocks(func) or ())


def _is_float(e: Expr) -> bool:
    return e.dtype.is_float and not isinstance(e, Load)
