"""Bags of embeddings of torch programs, whose indices are a matrix or a vector with offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.frontend.torch.program import Ref, TorchCall, TorchProgram, TorchSymbol, TorchTensor
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.text.printer import print_text

ROWS, WIDTH, LENGTH = 11, 6, 4


def bags(mode: int, weighed: bool, apart: int = LENGTH) -> IRModule:
    """Bags of `LENGTH` of b times as many indices, which begin `apart`."""
    count: Any = ["mul", LENGTH, "b"]
    places, each = TorchTensor((count,), i64), TorchTensor((count,), f32)
    found: Any = [TorchTensor(("b", WIDTH), f32), *[TorchTensor(("b",), i64)] * 3]
    shares = (Ref("s"),) if weighed else ()
    nodes = (
        TorchCall("n", "aten.sym_size.int", (Ref("i"), 0), {}),
        TorchCall("o", "aten.arange.start_step", (0, Ref("n"), apart), {}, TorchTensor(("b",), i64)),
        TorchCall(
            "e", "aten._embedding_bag.default", (Ref("t"), Ref("i"), Ref("o"), False, mode, False, *shares), {}, found
        ),
        TorchCall("y", "getitem", (Ref("e"), 0), {}, found[0]),
    )
    inputs = [("t", TorchTensor((ROWS, WIDTH), f32)), ("i", places), *([("s", each)] if weighed else [])]
    return import_program(TorchProgram((TorchSymbol("b", 1, 9),), tuple(inputs), {}, {}, nodes, (("y", Ref("y")),)))


@pytest.mark.parametrize("mode, weighed, apart", [(0, False, 4), (1, False, 4), (0, True, 4), (0, False, 3)])
def test_bags_of_one_length_are_sums_of_rows(mode: int, weighed: bool, apart: int) -> None:
    module = bags(mode, weighed, apart)
    assert ("scatter" in print_text(module)) == (apart != LENGTH)
    rng, b = np.random.default_rng(0), 3
    table = rng.standard_normal((ROWS, WIDTH), np.float32)
    places, share = rng.integers(0, ROWS, b * LENGTH), rng.standard_normal(b * LENGTH).astype(np.float32)
    rows = table[places] * (share[:, None] if weighed else 1)
    starts = np.arange(b) * apart
    ends = [*starts[1:], len(places)]
    wanted = [rows[s:e].sum(0) / (e - s if mode else 1) for s, e in zip(starts, ends)]
    found = run_function(module, "main", [table, places, *([share] if weighed else [])])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
