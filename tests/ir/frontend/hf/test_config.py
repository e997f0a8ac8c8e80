"""Fields of configurations and bounds of symbols, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.hf.config import BATCH, ConfigFields, SymbolRange, symbol_bounds

SYMBOLS = {"b": BATCH, "n": SymbolRange("positions", 1, 64, 16), "m": SymbolRange("past positions", 0, 63)}


def test_bounds_of_symbols_default_to_the_range_of_the_model() -> None:
    assert symbol_bounds(SYMBOLS, None) == {"b": (1, None), "n": (1, 16), "m": (1, 63)}
    assert symbol_bounds(SYMBOLS, {"m": (0, 5), "b": (2, 2)}) == {"b": (2, 2), "n": (1, 16), "m": (0, 5)}
    assert symbol_bounds({"n": SymbolRange("samples", 11)}, None) == {"n": (11, None)}


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"n": (0, 4)}, "bound of n: expected at least 1 positions, got 0"),
        ({"n": (1, 65)}, "bound of n: expected at most 64 .*got 65"),
        ({"k": (1, 2)}, r"symbols b .batch., n .positions. and m .past positions., got k"),
    ],
)
def test_bounds_outside_the_range_of_the_model_are_refused(bounds: dict[str, tuple[int, int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        symbol_bounds(SYMBOLS, bounds)


@pytest.mark.parametrize(
    ("value", "read", "result"),
    [
        (None, lambda c: c.whole("k", 7), 7),
        (8, lambda c: c.pair("k", 7), (8, 8)),
        ([8, 9], lambda c: c.pair("k", 7), (8, 9)),
        ([1, 0], lambda c: c.wholes("k", (), least=0), (1, 0)),
        (0.5, lambda c: c.number("k", None, 0, 1, "a number in [0, 1)"), 0.5),
        ("b", lambda c: c.chosen("k", "a", ("a", "b")), "b"),
    ],
)
def test_field_is_read(value: object, read: Any, result: object) -> None:
    assert read(ConfigFields({"k": value}, "config.json")) == result


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (0, lambda c: c.whole("k")),
        (True, lambda c: c.whole("k")),
        (2**31, lambda c: c.whole("k")),
        ([1], lambda c: c.wholes("k", (), 2)),
        (1.0, lambda c: c.number("k", None, 0, 1, "a number in [0, 1)")),
        (1, lambda c: c.truth("k", True)),
        (["a"], lambda c: c.chosen("k", "a", ("a", "b"))),
        (1, lambda c: c.only("k", 2)),
        (4097, lambda c: c.layers("k")),
    ],
)
def test_field_of_another_value_is_refused_by_name(value: object, read: Any) -> None:
    with pytest.raises(ParseError, match=r"config.json: k: expected .*got"):
        read(ConfigFields({"k": value}, "config.json"))
