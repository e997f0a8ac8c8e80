"""Swizzled rows of shared memory: the vectors of a row are rotated by the row's number, which avoids bank conflicts without padding.

One access of all banks covers a line of 128 bytes. Each row of at least a line is rotated by one vector more than the row before, up to
the vectors of a line. Shorter rows that share a line are rotated equally, and rows of the next line by one vector more. Therefore 16-byte
vectors in the same column of eight successive rows, which `ldmatrix` fetches at once (PTX ISA, "ldmatrix"), never conflict if the number
of vectors in a row is a power of two. Contiguous vectors of a row never conflict either. Rotation replaces the usual exclusive or: it
avoids the same conflicts, and the index arithmetic can express it by sums, quotients and remainders.

Tests: `tests/schedules/primitives/memory/test_layouts.py`.
"""

from __future__ import annotations

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, ExprLike, expr, floordiv, floormod, maximum, minimum, mul

# Bytes that all banks of shared memory deliver at once.
LINE_BYTES = 128
# Widths of one access.
ACCESS_BYTES = (4, 8, 16)


def may_swizzle(buffer: Buffer, vector: int) -> bool:
    """Return whether one access can cover `vector` elements of a buffer."""
    return vector * buffer.dtype.bytes in ACCESS_BYTES


def period(vectors: ExprLike, line: int) -> Expr:
    """Return the number of rows after which the rotation repeats.

    Args:
        vectors: Vectors in a row.
        line: Vectors in a line.
    """
    return mul(_rows_per_line(expr(vectors), line), minimum(expr(vectors), line))


def swizzled(row: Expr, vector: Expr, vectors: ExprLike, line: int) -> Expr:
    """Return the position in its row at which a vector is stored."""
    turn = floordiv(floormod(row, period(vectors, line)), _rows_per_line(expr(vectors), line))
    return floormod(vector + turn, expr(vectors))


def _rows_per_line(vectors: Expr, line: int) -> Expr:
    """Return the number of rows that share a line."""
    return maximum(floordiv(expr(line), vectors), 1)
