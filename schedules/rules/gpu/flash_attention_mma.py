"""GPU rule for attention of many queries in 16-bit floats on tensor cores, with `mma` of a warp (`relax_tune.ir.hardware.mma`).

The algorithm is FlashAttention (Dao et al. 2022); each warp has its own rows of queries. Blocks of keys and values are staged in shared
memory and padded with zeros, so that only the scores need a condition. Scores stay in registers as the accumulator fragments of `mma`
(PTX ISA, mma.m16n8k16): in each fragment, a thread holds two consecutive keys of two queries. Four consecutive threads share a query and
exchange maxima and sums with shuffles. The weights are the left operand of the second product, whose sums stay in registers.

Tests: `tests/schedules/rules/gpu/test_mma.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Expr, Tunable, Var, as_int, const, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import LoopKind
from relax_tune.ir.hardware.mma import COLUMNS, ROWS, STEPS
from relax_tune.schedules.analysis import reductions
from relax_tune.schedules.loop_tree import block_loads, find_alloc, find_block
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
from relax_tune.schedules.rules.shared.mma_tiles import (
    EACH,
    HIGH,
    MMA_CAPABILITY,
    MOST_SUMS,
    VECTOR,
    WIDE,
    fragment_layout,
)
from relax_tune.schedules.rules.shared.staging import CopyPlan, PipelineRing, stage_tile
from relax_tune.schedules.rules.shared.threads import limit_threads, reduce_across_threads
from relax_tune.schedules.rules.shared.vectorize import set_kind_of_copies
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

WARPS = (1, 2, 4, 8)
TILES = (1, 2)
"""Tiles of 16 queries that a warp has."""
KEY_TILES = (1, 2, 4)
"""Tiles of 16 keys of a block, for each warp of the thread block."""
STAGES = (2, 3)
"""Blocks of keys in shared memory at once."""


@dataclass(frozen=True, slots=True)
class QueryTile:
    """The tile of a thread block.

    Attributes:
        warps: The number of warps.
        high: The tiles of 16 queries of each warp.
        keys: The tiles of 16 keys of a block, for each warp.
    """

    warps: Tunable
    high: Tunable
    keys: Tunable

    @property
    def rows(self) -> Expr:
        return mul(mul(self.warps, self.high), ROWS)

    @property
    def block(self) -> Expr:
        return mul(mul(self.keys, self.warps), ROWS)


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield one sketch of an attention in 16-bit floats; none for other functions, and on devices without `mma.m16n8k16`."""
    if hardware.capability >= MMA_CAPABILITY and len(reductions(func)) == 4:
        # proving the first block of a sliding window takes long for the layout of fragments
        yield from first_applicable(
            func, "flash_attention.mma", (partial(build, func, hardware, skip) for skip in SKIPS[1:])
        )


def build(func: PrimFunc, hardware: HardwareInfo, skip: Skip = SKIPS[1]) -> Schedule:
    """Schedule an attention on tensor cores.

    Args:
        skip: One of SKIPS.

    Raises:
        ScheduleError: Where the function is no attention in 16-bit floats, or has few queries.
    """
    s = Schedule(func)
    r = find_attention_roles(s)
    weights = s.buffer_of(r.weights).name
    dtype = _operand_dtype(s, r)
    tile = QueryTile(s.tunable("WM", WARPS), s.tunable("MT", TILES), s.tunable("KT", KEY_TILES))
    stages = s.tunable("STAGES", STAGES)
    limit_threads(s, hardware, mul(tile.warps, HIGH * WIDE))
    # Scores and weighted values are in registers at the same time: each may take half of them.
    s.require(le(mul(tile.high, mul(mul(tile.keys, tile.warps), 2 * ROWS // WIDE)), const(MOST_SUMS // 2)))
    s.require(le(mul(tile.high, 2 * r.width // WIDE), const(MOST_SUMS // 2)))
    for name in (r.product, r.scores, r.weights):
        swap_last_dims(s, s.buffer_of(name).name)
    key = other_operand(s, r.product, r.query)
    staged = [s.cache_read(block=r.product, buffer=x, scope="shared")[0] for x in (r.query, key)]
    s.pad_spatial(block=r.row_max, dim=r.row_max_dim, factor=tile.rows)
    staged += s.pad_softmax_axis(block=r.row_max, factor=tile.block)
    s.set_scope(buffer=s.buffer_of(staged[-1]).name, scope="shared")
    s.split_k_update(block=r.row_max, factor=tile.block)
    parts = _computing_blocks(s, r)

    nest = outer_loops(s, r, tile.rows, skip)
    i_0, step = nest.tile, nest.key_block
    for name in (f"{r.weighted_values}_rf", f"{r.row_sum}_rf", r.weights, f"{r.row_max}_rf", r.scores, r.product):
        s.compute_at(name, step)
    _stage(s, staged[0], i_0, tile)
    for copy in staged[1:]:
        _stage(s, copy, step, tile, stages)
    places = {s.buffer_of(x.name).name: x for x in parts if x.name != r.output}
    for x in parts:
        loop = i_0 if x.name == r.output or x.name.endswith("_init") else step
        known = {a.name for a in s.func.allocs}
        _distribute(s, x, loop, tile, f"mma_{dtype}_{x.form}")
        places |= {a.name: x for a in s.func.allocs if a.name not in known}
    for buffer, x in places.items():
        fragment_layout(s, buffer, x.row, x.column)
        if buffer == weights:  # the operand of `mma` is distributed over the threads of a warp
            swap_last_dims(s, buffer)
            s.set_scope(buffer=buffer, scope="warp")
        elif find_alloc(s.func, buffer).scope == "global":
            s.set_scope(buffer=buffer, scope="local")
    s.guess(*({"WM": w, "MT": 1, "KT": k, "STAGES": 2} for w, k in ((4, 1), (2, 2), (2, 1), (1, 1))))
    s.bind(i_0, "group")
    if nest.outer:
        s.bind(s.fuse(nest.outer), "group", 1)
    return s


@dataclass(frozen=True, slots=True)
class TiledBlock:
    """A block of the kernel, and the dimensions of its output.

    Attributes:
        name: The name of the block.
        row: The dimension of queries.
        column: The dimension of keys or of the values' columns, if any.
        over: The reduction iterator, for a reduction over keys or depth.
        form: The transposition of the operands, for a product.
        masked: The block has a condition on the key, so that it is unrolled and not vectorised.
    """

    name: str
    row: int
    column: int | None = None
    over: str = ""
    form: str = ""
    masked: bool = False


def _computing_blocks(s: Schedule, r: AttentionRoles) -> list[TiledBlock]:
    """Return every block that computes; products and reductions over keys come last, since they add blocks."""
    last = find_block(s.func, r.output)
    indices = {x.buffer: x.indices for x in block_loads(last)}
    at_total, at_context = (indices[s.buffer_of(n)] for n in (r.row_sum, r.weighted_values))
    total, context = at_total.index(r.row), at_context.index(r.row)
    column = at_context.index(last.body.indices[-1])
    (depth,) = (i.var.name for i in find_block(s.func, r.product).iters if i.kind == "reduce")
    keys = len(find_block(s.func, r.weights).body.indices) - 1
    return [
        *(
            TiledBlock(f"{r.row_max}{x}", r.row_max_dim + (x in ("_scale", "_factor")))
            for x in ("", "_init", "_scale", "_factor")
        ),
        *(TiledBlock(f"{r.row_sum}{x}", total) for x in ("", "_init")),
        *(TiledBlock(f"{r.weighted_values}{x}", context, column) for x in ("", "_init")),
        TiledBlock(r.scores, keys - 1, keys, masked=True),
        TiledBlock(r.weights, keys - 1, keys),
        TiledBlock(r.output, last.body.indices.index(r.row), len(last.body.indices) - 1),
        TiledBlock(f"{r.row_max}_rf", r.row_max_dim + 1, None, "vt"),
        TiledBlock(f"{r.row_sum}_rf", total + 1, None, "vt"),
        TiledBlock(r.product, keys - 1, keys, depth, "nt"),
        TiledBlock(f"{r.weighted_values}_rf", context + 1, column + 1, "vt", "on"),
    ]


def _operand_dtype(s: Schedule, r: AttentionRoles) -> DType:
    """Return the 16-bit type of all operands of both products.

    Raises:
        ScheduleError: For other types, for sizes that are no multiples of the tiles, and for few queries.
    """
    product, context = (find_block(s.func, name) for name in (r.product, r.weighted_values))
    types = {x.buffer.dtype for b in (product, context) for x in block_loads(b) if x.buffer is not b.body.buffer}
    rows = next(i.extent for i in find_block(s.func, r.output).iters if i.var is r.row)
    known = as_int(rows)
    if len(types) != 1 or not (dtype := types.pop()).is_half:
        raise ScheduleError(f"{s.func.name}: expected products of 16-bit floats, got {sorted(map(repr, types))}")
    if r.depth % STEPS or r.width % STEPS or (known is not None and known <= HIGH):
        raise ScheduleError(
            f"{s.func.name}: expected queries and values of whole {STEPS} elements, and more than {HIGH} queries, "
            f"got {r.depth}, {r.width} and {rows!r}"
        )
    return dtype


def _loop(s: Schedule, x: TiledBlock, dim: int, inside: str) -> str:
    """Return the loop of a block along one dimension of its output."""
    place = find_block(s.func, x.name).body.indices[dim]
    assert isinstance(place, Var)
    (name,) = loops_of_iter(s, x.name, inside, place.name)
    return name


def _distribute(s: Schedule, x: TiledBlock, inside: str, tile: QueryTile, product: str) -> None:
    """Distribute the output of a block over warps and threads in fragments, and unroll the elements of a thread."""
    w, m, h, y = s.split(_loop(s, x, x.row, inside), [None, tile.high, ROWS // HIGH, HIGH])
    if x.column is None and not x.over:
        s.reorder([w, y, m, h])
        set_kind_of_copies(s, {m: "unrolled", h: "unrolled"})
    elif x.column is None:  # four consecutive threads share a query
        n, j, c = s.split(loops_of_iter(s, x.name, inside, x.over)[0], [None, WIDE, EACH])
        s.reorder([w, y, j, n, m, h, c])
        reduce_across_threads(s, x.name, [j], c, rows=[m, h])
        set_kind_of_copies(s, {n: "unrolled"})
    else:
        n, j, c = s.split(_loop(s, x, x.column, inside), [None, WIDE, EACH])
        order = [w, y, j, m, h, n, c]
        if x.form:
            inner = [STEPS] if x.form[0] == "n" else [STEPS // COLUMNS, WIDE, EACH]
            k_0, *steps = s.split(loops_of_iter(s, x.name, inside, x.over)[0], [None, *inner])
            s.reorder([k_0, *order, *steps])
            s.decompose_reduction(block=x.name, loop=k_0)
            _bind_fragment(s, s.inner_loops(f"{x.name}_init", inside), "vectorized")
        else:
            s.reorder(order)
        _bind_fragment(s, order, "serial" if x.form else "unrolled" if x.masked else "vectorized")
        if x.form:
            s.tensorize(loop=y, intrinsic=product)
        return
    s.bind(y, "item", 1)
    s.bind(w, "item", 2)


def _bind_fragment(s: Schedule, order: Sequence[str], kind: LoopKind) -> None:
    """Bind the loops over warps and threads, unroll those over fragments, and give the innermost loop a kind."""
    w, y, j, m, h, n, c = order
    for axis, loop in enumerate((j, y, w)):
        s.bind(loop, "item", axis)
    if kind != "serial":
        s.unroll(m, h, n)
        s.set_kind(c, kind)


def _stage(s: Schedule, block: str, loop: str, tile: QueryTile, stages: Tunable | None = None) -> None:
    """Stage the reads of an iteration of `loop` with asynchronous copies, in rows padded against bank conflicts.

    Args:
        stages: The slots of the circular buffer of key blocks; None for queries, which are staged once.
    """
    s.compute_at(block, loop)
    node, ring = find_block(s.func, block), None
    if stages is not None:
        moving = {i.var for i, e in zip(node.iters, node.bindings) if loop in {v.name for v in free_vars(e)}}
        (keys,) = (d for d, e in enumerate(node.body.indices) if e in moving)
        ring = PipelineRing(stages, keys, tile.block)
    plan = CopyPlan((tile.warps, HIGH, WIDE), VECTOR, whole=True, pipeline=ring, asynchronous=True)
    buffer = node.body.buffer.name
    stage_tile(s, block, loop, plan, lambda: s.storage_align(buffer=buffer, factor=2 * VECTOR, offset=VECTOR))
