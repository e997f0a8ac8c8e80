"""Positions in ONNX sequences, against Python's lists."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import model

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function

CONCATENATED = "y = ConcatFromSequence<axis = 0>(t)"


def result(names: list[str], text: str, position: int) -> list[float]:
    """Return the result of nodes over a sequence `s` of the named inputs, which hold 0, 1 ..., and the input `more`, which holds 9."""
    inputs = ", ".join(f"float[1] {n}" for n in (*names, "more"))
    made = f"s = SequenceConstruct({', '.join(names)})" if names else "s = SequenceEmpty()"
    module = load_onnx(model(f"({inputs}) => (float[q] y) <int64 p = {{{position}}}> {{ {made}\n {text} }}"))
    values = [np.full(1, v, np.float32) for v in (*range(len(names)), 9)]
    return list(np.asarray(run_function(module, "main", values)).tolist())


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_sequence_insert_counts_negative_positions_from_the_back(count: int) -> None:
    names, text = [f"x{k}" for k in range(count)], f"t = SequenceInsert(s, more, p)\n {CONCATENATED}"
    for position in range(-count, count + 1):
        wanted = [float(k) for k in range(count)]
        wanted.insert(position, 9.0)
        assert result(names, text, position) == wanted
    for position in (-count - 1, count + 1):
        with pytest.raises(ParseError, match="SequenceInsert"):
            result(names, text, position)


@pytest.mark.parametrize("count", [2, 4])
def test_sequence_erase_counts_negative_positions_from_the_back(count: int) -> None:
    names, text = [f"x{k}" for k in range(count)], f"t = SequenceErase(s, p)\n {CONCATENATED}"
    for position in range(-count, count):
        wanted = [float(k) for k in range(count)]
        del wanted[position]
        assert result(names, text, position) == wanted
    for position in (-count - 1, count):
        with pytest.raises(ParseError, match="SequenceErase"):
            result(names, text, position)


@pytest.mark.parametrize("count", [1, 3])
def test_sequence_at_counts_negative_positions_from_the_back(count: int) -> None:
    names, text = [f"x{k}" for k in range(count)], "y = SequenceAt(s, p)"
    for position in range(-count, count):
        assert result(names, text, position) == [float(range(count)[position])]
    for position in (-count - 1, count):
        with pytest.raises(ParseError, match="SequenceAt"):
            result(names, text, position)


def test_inserted_tensors_are_read_at_negative_positions() -> None:
    text = "t = SequenceInsert(s, more, p)\n u = SequenceInsert(t, more, p)\n y = SequenceAt(u, p)"
    assert result(["x0", "x1"], text, -1) == [1.0]
