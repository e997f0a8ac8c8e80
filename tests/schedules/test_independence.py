"""Marks on loops of splits and fusions: accepted where iterations write different elements, by enumeration, and refused else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.traces.random_steps import TUNABLES
from tests.support import schedule_functions as make
from tests.support.effort import examples

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import TRUE, Expr, Tunable, maximum
from relax_tune.ir.core.expr_text import format_expr
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.schedules.loop_tree import block_value, enclosing, find_block, find_loop, replace_node, with_body
from relax_tune.schedules.schedule import Schedule

T, U = Tunable("T", (2, 4)), Tunable("U", (1, 3, 8))
FUNCTIONS: dict[str, tuple[Callable[[], PrimFunc], str]] = {
    "1-d": (lambda: make.pointwise(1), "squash"),
    "2-d": (lambda: make.pointwise(2), "squash"),
    "4-d": (lambda: make.pointwise(4), "squash"),
    "turned": (make.flipped, "turn"),
    "product": (make.scores, "qk"),
    "contexts": (make.context, "pv"),
}


def spatial(s: Schedule, block: str) -> list[str]:
    node = find_block(s.func, block)
    return [n for n, i in zip(s.loops_of(block), node.iters) if i.kind == "spatial"]


def lanes_of_all(s: Schedule, outer: list[str]) -> tuple[str, str]:
    top, lanes = s.split(s.fuse(outer), [None, 16])
    return top, lanes


def lanes_of_chunks(s: Schedule, outer: list[str]) -> tuple[str, str]:
    top, _, lanes = s.split(s.fuse(outer), [None, T, 8])
    return top, lanes


def few_chunks(s: Schedule, outer: list[str]) -> tuple[str, str]:
    top, rest = s.split(s.fuse(outer), [16, None])
    return top, s.split(rest, [None, U])[1]


def chunks_that_shapes_say(s: Schedule, outer: list[str]) -> tuple[str, str]:
    top, rest = s.split(s.fuse(outer), [None, s.func.symbols[0] // 4 + 1])
    return top, s.split(rest, [None, 8])[1]


def fused_twice(s: Schedule, outer: list[str]) -> tuple[str, str]:
    top, lanes = s.split(s.fuse([s.fuse(outer[:-1]), outer[-1]] if len(outer) > 1 else outer), [None, 16])
    return top, lanes


def tiles_flattened(s: Schedule, outer: list[str]) -> tuple[str, str]:
    top, inner = s.split(outer[0], [None, T])
    return top, s.split(s.fuse([inner, *outer[1:]]), [None, 16])[1]


def dealt_out(s: Schedule, outer: list[str]) -> tuple[str, str]:
    rounds, worker = s.split(s.fuse(outer), [None, T])
    rounds, lanes = s.split(rounds, [None, 4])
    s.reorder([worker, rounds])
    return worker, lanes


def main_and_tail(s: Schedule, outer: list[str]) -> tuple[str, str]:
    whole = s.fuse(outer)
    s.apply("partition", loop=whole, factor=U)
    s.parallel(f"{whole}_tail")
    top, lanes = s.split(whole, [None, U])
    return top, lanes


NESTS = (
    lanes_of_all, lanes_of_chunks, few_chunks, chunks_that_shapes_say, fused_twice, tiles_flattened, dealt_out, main_and_tail,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("nest", NESTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_flattened_nests_take_threads_and_lanes(
    function: str, nest: Callable[[Schedule, list[str]], tuple[str, str]]
) -> None:
    build, block = FUNCTIONS[function]
    s = Schedule(build())
    top, lanes = nest(s, spatial(s, block))
    s.parallel(top)
    s.vectorize(lanes)


def writes_twice(func: PrimFunc, block: str, loop: str, known: dict[str, int]) -> bool:
    """Return whether two iterations of the loop write one element, by enumeration; the loops around it stand still."""
    node, target = find_block(func, block), find_loop(func, loop)
    path = enclosing(func, node)
    at = path.index(target)
    code = {
        e: compile(format_expr(e).replace(" and ", " & "), "<expr>", "eval")
        for e in (*(p.extent for p in path), node.predicate, *(block_value(node, i) for i in node.body.indices))
    }

    def value(e: Expr, where: dict[str, int]) -> int:
        return int(eval(code[e], {"min": min, "max": max}, where))

    ranges = [range(value(p.extent, known)) for p in path]
    by: dict[tuple[object, ...], int] = {}
    for point in product(*ranges):
        where = known | {p.var.name: x for p, x in zip(path, point)}
        if value(node.predicate, where):
            spot = point[:at], tuple(value(block_value(node, i), where) for i in node.body.indices)
            if by.setdefault(spot, point[at]) != point[at]:
                return True
    return False


def random_nest(s: Schedule, block: str, rng: random.Random) -> None:
    """Loops of the block split, fused and put in another order."""
    for _ in range(rng.randrange(1, 5)):
        names = s.loops_of(block)
        factor = rng.choice([2, 3, *TUNABLES, s.func.symbols[0] // 2 + 1, maximum(s.func.symbols[-1], 1)])
        try:
            match rng.randrange(4):
                case 0:
                    s.split(rng.choice(names), [None, factor])
                case 1:
                    s.split(rng.choice(names), [factor, None])
                case 2:
                    start = rng.randrange(len(names))
                    s.fuse(names[start : start + rng.choice([2, 3])])
                case _:
                    s.reorder(rng.sample(names, len(names)))
        except ScheduleError:
            continue


def blurred(func: PrimFunc, block: str, rng: random.Random) -> PrimFunc:
    """The block with a binding that says less than its loops do, or without its guard: no schedule, but a question."""
    node = find_block(func, block)
    at, by = rng.randrange(len(node.iters)), rng.choice([2, 3, *TUNABLES])
    changed = rng.choice([node.bindings[at] // by, node.bindings[at] % by, node.bindings[at]])
    bindings = (*node.bindings[:at], changed, *node.bindings[at + 1 :])
    return with_body(func, replace_node(func.body, node, replace(node, bindings=bindings, predicate=TRUE)))


@settings(max_examples=examples(25), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["1-d", "2-d", "4-d", "turned", "product"]))
def test_marked_loops_write_different_elements(rng: random.Random, function: str) -> None:
    build, block = FUNCTIONS[function]
    s = Schedule(build())
    random_nest(s, block, rng)
    if rng.random() < 0.5:
        s.func = blurred(s.func, block, rng)
    loop = rng.choice([p.var.name for p in loops(s.func.body) if p.var.name in s.loops_of(block)])
    try:
        s.parallel(loop)
    except ScheduleError:
        return
    known = {v.name: rng.choice([1, 2, 3, 5]) for v in s.func.symbols} | {
        t.name: rng.choice(t.domain[:3]) for t in TUNABLES
    }
    assert not writes_twice(s.func, block, loop, known)
