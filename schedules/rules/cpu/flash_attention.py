"""Attention in one kernel: products, softmax and weighted sums of a tile of queries, block by block of keys.

A tile of queries is turned once, so that queries are the lanes: scores, maxima, exponentials and their sums then need nothing
across lanes. Keys come in blocks with a running maximum (`rolling_update`), whose scores stay in cache; a block's weighted values
are summed in registers of a few queries by vectors of columns, and added to what the tile has so far.
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
    find_attention_roles,
    outer_loops,
    value_widths,
    with_last,
)
from relax_tune.schedules.rules.shared.forms import first_applicable
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Every sketch of an attention; nothing when the function is none."""
    if len(reductions(func)) != 4:
        return
    yield from first_applicable("flash_attention", (partial(build, func, machine, skip) for skip in SKIPS))


def build(func: PrimFunc, machine: HardwareInfo, skip: str = SKIPS[0]) -> Schedule:
    """Tiles of queries, keys in blocks. Raises ScheduleError where the function is no attention of known widths."""
    s = Schedule(func)
    r = find_attention_roles(s)
    lanes = machine.lanes
    height = s.tunable("MR", (1, 2, 4, 6, 8))
    groups = s.tunable("IU", (2, 4, 8, 16))
    unroll = s.tunable("JU", (2, 4, 8, 16))
    steps = s.tunable("KU", (4, 8, 16, 32))
    width = s.tunable("NR", value_widths(r.width, lanes))
    tile, block = mul(groups, height), mul(steps, unroll)
    s.require(eq(floormod(tile, lanes), 0))
    s.require(le(height * ceildiv(width, lanes) + ceildiv(width, lanes) + 1, machine.registers))
    s.require(le(unroll * (tile // lanes) + tile // lanes + 1, machine.registers))
    s.require(le(tile * (block * 2 + r.depth + r.width) * 4, machine.l2_bytes // 2))

    s.apply("cache_read", block=r.product, buffer=r.query, scope="local")
    turned = writer_of(s, f"{r.query}_cache")
    s.apply("permute_layout", buffer=f"{r.query}_cache", order=with_last(r.query_rank, [r.query_dim]))
    s.apply("pad_spatial", block=r.row_max, dim=r.row_max_dim, factor=tile)
    s.apply("split_k_update", block=r.row_max, factor=block)
    for a in s.func.allocs:
        s.apply("set_scope", buffer=a.name, scope="local")

    loops = outer_loops(s, r, tile, skip)
    i_0, key = loops.tile, loops.key_block
    _weighted_values(s, r, key, height, width)
    _exponentials(s, r, key)
    _scores(s, r, key, unroll)
    s.compute_at(turned, i_0)
    rows = loops_of_iter(s, turned, i_0, _iter_at(s, turned, r.query_dim))
    s.reorder([*(n for n in s.inner_loops(turned, i_0) if n not in rows), *rows])
    for b in blocks(s.func.body):
        inner = s.nest_of(b.name)[-1]
        if inner.kind == "serial":
            s.vectorize(inner.var.name)
    s.set_kind(s.fuse([*loops.outer, i_0]), "group" if machine.has_grid else "parallel")
    return s


def _weighted_values(s: Schedule, r: AttentionRoles, key: str, height: Tunable, width: Tunable) -> None:
    """A block's weighted values in registers of a few queries by vectors of columns, then added to those of the tile."""
    part = f"{r.weighted_values}_rf"
    rows, columns = s.inner_loops(r.weighted_values, key)
    a_0, a_1 = s.split(rows, [None, height])
    c_0, c_1 = s.split(columns, [None, width], divides=True)
    s.reorder([a_0, c_0, a_1, c_1])
    s.compute_at(part, c_0)
    (step,) = loops_of_iter(s, part, c_0, "vt")
    _order(s, part, c_0, "vt", *_others(s, part, c_0, "vt"))
    s.set_tail(step, "peel")
    for loop in (a_1, s.inner_loops(part, c_0)[1]):
        s.unroll(loop)
    s.apply("decompose_reduction", block=part, loop=step)


def _exponentials(s: Schedule, r: AttentionRoles, key: str) -> None:
    """The weights of a block of keys and their sums in one pass."""
    part = f"{r.row_sum}_rf"
    s.compute_at(part, key)
    _order(s, part, key, "vt", *_others(s, part, key, "vt"))
    (step,) = loops_of_iter(s, part, key, "vt")
    s.apply("decompose_reduction", block=part, loop=step)
    s.compute_at(r.weights, key)
    lanes, keys = (loops_of_iter(s, r.weights, key, v) for v in (r.weight_row, r.weight_key))
    s.reorder([*keys, *lanes])
    s.fuse_sibling_loops(keys[0], step)
    s.set_tail(keys[0], "peel")


def _scores(s: Schedule, r: AttentionRoles, key: str, unroll: Tunable) -> None:
    """A few keys at a time against all queries of the tile in registers; their maximum while they are there."""
    part = f"{r.row_max}_rf"
    s.compute_at(part, key)
    m_0, m_1 = s.split(loops_of_iter(s, part, key, "vt")[0], [None, unroll])
    s.reorder([m_0, m_1, *(n for n in s.inner_loops(part, key) if n not in (m_0, m_1))])
    s.apply("decompose_reduction", block=part, loop=m_0)
    s.unroll(m_1)
    s.compute_at(r.scores, key)
    lanes, keys = (loops_of_iter(s, r.scores, key, v)[0] for v in (r.score_row, r.score_key))
    j_0, j_1 = s.split(keys, [None, unroll])
    s.reorder([j_0, j_1, lanes])
    s.fuse_sibling_loops(j_0, m_0)
    s.set_tail(j_0, "pow2")
    s.unroll(j_1)
    s.compute_at(r.product, j_0)
    steps = [i.var.name for i in find_block(s.func, r.product).iters if i.kind == "reduce"]
    loops = [loops_of_iter(s, r.product, j_0, v)[0] for v in (*steps, r.product_key, r.product_row)]
    s.reorder(loops)
    s.unroll(loops[1])
    s.apply("decompose_reduction", block=r.product, loop=loops[0])


def _iter_at(s: Schedule, block: str, dim: int) -> str:
    """The iterator of a copy's dimension, as its source has them."""
    return find_block(s.func, block).iters[dim].var.name


def _others(s: Schedule, block: str, loop: str, iterator: str) -> list[str]:
    """The loops of the block inside `loop` that do not feed an iterator."""
    own = loops_of_iter(s, block, loop, iterator)
    return [n for n in s.inner_loops(block, loop) if n not in own]


def _order(s: Schedule, block: str, loop: str, first: str, *rest: str) -> None:
    """The loops of an iterator first."""
    s.reorder([*loops_of_iter(s, block, loop, first), *rest])
