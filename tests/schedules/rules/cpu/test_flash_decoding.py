"""Flash-decoding on processors: workers share the blocks of keys of one query."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.support.candidates import CASES, MACHINES, WIDE

from relax_tune.ir.codegen.generate import CodeTarget, generate
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, const, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import For, Seq
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.schedules.cost.vectorized import ConstraintFunction
from relax_tune.schedules.rules.cpu import flash_decoding
from relax_tune.schedules.sketch import Sketch, instantiate, iter_sketches


def built(language: str) -> PrimFunc:
    s = flash_decoding.build(CASES["attention"][0](), {**MACHINES, "c": WIDE}[language])
    values = {"MR": 1, "KU": 2, "KR": 4, "NR": 16}
    return instantiate(Sketch("flash_decoding", s.func, s.trace, tuple(s.constraints)), values)


@pytest.mark.parametrize(("language", "kind", "tasks"), [("c", "parallel", 2 * 5), ("opencl", "group", 2 * 10)])
def test_flash_decoding_one_query_spreads_key_blocks(language: str, kind: str, tasks: int) -> None:
    func = built(language)
    assert isinstance(func.body, Seq)
    first, second = func.body.stmts
    assert isinstance(first, For) and isinstance(second, For) and first.kind == second.kind == kind
    sizes = {v: const({"n": 1, "m": 300}[v.name]) for v in func.symbols}
    # 300 keys in blocks of four vectors, and two heads
    assert substitute(first.extent, sizes) is const(tasks) and substitute(second.extent, sizes) is const(2)


@pytest.mark.slow
def test_flash_decoding_over_one_key_more_than_a_symbol_generates() -> None:
    """A decoder's keys are its cached keys and one more: their blocks are counted as `m // 64 + 1` and as `(m + 64) // 64`."""
    m = Var("m")
    infos = [TensorInfo((const(2), rows, const(16)), f32) for rows in (const(1), m + 1, m + 1)]
    func = Attention(0.25).legalize("attention", infos)
    (sketch,) = (s for s in iter_sketches(func, WIDE) if s.name == "flash_decoding")
    names = [t.name for t in sketch.tunables]
    points = np.array(list(itertools.product(*(t.domain for t in sketch.tunables))))
    legal = points[ConstraintFunction(sketch)(dict(zip(names, points.T, strict=True)))]
    assert len(legal) > 9
    for values in legal[:: len(legal) // 9].tolist():
        generate(instantiate(sketch, dict(zip(names, values, strict=True))), CodeTarget("c", 16))
