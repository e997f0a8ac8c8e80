"""The scalar list against Python's own arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import ArtifactError, UserError
from relax_tune.runtime.program.scalars import (
    ARITY,
    INT64_MAX,
    INT64_MIN,
    Opcode,
    ScalarBuilder,
    compile_scalars,
    constant_values,
    evaluate,
    only_slots,
    symbolic_slots,
    verify,
)

ORACLE: dict[Opcode, Callable[..., int]] = {
    Opcode.ADD: operator.add,
    Opcode.SUB: operator.sub,
    Opcode.MUL: operator.mul,
    Opcode.FLOORDIV: operator.floordiv,
    Opcode.FLOORMOD: operator.mod,
    Opcode.MIN: min,
    Opcode.MAX: max,
    Opcode.LT: operator.lt,
    Opcode.LE: operator.le,
    Opcode.EQ: operator.eq,
    Opcode.NE: operator.ne,
    Opcode.AND: lambda a, b: bool(a) and bool(b),
    Opcode.OR: lambda a, b: bool(a) or bool(b),
    Opcode.NOT: operator.not_,
    Opcode.SELECT: lambda a, b, c: b if a else c,
}
NUMBERS = st.one_of(st.integers(-9, 9), st.sampled_from([INT64_MIN, INT64_MAX, 2**31, -(2**31)]))


def oracle(code: list[int], symbols: list[int]) -> list[int] | None:
    """Values by Python's operators on each instruction, or None where one is an error."""
    values: list[int] = []
    for at in range(0, len(code), 4):
        op, operands = Opcode(code[at]), code[at + 1 : at + 4]
        if op is Opcode.CONST:
            value = operands[0]
        elif op is Opcode.SYMBOL:
            value = symbols[operands[0]]
        else:
            try:
                value = int(ORACLE[op](*(values[operand] for operand in operands[: ARITY[op]])))
            except ZeroDivisionError:
                return None
        if not INT64_MIN <= value <= INT64_MAX:
            return None
        values.append(value)
    return values


@st.composite
def codes(draw: st.DrawFn) -> list[int]:
    code: list[int] = []
    for slot in range(draw(st.integers(1, 25))):
        op = draw(st.sampled_from([op for op in Opcode if slot or ARITY[op] == 0]))
        if op is Opcode.CONST:
            operands = [draw(NUMBERS)]
        elif op is Opcode.SYMBOL:
            operands = [draw(st.integers(0, 2))]
        else:
            operands = [draw(st.integers(0, slot - 1)) for _ in range(ARITY[op])]
        code += [int(op), *operands, *[0] * (3 - len(operands))]
    return code


@settings(max_examples=examples(300), deadline=None)
@given(codes(), st.lists(NUMBERS, min_size=3, max_size=3))
def test_evaluate_is_python(code: list[int], symbols: list[int]) -> None:
    wanted = oracle(code, symbols)
    if wanted is None:
        with pytest.raises(UserError, match="slot"):
            evaluate(code, symbols)
    else:
        found = evaluate(code, symbols)
        assert found == wanted
        assert all(type(value) is int for value in found)


@settings(max_examples=examples(200), deadline=None)
@given(codes(), st.lists(NUMBERS, min_size=3, max_size=3))
def test_merge_keeps_values_and_shares_instructions(code: list[int], symbols: list[int]) -> None:
    builder = ScalarBuilder()
    slots = [builder.symbol(index) for index in range(3)]
    mapped = builder.merge(code, slots)
    size = len(builder)
    assert builder.merge(code, slots) == mapped
    assert len(builder) == size, "the same list again adds nothing"
    wanted = oracle(code, symbols)
    if wanted is not None:  # folding may only remove errors of parts no result uses
        values = evaluate(builder.code, symbols)
        assert [values[slot] for slot in mapped] == wanted


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(-3, 20), max_size=24), st.integers(0, 2))
def test_hostile_lists_are_refused_or_evaluate(code: list[int], n_symbols: int) -> None:
    try:
        verify(code, n_symbols)
    except ArtifactError:
        with pytest.raises(ArtifactError):
            compile_scalars(code, n_symbols)
    else:
        wanted = oracle(code, [7] * n_symbols)
        if wanted is not None:
            assert evaluate(code, [7] * n_symbols) == wanted


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ([0, 1, 0], "multiple of 4"),
        ([99, 0, 0, 0], "slot 0.*opcode"),
        ([-1, 0, 0, 0], "opcode"),
        ([1, 1, 0, 0], "symbol"),
        ([0, 1, 0, 0, 2, 0, 1, 0], "slot 1 .ADD.*earlier slot, got 1"),
        ([0, 1, 0, 0, 2, 0, -1, 0], "earlier slot"),
        ([0, 2**63, 0, 0], "int64"),
        ([0, True, 0, 0], "int64"),
        ([0, "__import__('os')", 0, 0], "int64"),
        ([0, 1, 0, 5], "unused"),
    ],
)
def test_verify_names_the_slot(code: list[int], says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        verify(code, 1)
    with pytest.raises(ArtifactError, match=says):
        evaluate(code, [1])


def test_errors_at_evaluation() -> None:
    builder = ScalarBuilder()
    n = builder.symbol(0)
    quotient = builder.op(Opcode.FLOORDIV, builder.const(1), n)
    with pytest.raises(UserError, match=f"slot {quotient}.*zero"):
        evaluate(builder.code, [0])
    builder = ScalarBuilder()
    n = builder.symbol(0)
    square = builder.op(Opcode.MUL, n, n)
    with pytest.raises(UserError, match=f"slot {square}.*int64"):
        evaluate(builder.code, [2**40])
    run = compile_scalars(builder.code, 1)
    for bad in ([], [1, 2], [True], [1.0], [2**63]):
        with pytest.raises(UserError):
            run(bad)  # type: ignore[arg-type]


def test_builder_shares_sorts_and_folds() -> None:
    builder = ScalarBuilder()
    n, two = builder.symbol(0), builder.const(2)
    assert builder.op(Opcode.ADD, n, two) == builder.op(Opcode.ADD, two, n)
    assert builder.op(Opcode.SUB, n, two) != builder.op(Opcode.SUB, two, n)
    assert builder.op(Opcode.MUL, two, two) == builder.const(4)
    assert builder.op(Opcode.NOT, builder.const(4)) == builder.const(0)
    assert builder.op(Opcode.SELECT, builder.const(1), n, two) == n
    zero = builder.const(0)
    assert evaluate(builder.code, [3])
    builder.op(Opcode.FLOORDIV, two, zero)  # stays: an error only when it is evaluated
    with pytest.raises(UserError, match="zero"):
        evaluate(builder.code, [3])
    with pytest.raises(UserError, match="slot below"):
        builder.op(Opcode.ADD, n, 10_000)


def test_long_lists_cross_the_chunks() -> None:
    builder = ScalarBuilder()
    slot, one = builder.symbol(0), builder.const(1)
    for step in range(5000):
        slot = builder.op(Opcode.ADD if step % 3 else Opcode.SUB, slot, one if step % 2 else builder.symbol(0))
    code = list(builder.code)
    assert evaluate(code, [3]) == oracle(code, [3])


def test_symbol_dependence_is_found() -> None:
    builder = ScalarBuilder()
    n, two = builder.symbol(0), builder.const(2)
    product = builder.op(Opcode.MUL, n, two)
    builder.op(Opcode.FLOORDIV, two, n)  # would divide by zero at n = 0
    assert symbolic_slots(builder.code)[:3] == [True, False, True]
    values = constant_values(builder.code, 1)
    assert values[two] == 2 and values[n] is None and values[product] is None


def test_symbol_dependence_on_one_symbol_leaves_out_others() -> None:
    builder = ScalarBuilder()
    n, m = builder.symbol(0), builder.symbol(1)
    twice, total = builder.op(Opcode.ADD, n, n), builder.op(Opcode.ADD, n, m)
    depends = symbolic_slots(builder.code, 1)
    assert [depends[slot] for slot in (n, m, twice, total)] == [False, True, False, True]


@settings(max_examples=examples(60))
@given(st.data())
def test_only_slots_have_the_values_of_the_whole_list(data: st.DataObject) -> None:
    builder = ScalarBuilder()
    slots = [builder.symbol(0), builder.symbol(1), builder.const(3)]
    for _ in range(data.draw(st.integers(0, 12))):
        op = data.draw(st.sampled_from([Opcode.ADD, Opcode.MIN, Opcode.LT, Opcode.NOT, Opcode.SELECT]))
        slots.append(builder.op(op, *(data.draw(st.sampled_from(slots)) for _ in range(ARITY[op]))))
    chosen = data.draw(st.lists(st.sampled_from(slots)))
    short, at = only_slots(builder.code, chosen)
    assert len(short) <= len(builder.code)
    values, whole = evaluate(short, [5, -2]), evaluate(builder.code, [5, -2])
    assert [values[n] for n in at] == [whole[slot] for slot in chosen]
