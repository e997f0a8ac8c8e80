"""Attention in one kernel: products, softmax and weighted sums of a tile of queries, block by block of keys.

A tile of queries is turned once, so that queries are the lanes: scores, maxima, exponentials and their sums then need nothing
across lanes. Keys come in blocks with a running maximum (`rolling_update`), whose scores stay in cache; a block's weighted values
are summed in registers of a few queries by vectors of columns, and added to what the tile has so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Op, Tunable, Var, as_int, ceildiv, eq, floormod, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.analysis import final_block, inlinable, reductions
from relax_tune.schedules.loop_tree import block_loads, find_alloc, find_block, readers, writer
from relax_tune.schedules.rules.shared.forms import first_fitting
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

# Blocks of keys that are not computed, what is best first: those that a mask hides from all queries of a tile; those alone after the last
# one that some query sees; or none, where a step refuses more.
SKIPS = ("hidden", "late", "nothing")


@dataclass(frozen=True, slots=True)
class Roles:
    """The blocks of an attention by name, and where queries and keys stand.

    product, score: of queries and keys, before and after scale and mask; top, total: maxima and sums of rows; weights: the
    exponentials; context: weighted values; last: what writes the output. query: the operand of the product that has the rows,
    and which of its dimensions they are; row: the iterator of queries in `last`; top_dim: the dimension of the maxima;
    depth, width: of queries and of values; the others: iterators of queries and keys by block.
    """

    product: str
    score: str
    top: str
    weights: str
    total: str
    context: str
    last: str
    query: str
    query_rank: int
    query_dim: int
    row: Var
    top_dim: int
    depth: int
    width: int
    product_row: str
    product_key: str
    score_row: str
    score_key: str
    weight_row: str
    weight_key: str


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Every sketch of an attention; nothing when the function is none."""
    if len(reductions(func)) != 4:
        return
    yield from first_fitting("attention.rolling", (partial(build, func, machine, skip) for skip in SKIPS))


def build(func: PrimFunc, machine: HardwareInfo, skip: str = "hidden") -> Schedule:
    """Tiles of queries, keys in blocks. Raises ScheduleError where the function is no attention of known widths."""
    s = Schedule(func)
    r = find_roles(s)
    lanes = machine.lanes
    height = s.tunable("MR", (1, 2, 4, 6, 8))
    groups = s.tunable("IU", (2, 4, 8, 16))
    unroll = s.tunable("JU", (2, 4, 8, 16))
    steps = s.tunable("KU", (4, 8, 16, 32))
    width = s.tunable("NR", widths(r.width, lanes))
    tile, block = mul(groups, height), mul(steps, unroll)
    s.require(eq(floormod(tile, lanes), 0))
    s.require(le(height * ceildiv(width, lanes) + ceildiv(width, lanes) + 1, machine.registers))
    s.require(le(unroll * (tile // lanes) + tile // lanes + 1, machine.registers))
    s.require(le(tile * (block * 2 + r.depth + r.width) * 4, machine.l2_bytes // 2))

    s.apply("cache_read", block=r.product, buffer=r.query, scope="local")
    turned = block_of(s, f"{r.query}_cache")
    s.apply("permute_layout", buffer=f"{r.query}_cache", order=_last(r.query_rank, [r.query_dim]))
    s.apply("pad_spatial", block=r.top, dim=r.top_dim, factor=tile)
    s.apply("split_k_update", block=r.top, factor=block)
    for a in s.func.allocs:
        s.apply("set_scope", buffer=a.name, scope="local")

    last = find_block(s.func, r.last)
    nest = {i.var: name for i, name in zip(last.iters, s.loops_of(r.last), strict=True)}
    i_0, i_1 = s.split(nest[r.row], [None, tile])
    *outer, column = (name for v, name in nest.items() if v is not r.row)
    s.reorder([*outer, i_0, i_1, column])
    for name in (r.context, r.total, f"{r.top}_scale", r.top):
        s.compute_at(name, i_0)
        _order(s, name, i_0, "vb", *_others(s, name, i_0, "vb"))
    roll(s, r, skip)
    (key,) = feeding(s, r.top, i_0, "vb")
    _weighted_values(s, r, key, height, width)
    _exponentials(s, r, key)
    _scores(s, r, key, unroll)
    s.compute_at(turned, i_0)
    rows = feeding(s, turned, i_0, _iter_at(s, turned, r.query_dim))
    s.reorder([*(n for n in s.inner_loops(turned, i_0) if n not in rows), *rows])
    for b in blocks(s.func.body):
        inner = s.nest_of(b.name)[-1]
        if inner.kind == "serial":
            s.vectorize(inner.var.name)
    s.set_kind(s.fuse([*outer, i_0]), "group" if machine.has_grid else "parallel")
    return s


def roll(s: Schedule, r: Roles, skip: str) -> None:
    """One loop over blocks of keys, which skips those that the mask says are hidden."""
    if skip != "nothing":
        try:
            s.apply("rolling_update", block=r.top, skip=skip)
            return
        except ScheduleError:
            pass  # no condition bounds the keys
    s.apply("rolling_update", block=r.top)


def _weighted_values(s: Schedule, r: Roles, key: str, height: Tunable, width: Tunable) -> None:
    """A block's weighted values in registers of a few queries by vectors of columns, then added to those of the tile."""
    part = f"{r.context}_rf"
    rows, columns = s.inner_loops(r.context, key)
    a_0, a_1 = s.split(rows, [None, height])
    c_0, c_1 = s.split(columns, [None, width], divides=True)
    s.reorder([a_0, c_0, a_1, c_1])
    s.compute_at(part, c_0)
    (step,) = feeding(s, part, c_0, "vt")
    _order(s, part, c_0, "vt", *_others(s, part, c_0, "vt"))
    s.set_tail(step, "peel")
    for loop in (a_1, s.inner_loops(part, c_0)[1]):
        s.unroll(loop)
    s.apply("decompose_reduction", block=part, loop=step)


def _exponentials(s: Schedule, r: Roles, key: str) -> None:
    """The weights of a block of keys and their sums in one pass."""
    part = f"{r.total}_rf"
    s.compute_at(part, key)
    _order(s, part, key, "vt", *_others(s, part, key, "vt"))
    (step,) = feeding(s, part, key, "vt")
    s.apply("decompose_reduction", block=part, loop=step)
    s.compute_at(r.weights, key)
    lanes, keys = (feeding(s, r.weights, key, v) for v in (r.weight_row, r.weight_key))
    s.reorder([*keys, *lanes])
    s.fuse_sibling_loops(keys[0], step)
    s.set_tail(keys[0], "peel")


def _scores(s: Schedule, r: Roles, key: str, unroll: Tunable) -> None:
    """A few keys at a time against all queries of the tile in registers; their maximum while they are there."""
    part = f"{r.top}_rf"
    s.compute_at(part, key)
    m_0, m_1 = s.split(feeding(s, part, key, "vt")[0], [None, unroll])
    s.reorder([m_0, m_1, *(n for n in s.inner_loops(part, key) if n not in (m_0, m_1))])
    s.apply("decompose_reduction", block=part, loop=m_0)
    s.unroll(m_1)
    s.compute_at(r.score, key)
    lanes, keys = (feeding(s, r.score, key, v)[0] for v in (r.score_row, r.score_key))
    j_0, j_1 = s.split(keys, [None, unroll])
    s.reorder([j_0, j_1, lanes])
    s.fuse_sibling_loops(j_0, m_0)
    s.set_tail(j_0, "pow2")
    s.unroll(j_1)
    s.compute_at(r.product, j_0)
    steps = [i.var.name for i in find_block(s.func, r.product).iters if i.kind == "reduce"]
    loops = [feeding(s, r.product, j_0, v)[0] for v in (*steps, r.product_key, r.product_row)]
    s.reorder(loops)
    s.unroll(loops[1])
    s.apply("decompose_reduction", block=r.product, loop=loops[0])


def find_roles(s: Schedule) -> Roles:
    """Find the roles, fold what is computed on the way into what reads it, and lay scores out with queries last."""
    func = s.func
    maxima = [b for b in reductions(func) if isinstance(b.body.value, Op) and b.body.value.op == "max"]
    if len(maxima) != 1 or len(reductions(func)) != 4:
        raise ScheduleError(f"{func.name}: wanted a product, a maximum and two sums, found {len(reductions(func))}")
    (top,) = maxima
    score = _only([writer(func, x.buffer) for x in block_loads(top)])
    last = final_block(func)
    weights = _only([b for b in readers(func, top.body.buffer) if b is not last])
    sums = readers(func, weights.body.buffer)
    plain = [b for b in sums if len(block_loads(b)) == 1]
    total = _only(plain)
    context = _only([b for b in sums if b is not total])
    keep = {b.name for b in (score, weights, last)}
    for b in blocks(func.body):
        if b.name not in keep and inlinable(s.func, find_block(s.func, b.name)):
            s.compute_inline(b.name)
    product = _only([b for b in reductions(s.func) if b.name not in {x.name for x in (top, total, context)}])
    names = [b.name for b in (product, score, top, weights, total, context, last)]
    product, score, top, weights, total, context, last = (find_block(s.func, n) for n in names)
    if score.is_reduction or last.is_reduction or len(blocks(s.func.body)) != 7:
        raise ScheduleError(f"{func.name}: more than an attention")
    # from the weighted values: the key, the column, and the row that the values do not have
    access = next(x for x in block_loads(context) if x.buffer is weights.body.buffer)
    others = [x for x in block_loads(context) if x.buffer is not weights.body.buffer]
    of_values = set(free_vars(*(e for x in others for e in x.indices)))
    (step,) = (i.var for i in context.iters if i.kind == "reduce")
    rows = [e for e in access.indices if isinstance(e, Var) and e is not step and e not in of_values]
    if not rows or not others:
        raise ScheduleError(f"{func.name}: the values have rows of queries too")
    row = rows[-1]
    column = _only([e for e in context.body.indices if e not in access.indices])
    extents = {i.var: as_int(i.extent) for i in context.iters}
    width = extents[column] if isinstance(column, Var) else None
    depths = [as_int(i.extent) for i in product.iters if i.kind == "reduce"]
    if width is None or len(depths) != 1 or depths[0] is None:
        raise ScheduleError(f"{func.name}: wanted known widths of queries and values, found {width} and {depths}")
    at_row, at_key = access.indices.index(row), access.indices.index(step)
    row_w, key_w = weights.body.indices[at_row], weights.body.indices[at_key]
    read = next(x for x in block_loads(weights) if x.buffer is score.body.buffer)
    row_s, key_s = (score.body.indices[read.indices.index(v)] for v in (row_w, key_w))
    read_p = next(x for x in block_loads(score) if x.buffer is product.body.buffer)
    row_p, key_p = (product.body.indices[read_p.indices.index(v)] for v in (row_s, key_s))
    maximum = next(x for x in block_loads(weights) if x.buffer is top.body.buffer)
    queries = [x for x in block_loads(product) if row_p in x.indices and key_p not in free_vars(*x.indices)]
    query = _only(queries)
    end = next(x for x in block_loads(last) if x.buffer is context.body.buffer)
    row_l = end.indices[context.body.indices.index(row)]
    if not isinstance(row_l, Var):
        raise ScheduleError(f"{func.name}: the output is not written row by row")
    if end.indices[context.body.indices.index(column)] is not last.body.indices[-1]:
        raise ScheduleError(f"{func.name}: columns are not neighbours in the output")
    for b, ends in ((product, (key_p, row_p)), (score, (key_s, row_s)), (weights, (key_w, row_w))):
        at = [b.body.indices.index(e) for e in ends]
        s.apply("permute_layout", buffer=b.body.buffer.name, order=_last(len(b.body.indices), at))
    dims = [d for d, e in enumerate(query.indices) if e is row_p]
    return Roles(
        product=product.name,
        score=score.name,
        top=top.name,
        weights=weights.name,
        total=total.name,
        context=context.name,
        last=last.name,
        query=query.buffer.name,
        query_rank=len(query.indices),
        query_dim=_only(dims),
        row=row_l,
        top_dim=maximum.indices.index(row_w),
        depth=depths[0],
        width=width,
        product_row=_name(row_p),
        product_key=_name(key_p),
        score_row=_name(row_s),
        score_key=_name(key_s),
        weight_row=_name(row_w),
        weight_key=_name(key_w),
    )


def apart(s: Schedule, r: Roles, queries: Expr) -> list[str]:
    """After `split_k_update`: everything that a block of keys takes under loops over what is outer, tiles of queries and blocks of
    keys, which leave a maximum and sums for statements of their own. Returns these loops."""
    paths = [_written_down(s, r, name, queries) for name in (r.top, r.total, r.context)]
    for a, b in zip(paths[1], paths[2], strict=True):
        s.fuse_sibling_loops(a, b)
    s.compute_at(r.weights, paths[1][-1])
    for a, b in zip(paths[0], paths[1], strict=True):
        s.fuse_sibling_loops(a, b)
    s.compute_at(r.score, paths[0][-1])
    return paths[0]


def _written_down(s: Schedule, r: Roles, whole: str, queries: Expr) -> list[str]:
    """The loops of what a block of keys leaves of a sum, in the order of the output's: outer ones, tiles of queries, blocks of keys.
    It is written down at their end."""
    part = f"{whole}_rf"
    node, last = find_block(s.func, part), find_block(s.func, r.last)
    wanted = find_block(s.func, r.context if whole == r.context else r.total).body.buffer
    place = next(x.indices for x in block_loads(last) if x.buffer is wanted)
    if len(node.body.indices) != len(place) + 1:
        raise ScheduleError(f"{s.func.name}: maxima have other dimensions than sums")
    nest = dict(zip((i.var for i in node.iters), s.loops_of(part), strict=True))
    of = {v: nest[_iterator(e)] for v, e in zip(place, node.body.indices[1:])}
    step = nest[_iterator(node.body.indices[0])]
    outer = [of[i.var] for i in last.iters if i.var in of and i.var not in (r.row, last.body.indices[-1])]
    i_0, i_1 = s.split(of[r.row], [None, queries])
    rest = [n for n in s.loops_of(part) if n not in (*outer, i_0, i_1, step)]
    s.reorder([*outer, i_0, step, i_1, *rest])
    readers = [r.weights] if whole == r.top else []
    s.apply("cache_write", block=part, scope="global", readers=readers)
    s.reverse_compute_at(block_of(s, node.body.buffer.name), step)
    return [*outer, i_0, step]


def _iterator(e: Expr) -> Var:
    if not isinstance(e, Var):
        raise ScheduleError(f"wanted rows and columns by iterators of their own, found {e!r}")
    return e


def _name(e: Expr) -> str:
    if not isinstance(e, Var):
        raise ScheduleError(f"wanted queries and keys by iterators of their own, found {e!r}")
    return e.name


def block_of(s: Schedule, buffer: str) -> str:
    """The block that writes a buffer."""
    return next(b.name for b in blocks(s.func.body) if b.body.buffer.name == buffer)


def _iter_at(s: Schedule, block: str, dim: int) -> str:
    """The iterator of a copy's dimension, as its source has them."""
    return find_block(s.func, block).iters[dim].var.name


def feeding(s: Schedule, block: str, loop: str, iterator: str) -> list[str]:
    """The loops of the block inside `loop`, or `loop` itself, that feed an iterator."""
    node = find_block(s.func, block)
    fed = {v.name for i, b in zip(node.iters, node.bindings) if i.var.name == iterator for v in free_vars(b)}
    return [n for n in s.inner_loops(block, loop) if n in fed]


def _others(s: Schedule, block: str, loop: str, iterator: str) -> list[str]:
    """The loops of the block inside `loop` that do not feed an iterator."""
    own = feeding(s, block, loop, iterator)
    return [n for n in s.inner_loops(block, loop) if n not in own]


def _order(s: Schedule, block: str, loop: str, first: str, *rest: str) -> None:
    """The loops of an iterator first."""
    s.reorder([*feeding(s, block, loop, first), *rest])


def _last(rank: int, dims: Sequence[int]) -> list[int]:
    """The order of dimensions that puts some last."""
    return [*(d for d in range(rank) if d not in dims), *dims]


def swap_last(s: Schedule, buffer: str) -> None:
    """The last two dimensions the other way round."""
    rank = len(find_alloc(s.func, buffer).shape)
    s.apply("permute_layout", buffer=buffer, order=[*range(rank - 2), rank - 1, rank - 2])


def other_operand(s: Schedule, block: str, buffer: str) -> str:
    """The one array beside another that a block reads."""
    found = {x.buffer.name for x in block_loads(find_block(s.func, block))} - {buffer}
    if len(found) != 1:
        raise ScheduleError(f"{s.func.name}: wanted one array beside {buffer!r} in {block!r}, found {sorted(found)}")
    return found.pop()


def widths(extent: int, lanes: int) -> list[int]:
    """Register tiles' columns: vectors that divide the width of values."""
    return [w for w in (lanes, 2 * lanes, 4 * lanes) if extent % w == 0] or [
        max(w for w in range(1, lanes + 1) if extent % w == 0)
    ]


T = TypeVar("T")


def _only(found: Iterable[T | None]) -> T:
    """The one value there is; ScheduleError when there is none or another."""
    unique = list(dict.fromkeys(found))
    if len(unique) != 1 or unique[0] is None:
        raise ScheduleError("this is no attention: a part of it is missing, or there twice")
    return unique[0]
