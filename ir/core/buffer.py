"""Buffers: the arrays tensor functions read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Expr

Scope = Literal["global", "shared", "warp", "local"]


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A row-major array; identity, the name is a hint unique within a function.

    scope: `global` device memory, `shared` by a work-group, `local` to one thread (registers or its stack). `warp`: as `shared`, of
    items of a warp that the last index numbers, so that it can be in their registers (`ir/codegen/lower/warp_shuffles`).
    row_alignment: (factor, offset) of a local or shared one: once lowering has shrunk it, a row (the last dimension) takes up the next
    multiple of `factor` elements and `offset` more. Meaning does not change.
    swizzle: elements of a vector of a shared one whose rows are whole vectors, if these go round in their row by the row's number
    (`ir/hardware/swizzle`). Meaning does not change.
    """

    name: str
    shape: tuple[Expr, ...]
    dtype: DType
    scope: Scope = "global"
    row_alignment: tuple[Expr, int] | None = None
    swizzle: int = 0

    def __repr__(self) -> str:
        return f"{self.name}: ({', '.join(map(repr, self.shape))}) {self.dtype}"
