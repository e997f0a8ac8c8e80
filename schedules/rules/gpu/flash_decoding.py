"""GPU rule for attention of few queries over many keys (decoding), bound by the bytes of keys and values.

The threads of a thread block form rows. For scores, each row has its own keys, and its threads share the depth of a key and add with
shuffles. For weighted values, the threads of a row have columns, and the rows share the keys. Keys and values are loaded once for a
tile of queries.
flash_attention.keys: a thread block processes all keys under a running maximum (FlashAttention, Dao et al. 2022).
flash_decoding: each block of keys has its own thread block, and a second kernel combines the partial results (flash-decoding,
Dao et al. 2023).

Tests: `tests/cuda_emulation/test_few_queries.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from relax_tune.ir.core.expr import Expr, Tunable, ceildiv, const, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.schedules.analysis import reductions
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.blocks import loops_of_iter, writer_of
from relax_tune.schedules.rules.shared.flash import (
    SKIPS,
    AttentionRoles,
    Skip,
    find_attention_roles,
    outer_loops,
    split_kv_loops,
    swap_last_dims,
)
from relax_tune.schedules.rules.shared.forms import first_applicable, try_forms
from relax_tune.schedules.rules.shared.staging import CopyPlan, stage_tile
from relax_tune.schedules.rules.shared.threads import (
    LANES_PER_ROW,
    bind_threads,
    limit_threads,
    reduce_across_threads,
    rfactor_into_scope,
)
from relax_tune.schedules.rules.shared.vectorize import set_kind_of_copies
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

MOST_KEYS = 2048
"""Keys of a block at most."""
MOST_PRODUCTS, MOST_COLUMNS = 64, 32
"""Registers of a thread: products for the scores, and columns of weighted values for all queries of a tile."""
FETCHED = 16
"""Bytes of one load at most."""
MOST_ITEMS = 256
"""Threads of a thread block at most: larger ones wait longer for their rows than they gain."""


@dataclass(frozen=True, slots=True)
class DecodingTile:
    """The tile of a thread block.

    Attributes:
        tx: The threads of a row.
        ty: The rows of threads.
        queries: The queries of a tile.
        together: The keys of a row that are unrolled.
        keys: The keys of a block.
        width: The elements of a vector.
    """

    tx: Tunable
    ty: Tunable
    queries: Tunable
    together: Tunable
    keys: Expr
    width: Tunable


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield both sketches of an attention; none for other functions, and on devices without warp shuffles."""
    if len(reductions(func)) != 4 or not hardware.has_shuffles:
        return
    yield from first_applicable(
        func, "flash_attention.keys", (partial(one_pass, func, hardware, skip) for skip in SKIPS)
    )
    yield from try_forms(func, [("flash_decoding", partial(split_kv, func, hardware))])


def one_pass(func: PrimFunc, hardware: HardwareInfo, skip: Skip = SKIPS[0]) -> Schedule:
    """Process all keys of a tile of queries in one thread block."""
    s = Schedule(func)
    r, tile, queries = _prepare_tiles(s, hardware, (1, 2))
    nest = outer_loops(s, r, tile.queries, skip)
    i_0, step = nest.tile, nest.key_block
    for name in (f"{r.weighted_values}_rf", f"{r.row_sum}_rf", r.weights, f"{r.row_max}_rf", r.scores):
        s.compute_at(name, step)
    _block_of_keys(s, r, step, tile)
    _stage_queries(s, queries, i_0, tile)
    for name, loop in ((f"{r.weighted_values}_init", i_0), (r.weighted_values, step), (r.output, i_0)):
        if name == r.weighted_values:
            _columns_per_thread(s, name, s.inner_loops(name, step)[-1], tile)
        _bind_columns(s, name, loop, tile)
    for a in s.func.allocs:
        if a.scope == "global":
            s.set_scope(buffer=a.name, scope="local")
    _unroll_queries(s, tile)
    s.bind(i_0, "group")
    if nest.outer:
        s.bind(s.fuse(nest.outer), "group", 1)
    s.guess(_guess(s, r, hardware))
    return s


def split_kv(func: PrimFunc, hardware: HardwareInfo) -> Schedule:
    """Give each block of keys of a tile of queries a thread block; combine the partial results in a second kernel."""
    s = Schedule(func)
    r, tile, queries = _prepare_tiles(s, hardware, (1, 2, 4, 8))
    partials = {name: s.buffer_of(f"{name}_rf").name for name in (r.row_max, r.row_sum, r.weighted_values)}
    *outer, i_0, step = split_kv_loops(s, r, tile.queries)
    _block_of_keys(s, r, step, tile)
    _stage_queries(s, queries, step, tile)
    _bind_columns(s, writer_of(s, partials[r.weighted_values]), step, tile)
    for name in partials:
        s.set_scope(buffer=s.buffer_of(f"{name}_rf").name, scope="local")
    _unroll_queries(s, tile)
    s.bind(step, "group", 0)
    s.bind(i_0, "group", 1)
    if outer:
        s.bind(s.fuse(outer), "group", 2)
    _combine_kernel(s, r, hardware)
    s.guess({**_guess(s, r, hardware), "TC": min(128, max(s.tunables["TC"].domain))})
    return s


def _prepare_tiles(
    s: Schedule, hardware: HardwareInfo, rounds: Sequence[int]
) -> tuple[AttentionRoles, DecodingTile, str]:
    """Split the keys into blocks and pad the queries to tiles.

    Args:
        rounds: The options for the keys of a thread in a block.

    Returns:
        The roles, the tile, and the block that stages the queries.
    """
    r = find_attention_roles(s)
    least = max(1, hardware.warp // LANES_PER_ROW[-1])
    tx = s.tunable("TX", LANES_PER_ROW)
    ty = s.tunable("TY", [n for n in (1, 2, 4, 8, 16, 32) if least <= n <= max(hardware.group_size // 4, least)])
    queries, together = s.tunable("MR", (1, 2, 4, 8)), s.tunable("KU", (1, 2, 4))
    keys = mul(mul(s.tunable("KR", rounds), ty), tx)
    product = find_block(s.func, r.product)
    size = max(x.buffer.dtype.bytes for x in block_loads(product) if x.buffer is not product.body.buffer)
    most = min(hardware.lanes * 4, FETCHED) // size
    widths = [w for w in (1, 2, 4, 8) if w <= most and r.depth % w == 0 and r.width % w == 0]
    width = s.tunable("VL", widths)
    limit_threads(s, hardware, mul(tx, ty))
    s.require(le(mul(tx, ty), const(MOST_ITEMS)))
    s.require(le(keys, const(MOST_KEYS)))
    s.require(le(mul(tx, width), const(max(r.depth, r.width, LANES_PER_ROW[0]))))
    s.require(le(mul(mul(queries, together), width), const(MOST_PRODUCTS)))
    s.require(le(mul(queries, ceildiv(const(r.width), tx)), const(MOST_COLUMNS)))
    for name in (r.product, r.scores, r.weights):
        swap_last_dims(s, s.buffer_of(name).name)
    (staged,) = s.cache_read(block=r.product, buffer=r.query, scope="shared")
    s.pad_spatial(block=r.row_max, dim=r.row_max_dim, factor=queries)
    s.split_k_update(block=r.row_max, factor=keys)
    return r, DecodingTile(tx, ty, queries, together, keys, width), staged


def _stage_queries(s: Schedule, block: str, loop: str, tile: DecodingTile) -> None:
    """Stage the queries of a thread block: its threads copy the elements of each query in turn."""
    plan = CopyPlan((tile.ty, tile.tx))

    def spread(name: str, copy_loops: list[str]) -> None:
        *rows, depth = copy_loops
        rounds, *threads = s.split(depth, [None, *plan.threads])
        s.reorder([*threads, *rows, rounds])
        bind_threads(s, threads)

    stage_tile(s, block, loop, plan, spread=spread)


def _block_of_keys(s: Schedule, r: AttentionRoles, step: str, tile: DecodingTile) -> None:
    """Compute a block of keys, from the scores to the weighted values, inside the loop `step`."""
    together = _scores(s, r, step, tile)
    for name in (f"{r.row_max}_rf", f"{r.row_sum}_rf"):
        (keys,) = loops_of_iter(s, name, step, "vt")
        rows = [n for n in s.inner_loops(name, step) if n != keys]
        rounds, *item, single = s.split(keys, [None, tile.ty, tile.tx, 1])
        s.reorder([*item, rounds, *rows, single])
        reduce_across_threads(s, name, item, single, rows=rows)
    weight_loops = s.inner_loops(r.weights, step)
    (keys,) = loops_of_iter(s, r.weights, step, r.weight_key)
    rounds, *item = s.split(keys, [None, tile.ty, tile.tx])
    s.reorder([*item, rounds, *(n for n in weight_loops if n != keys)])
    bind_threads(s, item)
    _sum_values(s, r, step, tile)
    set_kind_of_copies(s, {together: "unrolled"})
    for name in (r.scores, r.weights):
        s.set_scope(buffer=s.buffer_of(name).name, scope="shared")


def _scores(s: Schedule, r: AttentionRoles, step: str, tile: DecodingTile) -> str:
    """Give each row of threads consecutive keys, with their products unrolled; return the loop over these keys."""
    (keys,) = loops_of_iter(s, r.scores, step, r.score_key)
    (rows,) = loops_of_iter(s, r.scores, step, r.score_row)
    rounds, item, together = s.split(keys, [None, tile.ty, tile.together])
    s.reorder([rounds, item, rows, together])
    score_loops = s.compute_at(r.product, item)
    depth = next(i.var.name for i in find_block(s.func, r.product).iters if i.kind == "reduce")
    (d,) = loops_of_iter(s, r.product, item, depth)
    vectors, lanes = s.split(d, [None, tile.width], divides=True)
    times, across = s.split(vectors, [None, tile.tx])
    each = [n for n in score_loops if n != d]
    s.reorder([across, times, *each, lanes])
    rfactor_into_scope(s, rfactor_into_scope(s, r.product, across, "warp"), lanes, "local")
    s.bind(across, "item", 0)
    left, *copies = s.inner_loops(r.product, item)
    s.reorder([*copies, left])
    s.decompose_reduction(block=r.product, loop=left)
    set_kind_of_copies(s, {n: "unrolled" for n in (times, *each)})
    s.set_scope(buffer=s.buffer_of(r.product).name, scope="local")
    s.bind(item, "item", 1)
    return together


def _sum_values(s: Schedule, r: AttentionRoles, step: str, tile: DecodingTile) -> None:
    """Sum weighted values: the threads of a row have vectors of columns; rows share the keys and add through shared memory."""
    part = f"{r.weighted_values}_rf"
    (keys,) = loops_of_iter(s, part, step, "vt")
    *rows, columns = [n for n in s.inner_loops(part, step) if n != keys]
    _columns_per_thread(s, part, columns, tile)
    vectors, lanes = s.split(columns, [None, tile.width], divides=True)
    times, across = s.split(vectors, [None, tile.tx])
    rounds, item, single = s.split(keys, [None, tile.ty, 1])
    s.reorder([across, item, rounds, *rows, times, single, lanes])
    partial = rfactor_into_scope(s, part, item, "shared")
    of_item = rfactor_into_scope(s, partial, single, "local", "serial")
    for name, extra in ((of_item, 2), (partial, 1)):
        left = s.buffer_of(name)
        rank = len(left.shape)
        s.permute_layout(buffer=left.name, order=[*range(rank - extra, rank), *range(rank - extra)])
    s.bind(item, "item", 1)
    s.decompose_reduction(block=part, loop=s.inner_loops(part, across)[0])
    set_kind_of_copies(s, {lanes: "vectorized", single: "unrolled", **{n: "unrolled" for n in (*rows, times)}})
    s.bind(across, "item", 0)


def _columns_per_thread(s: Schedule, block: str, columns: str, tile: DecodingTile) -> None:
    """Tile the layout of a block's output, so that the columns of each thread are contiguous."""
    node = find_block(s.func, block)
    column = next(i.var for i, b in zip(node.iters, node.bindings) if columns in [v.name for v in free_vars(b)])
    dim, rank = node.body.indices.index(column), len(node.body.indices)
    for more, factor in enumerate((tile.width, tile.tx), 1):
        s.tile_layout(buffer=node.body.buffer.name, dim=dim, factor=factor, order=[*range(rank + more)])


def _bind_columns(s: Schedule, block: str, loop: str, tile: DecodingTile) -> None:
    """Bind the columns of a block to the threads of a row, as vectors, and unroll its rows."""
    *rows, columns = [n for n in s.inner_loops(block, loop) if n not in loops_of_iter(s, block, loop, "vb")]
    vectors, lanes = s.split(columns, [None, tile.width], divides=True)
    times, across = s.split(vectors, [None, tile.tx])
    s.reorder([across, *rows, times, lanes])
    s.unroll(*rows, times)
    s.vectorize(lanes)
    s.bind(across, "item", 0)


def _unroll_queries(s: Schedule, tile: DecodingTile) -> None:
    """Unroll the loops over the queries of a tile, so that their values stay in registers."""
    for p in loops(s.func.body):
        if p.kind == "serial" and p.extent is tile.queries:
            s.unroll(p.var.name)


def _combine_kernel(s: Schedule, r: AttentionRoles, hardware: HardwareInfo) -> None:
    """Build the second kernel: threads have columns, and rescale and add the partial results of every block of keys."""
    items = s.tunable("TC", [n for n in (32, 64, 128, 256) if n <= hardware.group_size] or [hardware.group_size])
    limit_threads(s, hardware, items)
    s.compute_inline(f"{r.row_max}_scale")
    last = find_block(s.func, r.output)
    nest = s.iter_loops(r.output)
    query, column = nest[r.row], nest[last.iters[-1].var]
    *outer, _ = (name for v, name in nest.items() if v is not r.row)
    s.reorder([*outer, query, column])
    rounds, item = s.split(column, [None, items])
    s.reorder([item, rounds])
    s.compute_at(r.weighted_values, rounds)
    for name in (r.row_sum, r.row_max):
        s.compute_at(name, query)
    for name in (r.weighted_values, r.row_sum, r.row_max):
        s.set_scope(buffer=s.buffer_of(name).name, scope="local")
        s.decompose_reduction(block=name, loop=loops_of_iter(s, name, query, "vb")[0])
    s.bind(item, "item", 0)
    s.bind(query, "group", 0)
    if outer:
        s.bind(s.fuse(outer), "group", 1)


def _guess(s: Schedule, r: AttentionRoles, hardware: HardwareInfo) -> dict[str, int]:
    """Guess the widest vectors, rows of threads that cover a key once, and about four warps a thread block."""
    width = max(s.tunables["VL"].domain)
    row = max((n for n in LANES_PER_ROW if n * width <= min(r.depth, r.width)), default=LANES_PER_ROW[0])
    rows = max(n for n in s.tunables["TY"].domain if n * row <= max(128, hardware.warp))
    return {"TX": row, "TY": rows, "MR": 1, "KU": 2, "KR": 2, "VL": width}
