"""Parts of the attention rules: the roles of the blocks, and the loops of FlashAttention and flash-decoding.

FlashAttention (Dao et al. 2022) runs over blocks of keys with a running row maximum and row sum (online softmax, Milakov and
Gimelshein 2018). Flash-decoding (Dao et al. 2023) gives each block of keys to a worker and combines the partial results afterwards.
The primitives `rolling_update` and `split_k_update` follow Neptune (arXiv:2510.08726).

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Load, Var, as_int, free_vars
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import final_block, inlinable, reductions
from relax_tune.schedules.loop_tree import block_loads, find_alloc, find_block, readers, writer
from relax_tune.schedules.rules.shared.blocks import loops_of_iter, writer_of
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.symbols import variables_of

Skip = Literal["masked", "after_last", "none"]
SKIPS: tuple[Skip, ...] = ("masked", "after_last", "none")
"""The blocks of keys that the loop skips, the best choice first.

masked: every block whose scores the mask excludes for all queries of a tile. after_last: the blocks after the last one that some query
attends to. none: no block, where a later primitive refuses the other bounds.
"""


@dataclass(frozen=True, slots=True)
class AttentionRoles:
    """The blocks of an attention by name, and the iterators and dimensions of queries and keys.

    Attributes:
        product: The block of the products of queries and keys.
        scores: The block that scales and masks the products.
        row_max, row_sum: The blocks of the softmax's maxima and sums.
        weights: The block of the exponentials.
        weighted_values: The block that sums weights times values.
        output: The block that divides by the row sum and writes the output.
        query: The operand of the product with the rows of queries.
        query_rank, query_dim: That operand's rank and its dimension of queries.
        row: The iterator of queries in `output`.
        row_max_dim: The dimension of queries in the maxima.
        depth, width: The sizes of a query and of a value.
        product_row, product_key, score_row, score_key, weight_row, weight_key: The iterators of queries and keys in the blocks `product`,
            `scores` and `weights`.
    """

    product: str
    scores: str
    row_max: str
    weights: str
    row_sum: str
    weighted_values: str
    output: str
    query: str
    query_rank: int
    query_dim: int
    row: Var
    row_max_dim: int
    depth: int
    width: int
    product_row: str
    product_key: str
    score_row: str
    score_key: str
    weight_row: str
    weight_key: str


@dataclass(frozen=True, slots=True)
class _Stages:
    """The seven blocks of an attention, named as in `AttentionRoles`."""

    product: Block
    scores: Block
    row_max: Block
    weights: Block
    row_sum: Block
    weighted_values: Block
    output: Block


def find_attention_roles(s: Schedule) -> AttentionRoles:
    """Find the roles of an attention's blocks, inline the other blocks, and make queries the last dimension of the scores.

    Raises:
        ScheduleError: Unless the function is one attention with constant sizes of queries and values.
    """
    stages = _find_stages(s)
    row, key, column = _axes(s, stages)
    width, depth = _sizes(s, stages, column)
    of_weights = _traced(stages.weighted_values, stages.weights, (row, key))
    of_scores = _traced(stages.weights, stages.scores, of_weights)
    of_product = _traced(stages.scores, stages.product, of_scores)
    row_max_dim = _load_of(stages.weights, stages.row_max).indices.index(of_weights[0])
    loads = block_loads(stages.product)
    query = _only([x for x in loads if of_product[0] in x.indices and of_product[1] not in free_vars(*x.indices)])
    end, inner = _load_of(stages.output, stages.weighted_values), stages.weighted_values.body.indices
    output_row = end.indices[inner.index(row)]
    if not isinstance(output_row, Var):
        raise ScheduleError(f"{s.func.name}: the output is not written row by row")
    if end.indices[inner.index(column)] is not stages.output.body.indices[-1]:
        raise ScheduleError(f"{s.func.name}: columns are not contiguous in the output")
    traced = ((stages.product, of_product), (stages.scores, of_scores), (stages.weights, of_weights))
    for b, (own_row, own_key) in traced:
        dims = [b.body.indices.index(e) for e in (own_key, own_row)]
        s.permute_layout(buffer=b.body.buffer.name, order=with_last(len(b.body.indices), dims))
    return AttentionRoles(
        product=stages.product.name,
        scores=stages.scores.name,
        row_max=stages.row_max.name,
        weights=stages.weights.name,
        row_sum=stages.row_sum.name,
        weighted_values=stages.weighted_values.name,
        output=stages.output.name,
        query=query.buffer.name,
        query_rank=len(query.indices),
        query_dim=_only([d for d, e in enumerate(query.indices) if e is of_product[0]]),
        row=output_row,
        row_max_dim=row_max_dim,
        depth=depth,
        width=width,
        product_row=_require_var(of_product[0]).name,
        product_key=_require_var(of_product[1]).name,
        score_row=_require_var(of_scores[0]).name,
        score_key=_require_var(of_scores[1]).name,
        weight_row=_require_var(of_weights[0]).name,
        weight_key=_require_var(of_weights[1]).name,
    )


def _find_stages(s: Schedule) -> _Stages:
    """Find the seven blocks of an attention and inline all others."""
    func = s.func
    maxima = [b for b in reductions(func) if b.body.value.op == "max"]
    # Three sums: the product of queries and keys, the row sum, and the weighted values.
    if len(maxima) != 1 or len(reductions(func)) != 4:
        raise ScheduleError(f"{func.name}: expected a product, a maximum and two sums, got {len(reductions(func))}")
    (row_max,) = maxima
    scores = _only([writer(func, x.buffer) for x in block_loads(row_max)])
    output = final_block(func)
    weights = _only([b for b in readers(func, row_max.body.buffer) if b is not output])
    sums = readers(func, weights.body.buffer)
    # Two sums read the weights; the one of weighted values reads the values, too.
    row_sum = _only([b for b in sums if len(block_loads(b)) == 1])
    weighted_values = _only([b for b in sums if b is not row_sum])
    keep = {b.name for b in (scores, weights, output)}
    for b in blocks(func.body):
        if b.name not in keep and inlinable(s.func, find_block(s.func, b.name)):
            s.compute_inline(b.name)
    product = _only(
        [b for b in reductions(s.func) if b.name not in {x.name for x in (row_max, row_sum, weighted_values)}]
    )
    order = (product, scores, row_max, weights, row_sum, weighted_values, output)
    stages = _Stages(*(find_block(s.func, b.name) for b in order))
    if stages.scores.is_reduction or stages.output.is_reduction or len(blocks(s.func.body)) != 7:
        raise ScheduleError(f"{func.name}: expected an attention and no other blocks")
    return stages


def _axes(s: Schedule, stages: _Stages) -> tuple[Var, Var, Expr]:
    """Return the iterators of the weighted values that are the query, the key and the column of the values."""
    block = stages.weighted_values
    access = _load_of(block, stages.weights)
    values = [x for x in block_loads(block) if x.buffer is not stages.weights.body.buffer]
    of_values = set(free_vars(*(e for x in values for e in x.indices)))
    (key,) = (i.var for i in block.iters if i.kind == "reduce")
    rows = [e for e in variables_of(access.indices) if e is not key and e not in of_values]
    if not rows or not values:
        raise ScheduleError(f"{s.func.name}: the values also depend on the rows of queries")
    return rows[-1], key, _only([e for e in block.body.indices if e not in access.indices])


def _sizes(s: Schedule, stages: _Stages, column: Expr) -> tuple[int, int]:
    """Return the constant sizes of a value and of a query."""
    extents = {i.var: as_int(i.extent) for i in stages.weighted_values.iters}
    width = extents[column] if isinstance(column, Var) else None
    depths = [as_int(i.extent) for i in stages.product.iters if i.kind == "reduce"]
    if width is None or len(depths) != 1 or depths[0] is None:
        raise ScheduleError(f"{s.func.name}: expected known widths of queries and values, got {width} and {depths}")
    return width, depths[0]


def _load_of(consumer: Block, producer: Block) -> Load:
    return next(x for x in block_loads(consumer) if x.buffer is producer.body.buffer)


def _traced(consumer: Block, producer: Block, axes: Sequence[Expr]) -> tuple[Expr, Expr]:
    """Return the indices at which the producer stores the elements that the consumer reads at its row and key."""
    read = _load_of(consumer, producer)
    row, key = (producer.body.indices[read.indices.index(e)] for e in axes)
    return row, key


@dataclass(frozen=True, slots=True)
class OuterLoops:
    """The loops of one FlashAttention kernel outside a block of keys.

    Attributes:
        outer: The loops of the output's dimensions other than queries and columns.
        tile: The loop over tiles of queries.
        key_block: The loop over blocks of keys.
    """

    outer: tuple[str, ...]
    tile: str
    key_block: str


def outer_loops(s: Schedule, r: AttentionRoles, rows: Expr | None, skip: Skip) -> OuterLoops:
    """Build FlashAttention's outer loops after `split_k_update`: tiles of queries, then blocks of keys.

    Args:
        rows: The queries of a tile; None for single queries without a loop inside a tile.
        skip: One of SKIPS.
    """
    nest = s.iter_loops(r.output)
    tile, *inside = [nest[r.row]] if rows is None else s.split(nest[r.row], [None, rows])
    *outer, column = (name for v, name in nest.items() if v is not r.row)
    s.reorder([*outer, tile, *inside, column])
    # Readers first: `compute_at` expects every reader of a block inside the loop already.
    for name in (r.weighted_values, r.row_sum, f"{r.row_max}_scale", r.row_max):
        s.compute_at(name, tile)
        # `rolling_update` expects each nest to begin with its loop over blocks of keys.
        steps = loops_of_iter(s, name, tile, "vb")
        s.reorder([*steps, *(n for n in s.inner_loops(name, tile) if n not in steps)])
    _roll(s, r, skip)
    (key_block,) = loops_of_iter(s, r.row_max, tile, "vb")
    return OuterLoops(tuple(outer), tile, key_block)


def _roll(s: Schedule, r: AttentionRoles, skip: Skip) -> None:
    """Make one loop over blocks of keys, which leaves out masked blocks where a condition on keys allows it."""
    if skip != "none":
        try:
            s.rolling_update(block=r.row_max, skip=skip)
            return
        except ScheduleError:
            pass  # no condition bounds the keys
    s.rolling_update(block=r.row_max)


def split_kv_loops(s: Schedule, r: AttentionRoles, queries: Expr) -> list[str]:
    """Compute the partial results of a block of keys in one nest, as flash-decoding does, after `split_k_update`.

    The nest stores a maximum, a sum and weighted values of every (tile of queries, block of keys); a later nest combines them.

    Returns:
        Its loops: outer dimensions, tiles of queries, blocks of keys.
    """
    paths = [_store_partial(s, r, name, queries) for name in (r.row_max, r.row_sum, r.weighted_values)]
    for a, b in zip(paths[1], paths[2], strict=True):
        s.fuse_sibling_loops(a, b)
    s.compute_at(r.weights, paths[1][-1])
    for a, b in zip(paths[0], paths[1], strict=True):
        s.fuse_sibling_loops(a, b)
    s.compute_at(r.scores, paths[0][-1])
    return paths[0]


def _store_partial(s: Schedule, r: AttentionRoles, whole: str, queries: Expr) -> list[str]:
    """Order the loops of one partial reduction as the output's, and store its result for each block of keys.

    Returns:
        The loops: outer dimensions, tiles of queries, blocks of keys.
    """
    part = f"{whole}_rf"
    node, output = find_block(s.func, part), find_block(s.func, r.output)
    source = find_block(s.func, r.weighted_values if whole == r.weighted_values else r.row_sum)
    place = _load_of(output, source).indices
    if len(node.body.indices) != len(place) + 1:
        raise ScheduleError(f"{s.func.name}: maxima and sums have different dimensions")
    nest = s.iter_loops(part)
    of = {v: nest[_require_var(e)] for v, e in zip(place, node.body.indices[1:])}
    step = nest[_require_var(node.body.indices[0])]
    outer = [of[i.var] for i in output.iters if i.var in of and i.var not in (r.row, output.body.indices[-1])]
    i_0, i_1 = s.split(of[r.row], [None, queries])
    rest = [n for n in s.loops_of(part) if n not in (*outer, i_0, i_1, step)]
    s.reorder([*outer, i_0, step, i_1, *rest])
    readers = [r.weights] if whole == r.row_max else []
    s.cache_write(block=part, scope="global", readers=readers)
    s.reverse_compute_at(writer_of(s, node.body.buffer.name), step)
    return [*outer, i_0, step]


def _require_var(e: Expr) -> Var:
    if not isinstance(e, Var):
        raise ScheduleError(f"expected separate iterators of queries, keys and columns, got {e!r}")
    return e


def with_last(rank: int, dims: Sequence[int]) -> list[int]:
    """Return the order of `rank` dimensions that puts `dims` last."""
    return [*(d for d in range(rank) if d not in dims), *dims]


def swap_last_dims(s: Schedule, buffer: str) -> None:
    """Swap the last two dimensions of a buffer."""
    rank = len(find_alloc(s.func, buffer).shape)
    s.permute_layout(buffer=buffer, order=[*range(rank - 2), rank - 1, rank - 2])


def other_operand(s: Schedule, block: str, buffer: str) -> str:
    """Return the one buffer that a block reads besides `buffer`."""
    names = {x.buffer.name for x in block_loads(find_block(s.func, block))} - {buffer}
    if len(names) != 1:
        raise ScheduleError(f"{s.func.name}: expected one array besides {buffer!r} in {block!r}, got {sorted(names)}")
    return names.pop()


def value_widths(extent: int, lanes: int) -> list[int]:
    """Return the widths of register tiles: one, two or four vectors that divide the size of a value."""
    return [w for w in (lanes, 2 * lanes, 4 * lanes) if extent % w == 0] or [
        max(w for w in range(1, lanes + 1) if extent % w == 0)
    ]


T = TypeVar("T")


def _only(values: Iterable[T | None]) -> T:
    """Return the only distinct value. Raises ScheduleError when there is none or a second one."""
    unique = list(dict.fromkeys(values))
    if len(unique) != 1 or unique[0] is None:
        raise ScheduleError("this is no attention: a part is missing or repeated")
    return unique[0]
