"""GPU rule for attention in one kernel (FlashAttention, Dao et al. 2022) on scalar arithmetic.

Blocks of keys are processed under a running row maximum and sum (online softmax, Milakov and Gimelshein 2018).
queries: each thread has one query, whose sums stay in its registers. Blocks of keys and values are staged in shared memory, keys
transposed so that vectors of keys are contiguous.
keys: a thread block has one query. Its threads have the keys of a block for the weights, and the columns of the values for the
weighted sums. It serves devices without warp shuffles; `flash_decoding.py` serves the others.

Tests: `tests/schedules/rules/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Tunable, as_int, const, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import For, statements
from relax_tune.schedules.analysis import reductions
from relax_tune.schedules.loop_tree import block_loads, find_block, find_loop
from relax_tune.schedules.rules.shared.blocks import loops_of_iter
from relax_tune.schedules.rules.shared.flash import (
    SKIPS,
    AttentionRoles,
    Skip,
    find_attention_roles,
    other_operand,
    outer_loops,
    swap_last_dims,
)
from relax_tune.schedules.rules.shared.forms import first_applicable
from relax_tune.schedules.rules.shared.staging import CopyPlan, copy_rows, share_accesses, stage_tile
from relax_tune.schedules.rules.shared.threads import limit_threads
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketches of an attention; none for other functions."""
    if len(reductions(func)) != 4:
        return
    # With warp shuffles, `flash_decoding` makes the form `keys`.
    forms = [("queries", _queries)] if hardware.has_shuffles else [("queries", _queries), ("keys", _keys)]
    for name, make in forms:
        yield from first_applicable(
            func, f"flash_attention.{name}", (partial(make, func, hardware, skip) for skip in SKIPS)
        )


def _queries(func: PrimFunc, hardware: HardwareInfo, skip: Skip = SKIPS[0]) -> Schedule:
    """Give each of TX threads one query; a block of keys has KU vectors."""
    s = Schedule(func)
    r = find_attention_roles(s)
    lanes = min(4, hardware.lanes)
    items = s.tunable("TX", [n for n in (32, 64, 128, 256) if n <= hardware.group_size])
    keys = mul(s.tunable("KU", (1, 2, 4, 8)), lanes)
    width = s.tunable("NR", [w for w in (4, 8, 16) if r.width % w == 0] or [1])
    limit_threads(s, hardware, items)
    # the code that is unrolled for a block of keys takes long to compile
    s.require(le(mul(keys, const(r.width)), const(1 << 10)))
    for name in (r.product, r.scores, r.weights):
        swap_last_dims(s, s.buffer_of(name).name)
    value = other_operand(s, r.weighted_values, s.buffer_of(r.weights).name)
    queries = _stage_input(s, r.product, r.query)
    swap_last_dims(s, s.buffer_of(queries).name)
    s.pad_spatial(block=r.row_max, dim=r.row_max_dim, factor=items)
    s.split_k_update(block=r.row_max, factor=keys)
    key_block = _pad_key_blocks(s, r.product, keys)
    swap_last_dims(s, s.buffer_of(key_block).name)
    values = _stage_input(s, f"{r.weighted_values}_rf", value)

    nest = outer_loops(s, r, items, skip)
    i_0, step = nest.tile, nest.key_block
    row = _fuse_over_queries(s, step)
    _compute_key_block(s, r, row, width)
    _stage(s, values, step, items, lanes)
    _stage(s, key_block, step, items, lanes, transposed=True)
    _stage(s, queries, i_0, items, lanes, transposed=True)
    starts = [f"{name}_init" for name in (r.weighted_values, r.row_sum, r.row_max)]
    rows = [row, *(s.inner_loops(name, i_0)[0] for name in (*starts, r.output))]
    for name in (starts[0], r.output):
        c_0, c_1 = s.split(s.inner_loops(name, i_0)[-1], [None, width], divides=True)
        s.unroll(c_0)
        s.vectorize(c_1)
    for name in rows:
        s.bind(name, "item")
    for a in s.func.allocs:
        if a.scope == "global":
            s.set_scope(buffer=a.name, scope="local")
    s.guess({"TX": 64, "KU": 4, "NR": width.domain[-1]})
    s.bind(i_0, "group")
    if nest.outer:
        s.bind(s.fuse(nest.outer), "group", 1)
    return s


def _keys(func: PrimFunc, hardware: HardwareInfo, skip: Skip = SKIPS[0]) -> Schedule:
    """Give each query a thread block; a block of keys has one key for each of TX threads."""
    s = Schedule(func)
    r = find_attention_roles(s)
    items = s.tunable("TX", [n for n in (32, 64, 128, 256) if n <= hardware.group_size])
    limit_threads(s, hardware, items)
    s.split_k_update(block=r.row_max, factor=items)
    nest = outer_loops(s, r, None, skip)
    query, step = nest.tile, nest.key_block
    part = f"{r.weighted_values}_rf"
    for name in (part, f"{r.row_sum}_rf", r.weights, f"{r.row_max}_rf", r.scores, r.product):
        s.compute_at(name, step)
    for name, loop in (
        (f"{r.weighted_values}_init", query),
        (part, step),
        (r.weighted_values, step),
        (r.output, query),
    ):
        block_loops = s.inner_loops(name, loop)
        steps = loops_of_iter(s, name, loop, "vt")
        (columns,) = [n for n in block_loops if n not in steps]
        several, item = s.split(columns, [None, items])
        s.reorder([item, several, *steps])
        s.unroll(several)
        s.bind(item, "item")
    for name in (part, f"{r.row_sum}_rf", f"{r.row_max}_rf"):
        s.decompose_reduction(block=name, loop=loops_of_iter(s, name, step, "vt")[0])
    depth = next(i.var.name for i in find_block(s.func, r.product).iters if i.kind == "reduce")
    (d,) = loops_of_iter(s, r.product, step, depth)
    s.reorder([*(n for n in s.inner_loops(r.product, step) if n != d), d])
    s.decompose_reduction(block=r.product, loop=d)
    for name in (r.product, r.scores, r.weights):
        s.bind(s.inner_loops(name, step)[0], "item")
    shared = {s.buffer_of(name).name for name in (r.scores, r.weights)}
    for a in s.func.allocs:
        s.set_scope(buffer=a.name, scope="shared" if a.name in shared else "local")
    s.bind(query, "group")
    if nest.outer:
        s.bind(s.fuse(nest.outer), "group", 1)
    s.guess({"TX": 64})
    return s


def _compute_key_block(s: Schedule, r: AttentionRoles, row: str, width: Tunable) -> None:
    """Compute a block of keys for one query in registers, from the scores to the weighted values.

    Args:
        width: The columns of the values that are summed at a time.
    """
    part = f"{r.weighted_values}_rf"
    c_0, _ = s.split(s.inner_loops(r.weighted_values, row)[-1], [None, width], divides=True)
    s.compute_at(part, c_0)
    (step,) = loops_of_iter(s, part, c_0, "vt")
    lanes = [n for n in s.inner_loops(part, c_0) if n != step]
    s.reorder([step, *lanes])
    s.decompose_reduction(block=part, loop=step)
    for name in (f"{r.row_sum}_rf", r.weights, f"{r.row_max}_rf", r.scores, r.product):
        s.compute_at(name, row)
    for name in (f"{r.row_sum}_rf", f"{r.row_max}_rf"):
        (step_,) = s.inner_loops(name, row)
        s.decompose_reduction(block=name, loop=step_)
        s.unroll(step_)
    depth = [i.var.name for i in find_block(s.func, r.product).iters if i.kind == "reduce"]
    (d,) = loops_of_iter(s, r.product, row, depth[0])
    s.reorder([d, *(n for n in s.inner_loops(r.product, row) if n != d)])
    s.decompose_reduction(block=r.product, loop=d)
    for name in (r.product, f"{r.product}_init", part, f"{part}_init", r.weighted_values):
        s.vectorize(s.inner_loops(name, row)[-1])
    for name in (r.scores, r.weights):  # the last block may have fewer keys
        s.unroll(s.inner_loops(name, row)[-1])
    s.unroll(step, c_0)


def _pad_key_blocks(s: Schedule, product: str, keys: Expr) -> str:
    """Pad the keys with zeros to whole blocks; return the block that stages them in shared memory."""
    node = find_block(s.func, product)
    factors = [keys if i.var is node.body.indices[-1] else None for i in node.iters]
    padded = [find_block(s.func, n) for n in s.pad(block=product, factors=factors)]
    operands = {x.buffer for x in block_loads(find_block(s.func, product))}
    staged = [b for b in padded if b.body.buffer in operands]
    if len(staged) != 1:
        raise ScheduleError(f"{s.func.name}: expected one operand with keys, got {len(staged)}")
    for b in padded:
        if b is not staged[0]:
            s.compute_inline(b.name)
    s.set_scope(buffer=staged[0].body.buffer.name, scope="shared")
    return staged[0].name


def _fuse_over_queries(s: Schedule, step: str) -> str:
    """Fuse the stages of a block of keys into one loop over queries, and return it."""
    body = find_loop(s.func, step).body
    siblings = [p.var.name for p in statements(body) if isinstance(p, For)]
    for other in siblings[1:]:
        s.fuse_sibling_loops(siblings[0], other)
    return siblings[0]


def _stage_input(s: Schedule, block: str, buffer: str) -> str:
    """Return a new block that copies an input of a block to shared memory."""
    (copy,) = s.cache_read(block=block, buffer=buffer, scope="shared")
    return copy


def _stage(s: Schedule, block: str, loop: str, threads: Tunable, lanes: int, transposed: bool = False) -> None:
    """Stage the elements that an iteration of `loop` reads, in vectors where these divide its rows.

    Args:
        transposed: The rows become columns, padded so that consecutive threads write to different banks.
    """

    def spread(name: str, copy_loops: list[str]) -> None:
        *front, fast = copy_loops
        extent = as_int(s.extent(fast))
        width = lanes if extent is not None and extent % lanes == 0 else 1
        plan = CopyPlan((threads,), width, whole=True)
        if not transposed:
            copy_rows(s, name, front, fast, plan)
            return
        vectors, vector = s.split(fast, [None, width], divides=True)
        s.storage_align(buffer=s.buffer_of(name).name, factor=1, offset=lanes)
        s.reorder([vectors, *front])
        share_accesses(s, name, [vectors, *front], vector, plan)

    stage_tile(s, block, loop, CopyPlan((threads,), whole=True), spread=spread)
