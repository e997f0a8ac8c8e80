"""Rows of shared memory whose vectors go round by the number of the row, so that what several rows have in the same place lies in
different banks although nothing lies between the rows.

Memory has a line of 128 bytes in its banks at once. Rows of a line or more begin one vector further each, up to as many as a line has; of
shorter ones those that share a line begin alike, and the next line's one vector further. So vectors of 16 bytes in the same place of
eight rows that follow one another never meet, if rows are a power of two of vectors: that is how a warp fetches matrices. Within a
row vectors that lie side by side never meet either. It is a rotation, rather than the exclusive or that is usual, because
integers of kernels have no bits: the same places are free, and all of this is sums, quotients and remainders.
"""

from __future__ import annotations

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, ExprLike, expr, floordiv, floormod, maximum, minimum, mul

# Bytes that all banks of shared memory have at once, and that one access has.
LINE_BYTES = 128
ACCESS_BYTES = (4, 8, 16)


def may_swizzle(buffer: Buffer, vector: int) -> bool:
    """Whether so many elements are what one access may have."""
    return vector * buffer.dtype.bytes in ACCESS_BYTES


def period(vectors: ExprLike, line: int) -> Expr:
    """After how many rows of so many vectors, of which a line has `line`, all is as before."""
    return mul(_beside(expr(vectors), line), minimum(expr(vectors), line))


def swizzled(row: Expr, vector: Expr, vectors: ExprLike, line: int) -> Expr:
    """Which of its row's vectors a vector is stored as."""
    turn = floordiv(floormod(row, period(vectors, line)), _beside(expr(vectors), line))
    return floormod(vector + turn, expr(vectors))


def _beside(vectors: Expr, line: int) -> Expr:
    """Rows that share a line."""
    return maximum(floordiv(expr(line), vectors), 1)
