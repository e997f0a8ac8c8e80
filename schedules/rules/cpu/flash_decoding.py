"""Flash-decoding (Dao et al. 2023) on processors: few queries, many keys, and workers that take blocks of keys.

Vector lanes run along the depth of a key for scores, then along the keys of a block, then along columns of the values.
A second statement combines the partial results of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Tunable, ceildiv, const, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.schedules.analysis import reductions
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.blocks import loops_of_iter, writer_of
from relax_tune.schedules.rules.shared.flash import AttentionRoles, find_attention_roles, split_kv_loops, value_widths
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.vectorize import accumulate, in_vectors, set_kind_of_copies
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield one sketch of an attention; none for other functions."""
    if len(reductions(func)) == 4:
        yield from try_forms(func, [("flash_decoding", partial(build, func, hardware))])


def build(func: PrimFunc, hardware: HardwareInfo) -> Schedule:
    """Give each task MR queries and KR vectors of keys, and multiply KU keys at a time."""
    s = Schedule(func)
    r = find_attention_roles(s)
    lanes = hardware.lanes
    # Lanes run along the depth, and a partial vector would multiply elements of the next key.
    if r.depth % lanes:
        raise ScheduleError(f"{func.name}: queries of {r.depth} elements are not multiples of a vector")
    queries, together = s.tunable("MR", (1, 2, 4)), s.tunable("KU", (1, 2, 4, 8))
    keys = mul(s.tunable("KR", (4, 8, 16, 32, 64)), lanes)
    width = s.tunable("NR", value_widths(r.width, lanes))
    s.require(le(mul(queries, together + ceildiv(width, lanes)), const(hardware.registers)))
    # Keys last: the maxima and sums then run along memory.
    for name in (r.product, r.scores, r.weights):
        buffer = s.buffer_of(name)
        rank = len(buffer.shape)
        s.permute_layout(buffer=buffer.name, order=[*range(rank - 2), rank - 1, rank - 2])
    s.pad_spatial(block=r.row_max, dim=r.row_max_dim, factor=queries)
    s.split_k_update(block=r.row_max, factor=keys)
    written = {name: s.buffer_of(f"{name}_rf").name for name in (r.row_max, r.row_sum, r.weighted_values)}
    path = split_kv_loops(s, r, queries)
    step = path[-1]
    _scores(s, r, step, together, lanes)
    for name in (f"{r.row_max}_rf", f"{r.row_sum}_rf"):
        in_vectors(s, name, loops_of_iter(s, name, step, "vt")[0], lanes)
    in_vectors(s, r.weights, loops_of_iter(s, r.weights, step, r.weight_key)[0], lanes)
    part = f"{r.weighted_values}_rf"
    (key,) = loops_of_iter(s, part, step, "vt")
    *rows, columns = [n for n in s.inner_loops(part, step) if n != key]
    c_0, c_1 = s.split(columns, [None, width], divides=True)
    s.reorder([c_0, key, *rows, c_1])
    s.set_tail(key, "peel")
    s.decompose_reduction(block=part, loop=key)
    for name in (part, f"{part}_init", writer_of(s, written[r.weighted_values])):
        s.vectorize(s.inner_loops(name, step)[-1])
    for p in loops(s.func.body):
        if p.kind == "serial" and p.extent is queries:
            s.unroll(p.var.name)
    _combine(s, r, width, hardware)
    for a in s.func.allocs:
        if a.name not in written.values():
            s.set_scope(buffer=a.name, scope="local")
    s.set_kind(s.fuse(path), "group" if hardware.has_grid else "parallel")
    return s


def _scores(s: Schedule, r: AttentionRoles, step: str, together: Tunable, lanes: int) -> None:
    """Multiply a few keys at a time by all queries: partial sums in lanes, which are then added up."""
    (keys,), (rows,) = loops_of_iter(s, r.scores, step, r.score_key), loops_of_iter(s, r.scores, step, r.score_row)
    k_0, k_1 = s.split(keys, [None, together])
    s.reorder([k_0, rows, k_1])
    s.set_tail(k_0, "peel")
    score_loops = s.compute_at(r.product, k_0)
    depth = next(i.var.name for i in find_block(s.func, r.product).iters if i.kind == "reduce")
    (d,) = loops_of_iter(s, r.product, k_0, depth)
    d_0, d_1 = s.split(d, [None, lanes], divides=True)
    each = [n for n in score_loops if n != d]
    s.reorder([d_0, *each, d_1])
    accumulate(s, r.product, d_1)
    s.vectorize(d_1)
    left, *copies = s.inner_loops(r.product, k_0)
    s.reorder([*copies, left])
    s.decompose_reduction(block=r.product, loop=left)
    set_kind_of_copies(s, {n: "unrolled" for n in (*each, k_1)})


def _combine(s: Schedule, r: AttentionRoles, width: Tunable, hardware: HardwareInfo) -> None:
    """Combine the partial results of all blocks of keys for every query."""
    # The factor exp(block maximum - maximum) is read once per block and query, so inlining repeats nothing.
    s.compute_inline(f"{r.row_max}_scale")
    nest = s.iter_loops(r.output)
    query = nest[r.row]
    *outer, column = (name for v, name in nest.items() if v is not r.row)
    s.reorder([*outer, query, column])
    c_0, _ = s.split(column, [None, width], divides=True)
    s.compute_at(r.weighted_values, c_0)
    for name in (r.row_sum, r.row_max):
        s.compute_at(name, query)
    for name in (r.weighted_values, r.row_sum, r.row_max):
        steps = loops_of_iter(s, name, query, "vb")
        s.reorder(
            [*steps, *(n for n in s.inner_loops(name, c_0 if name == r.weighted_values else query) if n not in steps)]
        )
        s.decompose_reduction(block=name, loop=steps[0])
    for name in (r.weighted_values, f"{r.weighted_values}_init", r.output):
        s.vectorize(s.inner_loops(name, c_0)[-1])
    s.set_kind(s.fuse([*outer, query]), "group" if hardware.has_grid else "parallel")
