"""Shapes as people read them."""

from __future__ import annotations

import numpy as np
import pytest

from relax_tune.runtime.program.scalars import Opcode
from relax_tune.runtime.signature import TensorSpec, dim_of


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ([(Opcode.CONST, 7, 0, 0)], 7),
        ([(Opcode.SYMBOL, 1, 0, 0)], "n"),
        ([(Opcode.SYMBOL, 0, 0, 0), (Opcode.SYMBOL, 1, 0, 0), (Opcode.MUL, 0, 1, 0)], "b*n"),
        ([(Opcode.SYMBOL, 0, 0, 0), (Opcode.SYMBOL, 1, 0, 0), (Opcode.MUL, 0, 1, 0), (Opcode.ADD, 2, 1, 0)], "b*n + n"),
        (
            [(Opcode.SYMBOL, 0, 0, 0), (Opcode.CONST, 3, 0, 0), (Opcode.ADD, 0, 1, 0), (Opcode.MUL, 2, 0, 0)],
            "(b + 3)*b",
        ),
        (
            [(Opcode.SYMBOL, 0, 0, 0), (Opcode.CONST, 3, 0, 0), (Opcode.SUB, 0, 1, 0), (Opcode.SUB, 1, 2, 0)],
            "3 - (b - 3)",
        ),
        ([(Opcode.SYMBOL, 0, 0, 0), (Opcode.CONST, -3, 0, 0), (Opcode.MAX, 0, 1, 0)], "max(b, -3)"),
        (
            [(Opcode.SYMBOL, 0, 0, 0), (Opcode.CONST, 3, 0, 0), (Opcode.LT, 0, 1, 0), (Opcode.SELECT, 2, 0, 1)],
            "select(b < 3, b, 3)",
        ),
        ([(Opcode.SYMBOL, 0, 0, 0), *((Opcode.MUL, i, i, 0) for i in range(20))], None),
    ],
)
def test_dims(code: list[tuple[int, ...]], wanted: int | str | None) -> None:
    found = dim_of([int(x) for row in code for x in row], len(code) - 1, ["b", "n"])
    if wanted is None:  # deep shared expressions are cut, not written out
        assert isinstance(found, str) and "..." in found and len(found) < 1000
    else:
        assert found == wanted


def test_specs_print() -> None:
    assert str(TensorSpec("x", np.dtype("float32"), ("n", 4))) == "x: float32 (n, 4)"
    assert str(TensorSpec("x", np.dtype("int64"), ("n",))) == "x: int64 (n,)"
    assert str(TensorSpec("x", np.dtype("int64"), ())) == "x: int64 ()"
