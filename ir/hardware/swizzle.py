"""Swizzled rows of shared memory: the vectors of a row rotate by the row's number, against bank conflicts without padding.

The banks hold a line of 128 bytes. Each row of a line or more rotates by one vector more than the row before, up to the
vectors of a line. Shorter rows that share a line rotate alike, and those of the next line by one vector more. So
16-byte vectors in the same column of eight successive rows never conflict, if a row has a power of two of vectors. That
is how `ldmatrix` fetches (PTX ISA, "ldmatrix"). Contiguous vectors of a
row never conflict either. Rotation replaces the usual exclusive or: it avoids the same conflicts, and needs only sums,
quotients and remainders.
"""

from __future__ import annotations

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, ExprLike, expr, floordiv, floormod, maximum, minimum, mul

# Bytes that all banks of shared memory have at once, and that one access has.
LINE_BYTES = 128
ACCESS_BYTES = (4, 8, 16)


def may_swizzle(buffer: Buffer, vector: int) -> bool:
    """Return True if one access may cover `vector` elements of a buffer."""
    return vector * buffer.dtype.bytes in ACCESS_BYTES


def period(vectors: ExprLike, line: int) -> Expr:
    """Return the number of rows after which the rotation repeats. vectors: vectors of a row; line: vectors of a line."""
    return mul(_beside(expr(vectors), line), minimum(expr(vectors), line))


def swizzled(row: Expr, vector: Expr, vectors: ExprLike, line: int) -> Expr:
    """Return the position in its row at which a vector is stored."""
    turn = floordiv(floormod(row, period(vectors, line)), _beside(expr(vectors), line))
    return floormod(vector + turn, expr(vectors))


def _beside(vectors: Expr, line: int) -> Expr:
    """Return the number of rows that share a line."""
    return maximum(floordiv(expr(line), vectors), 1)
