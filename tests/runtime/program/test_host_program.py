"""Host programs as text, verified, and executed by the machine; Python stands in for their subgraphs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from relax_tune.errors import ArtifactError, UserError
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.op.shapes import ShapeOperator
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.host_operators import HOST_OPERATORS
from relax_tune.runtime.program.host_program import (
    Apply,
    Branch,
    CallHostProgram,
    CallHostRoutine,
    CallSubgraph,
    CheckValue,
    Compute,
    GetItem,
    HostProgram,
    Instruction,
    LoadWeight,
    Move,
    Number,
    Pack,
    Refer,
    Require,
    Value,
    host_programs_from_json,
    parts_of,
    verify_host_programs,
)
from relax_tune.runtime.program.program import BufferSpec, Program, Symbol
from relax_tune.runtime.program.scalars import Opcode, ScalarBuilder
from relax_tune.runtime.vm.machine import MAX_DEPTH, VirtualMachine

Array = np.ndarray[Any, Any]


class Doubling:
    """Stands in for a part: gives its argument twice as large, and notes the symbols it is given."""

    def __init__(self) -> None:
        self.symbols: list[Sequence[int]] = []

    def run(
        self, arrays: Sequence[Array], symbols: Sequence[int], in_place: bool = False, pool: None = None
    ) -> list[Array]:
        self.symbols.append(symbols)
        return [arrays[0] * 2]


def part() -> Program:
    b = ScalarBuilder()
    buffers = (BufferSpec("x", "float32", (b.symbol(0),), "input"), BufferSpec("y", "float32", (0,), "output"))
    return Program((Symbol("n"),), b.code, (), buffers, (), (), (), (), (0,), (1,), "double")


def minus_one(symbol: int, into: tuple[int, int]) -> Compute:
    """(symbol - 1, symbol <= 0)."""
    b = ScalarBuilder()
    slots = (b.op(Opcode.SUB, b.symbol(0), b.const(1)), b.op(Opcode.LE, b.symbol(0), b.const(0)))
    return Compute(b.code, (symbol,), slots, ("int64", "bool"), into)


X, K = Value("x", "tensor", "Tensor((n,), f32)", "float32", ("n",)), Value("k", "scalar", "Prim(i64, k)")


def match(value: int, want: Any, dtype: str | None, count: int | None, into: tuple[int, ...], name: str) -> CheckValue:
    return CheckValue(value, want, dtype, count, (), into, f"parameter {name}", f"something as {name}")


def repeat(last: bool) -> HostProgram:
    """k times: x = double(x), then a host routine `seen`; by a call in the last place, or one that is added to."""
    start: tuple[Instruction, ...] = (
        match(0, "tensor", "float32", 1, (2,), "x"),
        match(1, "scalar", "int64", None, (3,), "k"),
        minus_one(3, (4, 5)),
        Branch(5, 1, 2, "if k <= 0:"),
    )
    again: tuple[Instruction, ...] = (
        CallSubgraph("double", (0,), (2,), (7,)),
        CallHostRoutine("seen", (7, 4), 8),
        CallHostProgram("repeat", None, (7, 4), 9),
        Move(9, 6) if last else Apply("unique", (9,), 6),
    )
    blocks = (start, (Move(0, 6),), again)
    return HostProgram("repeat", (X, K), (replace(X, name="y"),), 10, blocks, 6)


def other() -> HostProgram:
    """Everything else: a function value, a weight, tuples, a shape that is read, a check."""
    b = ScalarBuilder()
    block: tuple[Instruction, ...] = (
        LoadWeight("w", "float32", (2, 3), 1),
        Compute((int(Opcode.CONST), 3, 0, 0), (), (0,), ("int64",), (2,)),
        Pack((2, 2), 3),
        Apply("shape_of", (1,), 4),
        CheckValue(4, "shape", None, 2, (), (5, 6), "the shape", "Shape([a, b])", "here"),
        Refer("repeat", 7),
        CheckValue(7, "function", None, None, ("repeat",), (), "the function", "Callable"),
        CheckValue(0, "tuple", None, 2, (), (), "parameter t", "Tuple(...)"),
        GetItem(0, 0, 8),
        GetItem(0, 1, 9),
        CallHostProgram(None, 7, (8, 9), 10),
        Compute((*_two(b), int(Opcode.EQ), 0, 1, 0), (5, 9), (2,), ("bool",), (11,)),
        Require(11, "expected as many rows as rounds, got {0} and {1}", (5, 9)),
        Number(0.5, "float16", 13),
        Pack((10, 3, 9, 1, 7, 13), 12),
    )
    results = tuple(Value(f"r{i}", None, "Object", path=(i,)) for i in range(6))
    return HostProgram("other", (Value("t", "tuple", "Tuple"),), results, 14, (block,), 12)


def _two(b: ScalarBuilder) -> tuple[int, ...]:
    b.symbol(0), b.symbol(1)
    return b.code


HOST_PROGRAMS = (other(), repeat(True))


def machine(host_programs: Sequence[HostProgram] = HOST_PROGRAMS) -> VirtualMachine:
    verify_host_programs(host_programs, [part()])
    weights = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    return VirtualMachine(host_programs, {"double": cast(Executor, Doubling())}, weights)


def test_instructions_match_definition() -> None:
    seen: list[Any] = []
    m = machine()
    hosts = {"seen": lambda x, k: seen.append((x.copy(), k))}
    x = np.ones(3, np.float32)
    (y,) = m.run("repeat", {"k": 3, "x": x}, hosts)
    assert y.tolist() == [8, 8, 8] and [k for _, k in seen] == [2, 1, 0] and seen[1][0].tolist() == [4, 4, 4]
    part_run = cast(Doubling, m.executors["double"])
    assert part_run.symbols == [[3], [3], [3]]
    y, shape, k, w, f, half = m.run("other", [[x, 2]], hosts)
    assert type(half) is np.float16 and half == 0.5
    assert y.tolist() == [4, 4, 4] and shape == (3, 3) and k == 2 and w.shape == (2, 3) and f.name == "repeat"
    w[:] = 0
    assert m.run("other", [(x, 2)], hosts)[3].any(), "the constant is the artifact's"
    with pytest.raises(UserError, match=r"other: .*rows as rounds, got 2 and 1"):
        m.run("other", [(x, 1)], hosts)


def test_results_are_nobody_elses() -> None:
    x = np.ones(3, np.float32)
    (y,) = machine().run("repeat", [x, 0])
    y[:] = 5
    assert x.tolist() == [1, 1, 1]


def test_tail_call_does_not_nest() -> None:
    hosts = {"seen": lambda *_: None}
    x = np.zeros(1, np.float32)
    assert machine([repeat(True)]).run("repeat", [x, 2 * MAX_DEPTH], hosts)[0].tolist() == [0]
    deep = machine([repeat(False)])
    assert deep.run("repeat", [x, MAX_DEPTH], hosts)[0].tolist() == [0]
    with pytest.raises(UserError, match=f"repeat: expected at most {MAX_DEPTH} calls"):
        deep.run("repeat", [x, MAX_DEPTH + 1], hosts)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([np.ones(3), 1], "repeat: parameter x: expected dtype float32, got float64"),
        ([np.ones((3, 1), np.float32), 1], r"parameter x: .*got 2 dims \(3, 1\)"),
        ([[1.0, "two"], 1], "parameter x: expected dtype float32, got <U32"),
        ([(np.ones(2), np.ones(3)), 1], "parameter x: .*got a tuple that makes none"),
        ([[1.0, 2.0], 1], "expected the host routine 'seen'; given: none"),
        ([np.ma.masked_array(np.ones(3, np.float32)), 1], "parameter x: .*got"),
        ([np.ones(3, np.float32), True], "parameter k: .*got the number True"),
        ([np.ones(3, np.float32), 1.0], "parameter k: .*got the number 1.0"),
        ([np.ones(3, np.float32), 2**70], "parameter k: .*got|64-bit"),
        ([np.ones(3, np.float32), 1], "expected the host routine 'seen'; given: none"),
        ([np.ones(3, np.float32)], r"expected 2 arguments \(x, k\), got 1"),
        ({"x": np.ones(3, np.float32)}, "expected an array for parameter k"),
    ],
)
def test_wrong_values_are_refused(args: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        machine().run("repeat", args)


def test_text_and_back() -> None:
    text = f"[{','.join(d.to_json() for d in HOST_PROGRAMS)}]"
    found = host_programs_from_json(text)
    assert found == HOST_PROGRAMS and parts_of(found) == {"double"}


def changed(host_program: HostProgram, block: int, at: int, **to: Any) -> HostProgram:
    blocks = [list(b) for b in host_program.blocks]
    blocks[block][at] = replace(blocks[block][at], **to)
    return replace(host_program, blocks=tuple(map(tuple, blocks)))


@pytest.mark.parametrize(
    ("host_program", "says"),
    [
        (replace(repeat(True), registers=5), "the index of a register"),
        (replace(repeat(True), registers=1), "2 to 1048576 registers"),
        (replace(repeat(True), result=8), "registers .*set before they are read.*8"),
        (replace(repeat(True), blocks=()), "at least one block"),
        (replace(repeat(True), params=(X, X)), "distinct names"),
        (replace(repeat(True), name="double"), "names that no program has"),
        (replace(repeat(True), name="\x1b[2J"), "printable"),
        (changed(repeat(True), 0, 3, then=0), "blocks after its own"),
        (changed(repeat(True), 0, 3, orelse=1), "every block in one branch"),
        (changed(repeat(True), 0, 3, orelse=9), "the index of a block"),
        (changed(repeat(True), 0, 3, cond=7), "set before they are read.*7"),
        (changed(repeat(True), 2, 0, part="nobody"), "a program with as many"),
        (changed(repeat(True), 2, 0, symbols=()), "a program with as many"),
        (changed(repeat(True), 2, 2, function="nobody"), "a host program of the artifact"),
        (changed(repeat(True), 2, 2, args=(7,)), "2 arguments"),
        (changed(repeat(True), 2, 2, callee=7), "a function or the register of one"),
        (changed(repeat(True), 2, 1, routine="os; rm"), "a name of letters"),
        (changed(repeat(False), 2, 3, operator="eval"), "one of reshape_to"),
        (changed(repeat(True), 0, 2, slots=(99, 1)), "the index of a scalar slot"),
        (changed(repeat(True), 0, 2, code=(1, 2, 3)), "a multiple of 4 numbers"),
        (changed(repeat(True), 0, 2, dtypes=("int64",)), "an element type and a register"),
        (changed(repeat(True), 0, 0, into=(2, 2)), "1 registers"),
        (changed(repeat(True), 0, 0, dtype="object"), "an element type"),
        (changed(other(), 0, 13, dtype="int8"), "a floating element type"),
    ],
)
def test_wrong_host_programs_are_refused(host_program: HostProgram, says: str) -> None:
    host_programs = [host_program, repeat(True)] if host_program.name == "other" else [host_program]
    with pytest.raises(ArtifactError, match=says):
        verify_host_programs(host_programs, [part()])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "expected a list"), ("[1]", "expected schema"), ('[{"schema": 9}]', "expected schema 1, got 9"),
        ("[" * 100_000, "JSON"), ('[{"schema": 1}]', "missing"),
        (f"[{repeat(True).to_json()}]".replace('"copy"', '"jump"'), "an object whose kind is one of part"),
        (f"[{repeat(True).to_json()}]".replace('"entry":true', '"entry":1'), "true or false"),
    ],
)  # fmt: skip
def test_wrong_text_is_refused(text: str, says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        host_programs_from_json(text)


@pytest.mark.slow
def test_altered_host_programs_are_refused_or_run_to_an_error_of_ours() -> None:
    """Numbers of a good text changed at random: nothing but a refusal, an error of ours or a result comes of it."""
    generator = random.Random(3)
    documents = [json.loads(d.to_json()) for d in HOST_PROGRAMS]
    outcomes = {"refused": 0, "error": 0, "result": 0}
    for _ in range(600):
        text = json.dumps(documents)
        for _ in range(generator.randint(1, 2)):
            spots = [i for i, c in enumerate(text) if c.isdigit() and not text[i - 1].isalnum()]
            at = generator.choice(spots)
            text = text[:at] + str(generator.choice((0, 1, 2, 3, 7, 12))) + text[at + 1 :]
        try:
            found = machine(host_programs_from_json(text))
        except ArtifactError:
            outcomes["refused"] += 1
            continue
        rounds = iter(range(50))  # a loop may have lost its end

        def seen(*_: Any, rounds: Any = rounds) -> None:
            if next(rounds, None) is None:
                raise UserError("enough")

        try:
            found.run("other", [(np.ones(3, np.float32), 2)], {"seen": seen})
            outcomes["result"] += 1
        except (UserError, ArtifactError):
            outcomes["error"] += 1
    assert min(outcomes.values()) > 10, outcomes


def test_host_operators_cover_emitted_ones() -> None:
    left = {name: op for name, op in OPERATORS.items() if issubclass(op, ShapeOperator)}
    assert set(left) == set(HOST_OPERATORS)
    for name, op in left.items():
        made = cast(OperatorSpec, op())
        assert HOST_OPERATORS[name].arity == made.arity
        for args in (
            [np.array([3, 1, 1])],
            [np.zeros(0, np.int64)],
            [np.ones((2, 3), np.float32)],
            [np.ones((2, 3)), (3, 2)],
            [np.ones((2, 3)), (7,)],
            [np.array([2, -3])],
        ):
            if len(args) != made.arity:
                continue
            try:
                wanted = made.evaluate(cast(Any, args))
            except Exception:
                with pytest.raises(UserError, match=name):
                    HOST_OPERATORS[name].run(*args)
                continue
            try:
                np.testing.assert_array_equal(HOST_OPERATORS[name].run(*args), wanted)
            except UserError:  # what deduction refuses before it comes to this
                assert name == "tensor_to_shape" and cast(Array, args[0]).ndim != 1
