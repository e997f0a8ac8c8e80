"""FlashAttention (Dao et al. 2022) on processors: one kernel for a tile of queries, block by block of keys.

A tile of queries is transposed once, so that vector lanes are queries: scores, maxima, exponentials and sums need no
operation across lanes. Blocks of keys run under a running maximum (`rolling_update`), and their scores stay in cache.
Weighted values of a block are summed in registers of a few queries by vectors of columns, then added to the tile's.

Tests: `tests/schedules/rules/test_causal_attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.ir.core.expr import Tunable, ceildiv, eq, floormod, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.analysis import reductions
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.blocks import loops_of_iter, writer_of
from relax_tune.schedules.rules.shared.flash import (
    SKIPS,
    AttentionRoles,
    Skip,
    find_attention_roles,
    outer_loops,
    value_widths,
    with_last,
)
from relax_tune.schedules.rules.shared.forms import first_applicable
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield one sketch of an attention; none for other functions."""
    if len(reductions(func)) != 4:
        return
    yield from first_applicable(func, "flash_attention", (partial(build, func, hardware, skip) for skip in SKIPS))


def build(func: PrimFunc, hardware: HardwareInfo, skip: Skip = SKIPS[0]) -> Schedule:
    """Schedule tiles of queries and blocks of keys.

    Raises:
        ScheduleError: Unless the function is an attention of constant sizes.
    """
    s = Schedule(func)
    r = find_attention_roles(s)
    lanes = hardware.lanes
    height = s.tunable("MR", (1, 2, 4, 6, 8))
    groups = s.tunable("IU", (2, 4, 8, 16))
    unroll = s.tunable("JU", (2, 4, 8, 16))
    steps = s.tunable("KU", (4, 8, 16, 32))
    width = s.tunable("NR", value_widths(r.width, lanes))
    tile, block = mul(groups, height), mul(steps, unroll)
    s.require(eq(floormod(tile, lanes), 0))
    # Registers of the weighted values: the sums, a row of values, and one broadcast weight.
    s.require(le(height * ceildiv(width, lanes) + ceildiv(width, lanes) + 1, hardware.registers))
    # Registers of the scores: a sum for each key and vector of queries, the queries, and one broadcast element of a
    # key.
    s.require(le(unroll * (tile // lanes) + tile // lanes + 1, hardware.registers))
    # In cache: scores and weights of a block of keys, the transposed queries, and the sums of the values, in float32.
    # The keys and values that stream through have the other half.
    s.require(le(tile * (block * 2 + r.depth + r.width) * 4, hardware.l2_bytes // 2))

    s.cache_read(block=r.product, buffer=r.query, scope="local")
    transposed = writer_of(s, f"{r.query}_cache")
    s.permute_layout(buffer=f"{r.query}_cache", order=with_last(r.query_rank, [r.query_dim]))
    # Whole tiles of queries: lanes are queries, so a partial tile would need a condition in each vector operation.
    s.pad_spatial(block=r.row_max, dim=r.row_max_dim, factor=tile)
    s.split_k_update(block=r.row_max, factor=block)
    for a in s.func.allocs:
        s.set_scope(buffer=a.name, scope="local")

    loops = outer_loops(s, r, tile, skip)
    i_0, key = loops.tile, loops.key_block
    _weighted_values(s, r, key, height, width)
    _exponentials(s, r, key)
    _scores(s, r, key, unroll)
    s.compute_at(transposed, i_0)
    rows = loops_of_iter(s, transposed, i_0, _iter_at(s, transposed, r.query_dim))
    s.reorder([*(n for n in s.inner_loops(transposed, i_0) if n not in rows), *rows])
    for b in blocks(s.func.body):
        inner = s.nest_of(b.name)[-1]
        if inner.kind == "serial":
            s.vectorize(inner.var.name)
    s.set_kind(s.fuse([*loops.outer, i_0]), "group" if hardware.has_grid else "parallel")
    return s


def _weighted_values(s: Schedule, r: AttentionRoles, key: str, height: Tunable, width: Tunable) -> None:
    """Sum a block's weighted values in register tiles of queries by columns, then add them to the tile's."""
    part = f"{r.weighted_values}_rf"
    rows, columns = s.inner_loops(r.weighted_values, key)
    a_0, a_1 = s.split(rows, [None, height])
    c_0, c_1 = s.split(columns, [None, width], divides=True)
    s.reorder([a_0, c_0, a_1, c_1])
    s.compute_at(part, c_0)
    (step,) = loops_of_iter(s, part, c_0, "vt")
    _loops_first(s, part, c_0, "vt", *_other_loops(s, part, c_0, "vt"))
    s.set_tail(step, "peel")
    s.unroll(a_1, s.inner_loops(part, c_0)[1])
    s.decompose_reduction(block=part, loop=step)


def _exponentials(s: Schedule, r: AttentionRoles, key: str) -> None:
    """Compute the weights of a block of keys and their sums in one pass."""
    part = f"{r.row_sum}_rf"
    s.compute_at(part, key)
    _loops_first(s, part, key, "vt", *_other_loops(s, part, key, "vt"))
    (step,) = loops_of_iter(s, part, key, "vt")
    s.decompose_reduction(block=part, loop=step)
    s.compute_at(r.weights, key)
    lanes, keys = (loops_of_iter(s, r.weights, key, v) for v in (r.weight_row, r.weight_key))
    s.reorder([*keys, *lanes])
    # One pass: a weight is added to the sum while it is in a register.
    s.fuse_sibling_loops(keys[0], step)
    s.set_tail(keys[0], "peel")


def _scores(s: Schedule, r: AttentionRoles, key: str, unroll: Tunable) -> None:
    """Compute the scores of a few keys against all queries of the tile in registers, and their maximum with them."""
    part = f"{r.row_max}_rf"
    s.compute_at(part, key)
    m_0, m_1 = s.split(loops_of_iter(s, part, key, "vt")[0], [None, unroll])
    s.reorder([m_0, m_1, *(n for n in s.inner_loops(part, key) if n not in (m_0, m_1))])
    s.decompose_reduction(block=part, loop=m_0)
    s.unroll(m_1)
    s.compute_at(r.scores, key)
    lanes, keys = (loops_of_iter(s, r.scores, key, v)[0] for v in (r.score_row, r.score_key))
    j_0, j_1 = s.split(keys, [None, unroll])
    s.reorder([j_0, j_1, lanes])
    # The maximum of a few scores is taken while they are in registers.
    s.fuse_sibling_loops(j_0, m_0)
    s.set_tail(j_0, "pow2")
    s.unroll(j_1)
    s.compute_at(r.product, j_0)
    steps = [i.var.name for i in find_block(s.func, r.product).iters if i.kind == "reduce"]
    loops = [loops_of_iter(s, r.product, j_0, v)[0] for v in (*steps, r.product_key, r.product_row)]
    s.reorder(loops)
    s.unroll(loops[1])
    s.decompose_reduction(block=r.product, loop=loops[0])


def _iter_at(s: Schedule, block: str, dim: int) -> str:
    """Return the iterator of a copy's dimension `dim`, counted as in its source."""
    return find_block(s.func, block).iters[dim].var.name


def _other_loops(s: Schedule, block: str, loop: str, iterator: str) -> list[str]:
    """Return the loops of a block inside `loop` that do not feed an iterator."""
    feeding = loops_of_iter(s, block, loop, iterator)
    return [n for n in s.inner_loops(block, loop) if n not in feeding]


def _loops_first(s: Schedule, block: str, loop: str, first: str, *rest: str) -> None:
    """Move the loops of the iterator `first` outside the loops `rest`."""
    s.reorder([*loops_of_iter(s, block, loop, first), *rest])
