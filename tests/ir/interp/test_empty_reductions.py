"""A reduction over nothing is its initial value, in the interpreter and in generated code, scheduled or not."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support.candidates import CASES, arguments, few, problems, sampled

from relax_tune.ir.core.expr import Var, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import IfThenElse, walk
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.interp.empty_reductions import complete_empty_reductions
from relax_tune.ir.interp.interp import run_prim
from relax_tune.schedules.schedule import Schedule

EMPTY: list[tuple[str, Mapping[str, int]]] = [
    ("matmul symbolic", {"m": 5, "n": 7, "k": 0}),
    ("row sum", {"n": 5, "m": 0}),
    ("row max", {"n": 5, "m": 0}),
    ("mean pool", {"b": 3, "n": 0}),
    ("two outputs", {"n": 5, "m": 0}),
    ("one element", {"n": 0}),
    ("mean over the middle", {"b": 3, "n": 0}),
    ("softmax", {"n": 5, "m": 0}),
    ("batched NN", {"b": 2, "n": 0}),
]
DEVICES = [pytest.param("c", marks=pytest.mark.ccompiler), pytest.param("opencl", marks=pytest.mark.opencl)]


@pytest.mark.parametrize(("case", "dims"), EMPTY, ids=[c for c, _ in EMPTY])
def test_interpreter_empty_reductions(case: str, dims: Mapping[str, int]) -> None:
    func = CASES[case][0]()
    for vectorise in (True, False):
        arrays, scalars = arguments(func, dims)
        run_prim(func, arrays, scalars, vectorise=vectorise)
        assert not problems(func, arrays, arrays[len(func.input_buffers) :], dims)


@pytest.mark.parametrize("language", DEVICES)
def test_generated_code_empty_reductions(language: str) -> None:
    device = opened(language)
    expected = []
    for case, dims in EMPTY:
        func = CASES[case][0]()
        # as it was written, where code can be generated for it at all, and scheduled by every rule
        plain = [func] if not any(b.scope != "global" for b in func.allocs) else []
        expected += [
            (case, dims, f)
            for f in (*plain, *(instance for _, _, instance in sampled(few(case, language, 2), f"{case} {language}")))
        ]
    runs = Compiled.together(device, language, [f for _, _, f in expected])
    for (case, dims, func), run in zip(expected, runs, strict=True):
        arrays, scalars = arguments(func, dims)
        actual = run(arrays, scalars)
        wrong = problems(CASES[case][0](), arrays, actual, dims)
        assert not wrong, (case, wrong)


def column_sums(rows: int | Var) -> PrimFunc:
    """y[j] = sum over i of x[i, j], from 3."""
    b = TensorBuilder("column_sums")
    m = Var("m")
    x, y = b.input("x", (rows if isinstance(rows, Var) else const(rows), m)), b.output("y", (m,))
    b.reduce(y, (x.buffer.shape[0],), const(3.0), lambda acc, j, i: acc + x[i, j], name="sum")
    return b.finish()


@pytest.mark.parametrize("language", DEVICES)
def test_split_outermost_reduction_completed(language: str) -> None:
    s = Schedule(column_sums(Var("n")))
    element, step = s.loops_of("sum")
    outer, inner = s.split(step, [None, 4])
    parts = s.split(element, [None, 8])
    s.reorder([outer, *parts, inner])
    device = opened(language)
    run = Compiled(device, language, s.func)
    for n, m in ((0, 11), (0, 0), (1, 11), (9, 3)):
        x = np.random.default_rng(n).standard_normal((n, m), np.float32)
        (result,) = run([x, np.empty(m, np.float32)])
        np.testing.assert_allclose(result, x.sum(0, dtype=np.float64) + 3, rtol=1e-5)
        out = np.empty(m, np.float32)
        run_prim(s.func, [x, out])
        np.testing.assert_allclose(out, result, rtol=1e-5)


def test_known_extents_unchanged() -> None:
    func = column_sums(4)
    assert complete_empty_reductions(func.body) is func.body
    symbolic = column_sums(Var("n")).body
    assert sum(isinstance(x, IfThenElse) for x in walk(complete_empty_reductions(symbolic))) == 1
    s = Schedule(column_sums(Var("n")))
    s.apply("decompose_reduction", block="sum", loop=s.loops_of("sum")[1])
    assert complete_empty_reductions(s.func.body) is s.func.body


def test_max_of_nothing_lowest_value() -> None:
    func = CASES["row max"][0]()
    arrays, scalars = arguments(func, {"n": 3, "m": 0})
    run_prim(func, arrays, scalars)
    assert arrays[-1].tolist() == [-math.inf] * 3
