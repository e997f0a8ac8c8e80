"""Reading programs: what was written comes back, and hostile text is refused saying where."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from relax_tune.errors import ArtifactError, UserError
from relax_tune.runtime.program.plan import Entry, choice_slot, explain, formula, plan_of
from relax_tune.runtime.program.program import CallSite, format_message, program_from_json
from relax_tune.runtime.program.scalars import Opcode, ScalarBuilder, evaluate

VIEW = {"name": "seen", "dtype": "float32", "shape": [], "role": "view"}


@pytest.mark.parametrize("kind", ["c", "opencl"])
def test_round_trip(small: Any, kind: str) -> None:
    program = small.program(kind)
    text = program.to_json()
    assert program_from_json(text) == program
    assert program_from_json(text).to_json() == text


def put(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    inside = data
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("schema",), 2, "expected schema 1, got 2"),
        (("schema",), True, "expected schema"),
        (("name",), 3, "program.name: expected text, got 3"),
        (("scalars", 0), 1.5, r"program.scalars\[0\]: expected a whole number"),
        (("scalars", 0), True, r"program.scalars\[0\]: expected a whole number"),
        (("scalars", 0), 99, "slot 0: expected an opcode"),
        (("scalars",), "abc", "program.scalars: expected a list"),
        (("symbols", 0, "lower"), "0", r"symbols\[0\].lower: expected a whole number"),
        (("symbols", 0, "upper"), -1, r"symbols\[0\]: expected int64 lower <= upper"),
        (("symbols", 0, "name"), "n; drop", r"symbols\[0\].name"),
        (("checks", 0, "message"), "see {7}", r"checks\[0\].message: expected the index of a value"),
        (("checks", 0, "slot"), -1, r"checks\[0\].slot: expected the index of a scalar slot"),
        (("storages", 0), 10**6, r"storages\[0\]"),
        (("buffers", 0, "dtype"), "object", r"buffers\[0\].dtype"),
        (("buffers", 0, "role"), "secret", r"buffers\[0\].role: expected one of input"),
        (("buffers", 0, "role"), "temp", r"buffers\[0\].storage"),
        (("buffers", 0, "role"), "view", r"buffers\[0\].base: expected a base for a view"),
        (("buffers", 0, "base"), 1, r"buffers\[0\].base: expected a base for a view"),
        (("buffers", 0), VIEW | {"base": 99}, r"buffers\[0\].base: expected the index of a buffer"),
        (("buffers", 0), VIEW | {"base": 3}, r"buffers\[0\].base: .* constant of float32"),
        (("buffers", 0, "name"), "bias", r"buffers\[1\].name: expected a name used once"),
        (("buffers", 0, "fill"), None, r"buffers\[0\].fill: expected an object"),
        (("buffers", 3, "storage"), 1, r"buffers\[3\].storage: expected the index of a storage"),
        (("kernels", 0, "name"), "a b", r"kernels\[0\].name"),
        (("kernels", 0, "language"), "brainfuck", r"kernels\[0\].language"),
        (("kernels", 0, "flags"), ["-fplugin=evil.so"], r"kernels\[0\].flags"),
        (("kernels", 0, "flags"), ["-o/etc/passwd"], r"kernels\[0\].flags"),
        (("kernels", 0, "flags"), ["-O2 -Wl,evil"], r"kernels\[0\].flags"),
        (("kernels", 0, "flags"), ["-fopt-info-all=makefile"], r"kernels\[0\].flags"),
        (("kernels", 0, "flags"), ["-fself-test=folder"], r"kernels\[0\].flags"),
        (("kernels", 0, "flags"), ["-fuse-ld=evil"], r"kernels\[0\].flags"),
        (("kernels", 0, "flags"), ["-fcallgraph-info"], r"kernels\[0\].flags"),
        (("kernels", 0, "flags"), ["-ffinite-math-only"], r"kernels\[0\].flags"),
        (("kernels", 0, "flags"), ["-ffast-math"], r"kernels\[0\].flags"),
        (("kernels", 0, "source"), "a\0b", r"kernels\[0\].source"),
        (("calls", 0, "variants"), [], r"calls\[0\].variants: expected at least one variant"),
        (("calls", 0, "variants", 0, "steps", 0, "target"), "nothing", r"calls\[0\].variants\[0\].steps\[0\].target"),
        (("calls", 0, "variants", 0, "steps", 0, "kind"), "shell", r"steps\[0\].kind: expected one of kernel, library"),
        (("calls", 0, "variants", 0, "steps", 0, "buffers", 0), 99, r"steps\[0\].buffers\[0\]: expected the index"),
        (("calls", 0, "variants", 0, "steps", 0, "local"), [1], r"steps\[0\].grid: expected as many axes"),
        (("prepare", 0, "buffers", 0), 0, r"prepare\[0\].buffers: expected constants and packed"),
        (("inputs", 0), 4, r"inputs\[0\]: expected a buffer of role input"),
        (("inputs",), [0, 0], "inputs: expected each buffer once"),
        (("inputs",), [], r"buffers\[0\]: expected every input buffer"),
        (("outputs", 0), 3, r"outputs\[0\]: expected a buffer of role output"),
    ],
)
def test_hostile_programs_are_refused_saying_where(small: Any, path: Any, value: Any, says: str) -> None:
    data = json.loads(small.program("c").to_json())
    with pytest.raises(ArtifactError, match=says):
        program_from_json(json.dumps(put(data, path, value)))


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"schema": 1}', "[" * 100_000, '{"schema": NaN}', "3"])
def test_malformed_program_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match="program"):
        program_from_json(text)


def test_unknown_and_missing_fields(small: Any) -> None:
    data = json.loads(small.program("c").to_json())
    with pytest.raises(ArtifactError, match=r"unknown \['extra'\]"):
        program_from_json(json.dumps(data | {"extra": 1}))
    del data["calls"]
    with pytest.raises(ArtifactError, match=r"missing \['calls'\]"):
        program_from_json(json.dumps(data))


@pytest.mark.slow
def test_random_damage_never_escapes(small: Any) -> None:
    """Whatever is put anywhere: an ArtifactError or a program, never another exception."""
    text = small.program("c").to_json()
    generator = random.Random(2)
    values: list[Any] = [None, -1, 0, 3, 10**30, 1.5, True, "x", [], {}, [[]], "\ud800"]

    def paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        keys = data.keys() if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
        return [p for key in keys for p in [(*path, key), *paths(data[key], (*path, key))]]

    data = json.loads(text)
    for path in generator.sample(paths(data), 150):
        for value in values:
            try:
                program_from_json(json.dumps(put(data, path, value)))
            except ArtifactError:
                continue


def test_messages_format_only_numbers() -> None:
    assert format_message("{0} of {1}, {x} {0.__class__}", [3, 4]) == "3 of 4, {x} {0.__class__}"


def test_a_plan_becomes_one_slot_and_back(small: Any) -> None:
    builder = ScalarBuilder()
    n = builder.symbol(0)
    plan = [
        Entry(builder.op(Opcode.LE, n, builder.const(4)), 2),
        Entry(builder.op(Opcode.LT, n, builder.const(100)), 0),
        Entry(None, 1),
    ]
    slot = choice_slot(builder, plan)
    for value, wanted in ((0, 2), (4, 2), (5, 0), (99, 0), (100, 1), (10**6, 1)):
        assert evaluate(builder.code, [value])[slot] == wanted
    program = small.program("c")
    program = replace(program, scalars=builder.code)
    assert plan_of(program, CallSite("c", "t", slot, ())) == plan
    assert choice_slot(builder, plan[2:]) == builder.const(1)
    for bad in ([], plan[:2], [Entry(None, 0), Entry(None, 1)]):
        with pytest.raises(UserError, match="plan"):
            choice_slot(builder, bad)


def test_plans_are_explained_in_symbols(small: Any) -> None:
    program = small.program("c")
    assert explain(program) == (
        "affine (task task-affine)\n  generic (variant 0) if n <= 4\n  tuned (variant 1) otherwise\n"
        "sums (task task-sums)\n  generic (variant 0) otherwise"
    )
    builder = ScalarBuilder()
    n = builder.symbol(0)
    slot = builder.op(Opcode.MIN, builder.op(Opcode.ADD, n, n), builder.const(3))
    assert formula(replace(program, scalars=builder.code), slot) == "min((n + n), 3)"
