"""Buffers: the arrays that tensor functions read and write.

Tests: `tests/ir/core/test_stmt.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Expr

Scope = Literal["global", "shared", "warp", "local"]


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A row-major array, compared by identity; the name is a hint, unique within a function.

    Attributes:
        scope: `global` device memory, `shared` by a work-group, `local` to one thread (registers or its stack). A `warp` buffer is
            shared by a warp; its last index is the work-item, so that it can live in registers (`ir/codegen/lower/warp_shuffles`).
        row_alignment: (factor, offset) of a local or shared buffer. Lowering pads its rows (the last dimension) to a multiple of
            `factor` elements plus `offset`. Does not change results.
        swizzle: elements of a vector if the vectors of a shared buffer's rows rotate by the row's number (`ir/hardware/swizzle`), else
            0. Does not change results.
    """

    name: str
    shape: tuple[Expr, ...]
    dtype: DType
    scope: Scope = "global"
    row_alignment: tuple[Expr, int] | None = None
    swizzle: int = 0

    def __repr__(self) -> str:
        return f"{self.name}: ({', '.join(map(repr, self.shape))}) {self.dtype}"
