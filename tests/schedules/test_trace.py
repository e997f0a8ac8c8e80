"""Traces as data: JSON and back, as Python, replayed on a copy with other names, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.candidates import MACHINES, WIDE, cases_of, sketches_of
from tests.support.effort import thinned

from relax_tune.errors import ScheduleError
from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Tunable, Var, const, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import replace_buffers, substitute_stmt
from relax_tune.ir.text.printer import print_text
from relax_tune.schedules.schedule import Schedule, replay
from relax_tune.schedules.sketch import generate_sketches
from relax_tune.schedules.target import HardwareInfo
from relax_tune.schedules.trace import Step, Trace

C = WIDE
OPENCL = HardwareInfo("opencl", 2, 8, 32, 48 << 10, 1 << 20, 32 << 20)


def scheduled() -> Schedule:
    tile = Tunable("T", (2, 4))
    s = Schedule(make.chain())
    i_0, i_1 = s.split("inc_i", [None, tile])
    s.compute_at("double", i_0)
    s.reorder([i_1, "inc_j"])
    s.set_tail(i_0, "peel")
    s.set_kind(i_0, "parallel")
    s.apply("tile_layout", buffer="B", dim=1, factor=3, order=[1, 0, 2])
    return s


def other_symbols(func: PrimFunc) -> PrimFunc:
    """A structurally equal copy: shape symbols and buffers are other objects with other names."""
    renamed: dict[Var, Expr] = {v: Var(f"other_{v.name}") for v in func.symbols}

    def copy(b: Buffer) -> Buffer:
        return replace(b, shape=tuple(substitute(d, renamed) for d in b.shape))

    swaps = {b: copy(b) for b in (*func.buffers, *func.allocs)}
    params = tuple(swaps[p] if isinstance(p, Buffer) else renamed[p] for p in func.params)
    body = replace_buffers(substitute_stmt(func.body, renamed), swaps)
    allocs, consts = tuple(swaps[b] for b in func.allocs), tuple(swaps[b] for b in func.consts)
    return PrimFunc("other", params, func.outputs, body, allocs, consts)  # type: ignore[arg-type]


def test_trace_json_round_trips() -> None:
    trace = scheduled().trace
    text = trace.to_json()
    read = Trace.from_json(text)
    assert read.to_json() == text
    assert [s.primitive for s in read.steps] == [s.primitive for s in trace.steps]
    assert [dict(s.args) for s in read.steps][1:] == [dict(s.args) for s in trace.steps][1:]
    assert [(t.name, t.domain) for t in read.tunables] == [("T", (2, 4))]


def test_json_is_plain_and_canonical() -> None:
    data = json.loads(scheduled().trace.to_json())
    assert data["tunables"] == {"T": [2, 4]}
    assert data["steps"][0] == ["split", {"loop": "inc_i", "factors": [None, {"tunable": "T"}], "divides": False}]
    # equal schedules built separately give the same bytes
    assert scheduled().trace.to_json() == scheduled().trace.to_json()


def test_trace_constant_expressions_become_numbers() -> None:
    s = Schedule(make.chain())
    s.split("inc_i", [None, const(4)])
    assert '"factors":[null,4]' in s.trace.to_json()


def test_trace_as_python_matches_golden(golden: Callable[[str, str], None]) -> None:
    golden("schedules/trace_as_python.txt", scheduled().trace.as_python())


def test_trace_as_python_runs() -> None:
    original = scheduled()
    s = Schedule(make.chain())
    exec(original.trace.as_python(), {"s": s})
    # a domain prints as a list, and two tunables of one name and domain are different objects: compare instances
    again, first = (replay(x.trace.with_values({"T": 4}), make.chain()).func for x in (s, original))
    assert structural_equal(again, first)
    assert s.trace.to_json() == original.trace.to_json()


def test_replays_on_a_copy_with_other_names() -> None:
    trace = scheduled().trace
    copy = other_symbols(make.chain())
    assert structural_equal(copy, make.chain())
    for values in ({"T": 2}, {"T": 4}):
        concrete = trace.with_values(values)
        assert structural_equal(replay(concrete, copy).func, replay(concrete, make.chain()).func)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [C, OPENCL], ids=["c", "opencl"])
def test_sketches_replay_on_a_copy(machine: HardwareInfo) -> None:
    for func in (make.matmul(30, 7), zoo.softmax().func, make.scores()):
        copy = other_symbols(func)
        for sketch in generate_sketches(func, machine):
            values = {t.name: t.domain[-1] for t in sketch.tunables}
            concrete = Trace.from_json(sketch.trace.to_json()).with_values(values)
            assert structural_equal(replay(concrete, copy).func, replay(concrete, func).func), sketch.name


# OpenCL's sketches equal C's, with fewer lanes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "language"), thinned([(c, m) for m in MACHINES for c in cases_of(m)[:: 4 if m == "opencl" else 1]])
)
def test_trace_as_python_of_every_sketch_runs(case: str, language: str) -> None:
    func, sketches = sketches_of(case, language)
    for sketch in sketches:
        s = Schedule(func)
        exec(sketch.trace.as_python(), {"s": s})
        assert s.trace.to_json() == Trace.from_json(sketch.trace.to_json()).to_json() == sketch.trace.to_json()
        assert print_text(s.func) == print_text(sketch.func), sketch.name


def test_replay_of_failing_step_marks_missing_names() -> None:
    with pytest.raises(ScheduleError) as error:
        replay(scheduled().trace, make.stencil())
    assert str(error.value) == (
        "step 1 of the trace does not apply: stencil: expected a loop called 'inc_i'; the function has square_i, pair_i\n"
        "s.apply('split', loop='inc_i', factors=[None, T], divides=False)\n"
        "                      ^^^^^^^\n"
        "    4 |     for square_i in serial(n + 1):\n"
        '    5 |         with block("square"):\n'
        "    8 |     for pair_i in serial(n):\n"
        '    9 |         with block("pair"):'
    )


def test_replay_of_failing_step_marks_named_nodes(golden: Callable[[str, str], None]) -> None:
    trace = scheduled().trace
    steps = (*trace.steps[:2], Step("compute_at", (("block", "double"), ("loop", "inc_j"))))
    with pytest.raises(ScheduleError, match=r"step 3 .*'double'") as error:
        replay(Trace(steps, trace.tunables), make.chain())
    golden("schedules/step_that_does_not_apply.txt", str(error.value))


def test_keyword_arguments_are_not_marked_as_names() -> None:
    steps = (Step("set_kind", (("loop", "inc_i"), ("kind", "vectorized"))),)
    with pytest.raises(ScheduleError) as error:
        replay(Trace(steps), make.chain())
    # one caret, under the loop
    shown = str(error.value).splitlines()
    assert [shown[at - 1].split()[2] for at, line in enumerate(shown) if line.strip("| ^") == "" and "^" in line] == [
        "for"
    ]


@pytest.mark.parametrize(
    ("primitive", "args"),
    [
        ("tensorize", {"loop": "inc_i", "intrinsic": "outer_f32_4x16"}),
        ("transform_layout", {"buffer": "B", "index_map": "i, j -> i", "factors": ()}),
        ("set_kind", {"loop": "inc_i", "kind": "vectorized", "axis": 0}),
        ("set_scope", {"buffer": "C", "scope": "local"}),
    ],
)
def test_carets_do_not_mark_keywords(primitive: str, args: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError) as error:
        replay(Trace((Step(primitive, tuple(args.items())),)), make.chain())
    shown = str(error.value).splitlines()
    line = next(at for at, text in enumerate(shown) if text.startswith("s.apply("))
    # nothing is missing, so the nest follows at once
    assert "|" in shown[line + 1]


def test_loop_kind_shorthands_record_set_kind() -> None:
    s = Schedule(make.pointwise(4))
    loops = s.loops_of("squash")
    s.bind(loops[0], "group", 1)
    s.parallel(loops[1])
    s.unroll(loops[2])
    s.vectorize(loops[3])
    assert [step.primitive for step in s.trace.steps] == ["set_kind"] * 4
    assert [x.kind for x in s.nest_of("squash")] == ["group", "parallel", "unrolled", "vectorized"]
    assert s.nest_of("squash")[0].axis == 1


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("explode", (("loop", "inc_i"),)),
        ("split", (("loop", "inc_i"),)),
        ("split", (("loop", "inc_i"), ("factors", (None, 2)), ("colour", "red"))),
        ("split", (("loop", "inc_i"), ("factors", 7))),
        ("split", (("loop", "inc_i"), ("factors", (None, "two")))),
        ("reorder", (("names", 3),)),
        ("set_kind", (("loop", "inc_i"), ("kind", 5))),
        ("set_kind", (("loop", ("inc_i",)), ("kind", "parallel"))),
        ("tile_layout", (("buffer", "B"), ("dim", "one"), ("factor", 2), ("order", (0, 1, 2)))),
        ("tile_layout", (("buffer", "B"), ("dim", 1), ("factor", None), ("order", (0, 1, 2)))),
        ("permute_layout", (("buffer", "B"), ("order", (0, "x")))),
    ],
)
def test_steps_of_another_version_are_refused(name: str, args: tuple[tuple[str, Any], ...]) -> None:
    with pytest.raises(ScheduleError, match="step 1 of the trace"):
        replay(Trace((Step(name, args),)), make.chain())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"tunables":{},"steps":[["split"]]}',
        '{"tunables":{},"steps":[["split",[]]]}',
        '{"tunables":{"T":[]},"steps":[]}',
        '{"tunables":{"T":[0]},"steps":[]}',
        '{"tunables":{"T":["a"]},"steps":[]}',
        '{"tunables":{},"steps":[["split",{"loop":{"tunable":"T"}}]]}',
        '{"tunables":{},"steps":[["split",{"loop":{}}]]}',
        '{"tunables":{"T":[1e999]},"steps":[]}',
        '{"tunables":{"T":[2.0]},"steps":[]}',
        '{"tunables":{"T":[4294967296]},"steps":[]}',
        '{"tunables":{"T":"ab"},"steps":[]}',
        '{"tunables":{},"steps":[["split",{"loop":1.5}]]}',
        '{"tunables":{},"steps":[["split",{"loop":NaN}]]}',
        '{"tunables":{},"steps":[["split",{"loop":99999999999}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[[1]]}]]}',
        '{"tunables":{},"steps":[["split",{"loop=0);print(1)#":1}]]}',
        '{"tunables":{},"steps":[[["split"],{"loop":1}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":""}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":3}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"s0, s1"}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"T + 1"}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"s100"}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"s0.real"}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"s0 if s1 else 2"}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"print(s0)"}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"max(s0)"}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"s0 ** 9"}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"1or 2"}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"' + "(" * 400 + '"}]}]]}',
        '{"tunables":{},"steps":[["split",{"factors":[{"expr":"' + "s0 + " * 200 + '1"}]}]]}',
        "[" * 100_000,
    ],
)
def test_from_json_refuses_other_text(text: str) -> None:
    with pytest.raises(ScheduleError, match="expected a schedule trace"):
        Trace.from_json(text)


class TestWithValues:
    def test_puts_numbers_in(self) -> None:
        concrete = scheduled().trace.with_values({"T": 4})
        assert concrete.tunables == ()
        assert dict(concrete.steps[0].args)["factors"] == (None, 4)

    def test_missing(self) -> None:
        with pytest.raises(ScheduleError, match=r"'T' expects .*got None"):
            scheduled().trace.with_values({})

    def test_outside_the_domain(self) -> None:
        with pytest.raises(ScheduleError, match=r"expects one of \[2, 4\], got 3"):
            scheduled().trace.with_values({"T": 3})


def test_a_tunable_is_declared_once() -> None:
    s = Schedule(make.chain())
    s.tunable("T", (1, 2))
    with pytest.raises(ScheduleError, match="declared twice"):
        s.tunable("T", (1, 2))


def test_two_tunables_of_one_name_are_refused() -> None:
    s = Schedule(make.chain())
    s.split("inc_i", [None, Tunable("T", (2, 4))])
    with pytest.raises(ScheduleError, match="'T'"):
        s.split("inc_j", [None, Tunable("T", (3,))])


def test_an_unknown_primitive_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"one of split, fuse, .*got 'tensorise'"):
        Schedule(make.chain()).apply("tensorise", loop="inc_i")
