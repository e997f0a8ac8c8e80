"""Attention under a causal mask: what it shows none of is not computed, features count what is left, and threads share that out."""

from __future__ import annotations

import re

import pytest
from tests.support import schedule_functions as make
from tests.support.candidates import MACHINES

from relax_tune.ir.codegen.generate import CodeTarget, generate
from relax_tune.ir.core.expr import as_int, const, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import For, loops
from relax_tune.schedules.mean_extents import with_mean_extents
from relax_tune.schedules.rules.cpu import flash_attention
from relax_tune.schedules.sketch import Sketch, instantiate

VALUES = {"MR": 4, "IU": 8, "JU": 8, "KU": 4, "NR": 16}


def built(func: PrimFunc) -> tuple[Sketch, PrimFunc]:
    s = flash_attention.build(func, MACHINES["c"])
    sketch = Sketch("flash_attention", s.func, s.trace, tuple(s.constraints))
    return sketch, instantiate(sketch, VALUES)


def keys_of(func: PrimFunc) -> tuple[For, For]:
    """The loop over tiles of queries, and the one over blocks of keys."""
    (keys,) = (p for p in loops(func.body) if p.var.name.startswith("softmax_max_b"))
    return loops(func.body)[0], keys


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, 1, 64, 1000, 4099])
def test_with_mean_extents_causal_loop_has_mean_key_blocks(n: int) -> None:
    func = built(make.causal_attention())[1]
    sizes = {v: const(n) for v in func.symbols}
    tiles, keys = keys_of(func)
    count = as_int(substitute(tiles.extent, sizes)) or 0
    each = [as_int(substitute(keys.extent, {**sizes, tiles.var: const(t)})) or 0 for t in range(count)]
    guess = as_int(substitute(keys_of(with_mean_extents(func))[1].extent, sizes))
    mean = sum(each) / max(count, 1)
    assert guess is not None and abs(guess - mean) <= 1
    assert n < 1000 or mean < 0.55 * -(-n // 32)


def test_with_mean_extents_constant_extents_returns_same_function() -> None:
    sketch, _ = built(make.attention())
    assert with_mean_extents(sketch.func) is sketch.func


@pytest.mark.slow
def test_generate_causal_tiles_are_handed_out_as_uneven() -> None:
    for func, uneven in ((make.causal_attention(), "1"), (make.attention(), "0")):
        text = generate(built(func)[1], CodeTarget("c", 16)).source
        assert re.findall(r"RT_PARALLEL_FOR\(rt_part.*, ([01]), [^,]*\);", text) == [uneven]
