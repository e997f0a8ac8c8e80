"""Flash-decoding on processors: workers share the blocks of keys of one query."""

from __future__ import annotations

import pytest
from tests.support.candidates import CASES, MACHINES, WIDE

from relax_tune.ir.core.expr import const, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import For, Seq
from relax_tune.schedules.rules.cpu import flash_decoding
from relax_tune.schedules.sketch import Sketch, instantiate


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
