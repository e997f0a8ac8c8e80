"""Random programs as compiled C agree with the interpreter in results and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.effort import examples
from tests.support.programs import compiled, fields, run, same
from tests.support.random_graphs import SIZES, SLOW, Made, graphs

from relax_tune.errors import BuildError, DeduceError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.graph_walk import callees
from relax_tune.ir.passes.control.inline import Inline
from relax_tune.ir.passes.graph.cleanup import DeadCode
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.base import Device

pytestmark = pytest.mark.ccompiler


def without_uncalled(module: IRModule) -> IRModule:
    """Drop uncalled functions, each of which would be a further entry of the built program."""
    graph = {n: f for n, f in module.functions.items() if isinstance(f, Function)}
    reached, stack = {"main"}, ["main"]
    while stack:
        called = callees(graph[stack.pop()])
        stack += [n for n in called if n not in reached]
        reached.update(called)
    return replace(module, functions={n: f for n, f in module.functions.items() if n in reached or n not in graph})


def outcome(call: Any) -> Any:
    try:
        return call()
    except UserError as error:
        return error


@settings(SLOW, max_examples=examples(12), database=None)
@given(graphs(steps=5, rich=False), st.lists(SIZES, min_size=3, max_size=3), st.integers(0, 9))
def test_random_programs_match_interpreter_results_and_refusals(
    device: Device, made: Made, sizes: list[dict[str, int]], seed: int
) -> None:
    """Unread values may be left out, so a refusal that only they cause may go either way."""
    module = without_uncalled(made.module)
    try:
        lower(module)
    except (BuildError, DeduceError):
        assume(False)
    live = DeadCode()(Inline()(module))
    rng = np.random.default_rng(seed)
    with compiled(module, device) as program:
        for size in sizes:
            args = made.arguments(size, rng)
            whole, expected = (outcome(lambda m=m, args=args: run(m, *args)) for m in (module, live))
            actual = outcome(lambda args=args: program(*args))
            where = f"{print_text(module)}\n{size}\n{whole}\n{expected}\n{actual}"
            if isinstance(expected, UserError):
                assert isinstance(actual, UserError), where
            elif isinstance(actual, UserError):
                assert isinstance(whole, UserError), where
            else:
                same(actual, expected[0] if isinstance(expected, tuple) and len(expected) == 1 else expected, where)


@settings(SLOW, max_examples=examples(15), database=None)
@given(graphs(steps=10), st.lists(SIZES, min_size=3, max_size=3), st.integers(0, 9))
def test_random_programs_with_branches_and_calls_match_interpreter(
    device: Device, made: Made, sizes: list[dict[str, int]], seed: int
) -> None:
    module = without_uncalled(made.module)
    try:
        lower(module)
    except (BuildError, DeduceError):
        assume(False)
    main = module.functions["main"]
    assert isinstance(main, Function)
    rng = np.random.default_rng(seed)
    with compiled(module, device) as program:
        for size in sizes:
            args = made.arguments(size, rng)
            expected, actual = outcome(lambda args=args: run(module, *args)), outcome(lambda args=args: program(*args))
            where = f"{print_text(module)}\n{size}\n{expected}\n{actual}"
            if isinstance(actual, UserError):
                assert isinstance(expected, UserError), where
            elif not isinstance(expected, UserError):
                flat = tuple(fields(expected, main.ret_info))
                same(actual, flat[0] if len(flat) == 1 else flat, where)
