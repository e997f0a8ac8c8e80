"""Shapes, inputs and interleaved timing of whole programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.console import Console
from tests.support.effort import examples

from relax_tune.errors import UserError
from relax_tune.runtime.program.program import BufferSpec, Program, Symbol
from relax_tune.runtime.program.scalars import ScalarBuilder
from relax_tune.tuner.cli.commands.tune import compare_shapes
from relax_tune.tuner.cli.report.console import rich_table
from relax_tune.tuner.cli.report.latency import MIN_ROUNDS, compare_latency, latency_table, parse_shape, sample_inputs

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True)


def program(*symbols: Symbol) -> Program:
    """Inputs `ids` (each symbol once, int64) and `x` (each symbol once, 3) float32; no calls."""
    scalars = ScalarBuilder()
    slots = tuple(scalars.symbol(i) for i in range(len(symbols)))
    three = scalars.const(3)
    buffers = (
        BufferSpec("ids", "int64", slots, "input"),
        BufferSpec("x", "float32", (*slots, three), "input"),
    )
    return Program(symbols, scalars.code, (), buffers, (), (), (), (), (0, 1), ())


@given(values=st.dictionaries(NAMES, st.integers(0, 10**6), min_size=1, max_size=4))
@settings(max_examples=examples(50), deadline=None)
def test_shapes_are_read_back(values: dict[str, int]) -> None:
    assert parse_shape(",".join(f"{k}={v}" for k, v in values.items())) == values
    assert parse_shape(", ".join(f"{k}={v}" for k, v in values.items())) == values


@pytest.mark.parametrize("text", ["", "n", "n=", "=3", "n=1,n=2", "n=-1", "n=1;b=2", "n=1.5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="b=1,n=8"):
        parse_shape(text)


def test_inputs_fit_the_program() -> None:
    made = program(Symbol("b", 1, 4), Symbol("n", 1, 9))
    ids, x = sample_inputs(made, {"b": 2, "n": 5})
    assert (ids.shape, ids.dtype, x.shape, x.dtype) == ((2, 5), np.int64, (2, 5, 3), np.float32)
    assert (ids == 1).all() and np.isfinite(x).all() and x.std() > 0
    for wrong in ({"b": 2}, {"b": 2, "n": 10}, {"b": 0, "n": 1}, {"b": 1, "n": 1, "m": 1}):
        with pytest.raises(UserError):
            sample_inputs(made, wrong)


def test_contenders_take_turns_and_get_the_same_inputs() -> None:
    made = program(Symbol("n", 1, 64))
    calls: list[tuple[str, tuple[int, ...]]] = []

    def contender(name: str) -> Any:
        def run(inputs: Sequence[NDArray[Any]]) -> None:
            calls.append((name, inputs[0].shape))

        return made, run

    rows = compare_latency({"p": contender("p"), "q": contender("q")}, [{"n": 3}, {"n": 64}], 4)
    first = [name for name, shape in calls if shape == (3,)]
    assert first == ["p", "q", *"pq", *"qp", *"pq", *"qp"]  # untimed, then four rounds
    assert [r.shape for r in rows] == [{"n": 3}, {"n": 64}]
    assert all(len(samples) == 4 for row in rows for samples in row.samples_secs.values())
    assert rows[0].to_json()["median_secs"] == rows[0].median_secs


def test_a_budget_ends_rounds_but_not_below_three() -> None:
    made = program(Symbol("n", 1, 64))
    (row,) = compare_latency({"p": (made, lambda inputs: None)}, [{"n": 1}], 50, budget_secs=0.0)
    assert len(row.samples_secs["p"]) == MIN_ROUNDS


def test_a_table_compares_with_the_first() -> None:
    made = program(Symbol("n", 1, 64))
    rows = compare_latency({"mine": (made, lambda i: None), "other": (made, lambda i: None)}, [{"n": 7}], 3)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(rich_table(latency_table(rows, "Latency")))
    assert "n=7" in captured.get() and "mine is" in captured.get()


def test_builds_are_compared_along_the_widest_symbol() -> None:
    both = program(Symbol("b", 1, 8), Symbol("n", 1, 512))
    assert compare_shapes(both) == [{"b": 1, "n": n} for n in (8, 64, 256, 512)]
    assert compare_shapes(program(Symbol("b", 2, 8), Symbol("n", 1, 100))) == [{"b": 2, "n": 8}, {"b": 2, "n": 64}]
    assert compare_shapes(program(Symbol("n", 0, 5))) == [{"n": 1}, {"n": 5}]
    assert compare_shapes(program(Symbol("n", 0, None))) == [{"n": n} for n in (8, 64, 256, 512)]
    assert compare_shapes(program()) == [{}]
