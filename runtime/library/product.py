"""Scalars of routines for strided matrix products: `C = op(A) op(B)`, row-major, op is transposition.

op(A) is (m, k), op(B) (k, n), C (m, n); `trans_*` is non-zero where an operand is stored transposed; `ld*` are the row lengths in
memory, in elements; in the batched form `stride_*` is the distance between matrices, in elements. Buffers: A, B, C.

Tests: `tests/runtime/library/test_library.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_tune.errors import ArtifactError, MeasureError

PLAIN = ("m", "n", "k", "trans_a", "trans_b", "lda", "ldb", "ldc")
BATCHED = ("batch", *PLAIN, "stride_a", "stride_b", "stride_c")
# BLAS interfaces take sizes and leading dimensions as 32-bit integers.
INT32_MAX = 2**31 - 1
_STRIDE_MAX = 2**40
_FLOAT = 4


def product_sizes(
    library: str, routines: Mapping[str, Sequence[str]], routine: str, buffers: Sequence[Any], scalars: Sequence[int]
) -> dict[str, int]:
    """Return the sizes of a product as `named_sizes` does. A wrong number of buffers raises ArtifactError too."""
    names = routines.get(routine)
    if names is not None and (len(buffers) != 3 or len(scalars) != len(names)):
        raise ArtifactError(
            f"{routine}: expected 3 buffers and the scalars {', '.join(names)}, "
            f"got {len(buffers)} buffers and {len(scalars)} scalars"
        )
    return named_sizes(library, routines, routine, scalars)


def named_sizes(
    library: str, routines: Mapping[str, Sequence[str]], routine: str, scalars: Sequence[int]
) -> dict[str, int]:
    """Return the scalars of a routine by name; a routine without batches gets the scalars of a batch of one.

    Raises: ArtifactError for an unknown routine or a wrong number of scalars; MeasureError for sizes that are negative or exceed
    32 bits."""
    names = routines.get(routine)
    if names is None:
        raise ArtifactError(f"{library}: expected one of {', '.join(routines)}, got {routine}")
    if len(scalars) != len(names):
        raise ArtifactError(f"{routine}: expected the scalars {', '.join(names)}, got {len(scalars)} scalars")
    sizes = {"batch": 1, "stride_a": 0, "stride_b": 0, "stride_c": 0}
    sizes |= zip(names, (int(value) for value in scalars), strict=True)
    for name, value in sizes.items():
        limit = _STRIDE_MAX if name.startswith("stride") else INT32_MAX
        if not 0 <= value <= limit:
            raise MeasureError(f"{routine}: scalar {name}: expected 0..{limit}, got {value}")
    return sizes


def product_bytes(
    routine: str, sizes: Mapping[str, int], widths: tuple[int, int, int] = (_FLOAT, _FLOAT, _FLOAT)
) -> tuple[int, int, int]:
    """Return the bytes that A, B and C must have. widths: bytes of an element of each. Raises MeasureError for rows that overlap."""
    needs = []
    for which, width, rows, columns, transposed in (
        ("a", widths[0], sizes["m"], sizes["k"], sizes["trans_a"]),
        ("b", widths[1], sizes["k"], sizes["n"], sizes["trans_b"]),
        ("c", widths[2], sizes["m"], sizes["n"], 0),
    ):
        if transposed:
            rows, columns = columns, rows
        if rows == 0 or columns == 0 or sizes["batch"] == 0:
            needs.append(0)
            continue
        row_length = sizes[f"ld{which}"]
        if row_length < columns:
            raise MeasureError(f"{routine}: scalar ld{which}: expected at least {columns}, got {row_length}")
        needs.append(((sizes["batch"] - 1) * sizes[f"stride_{which}"] + (rows - 1) * row_length + columns) * width)
    return needs[0], needs[1], needs[2]
