"""GPU rule for matrix-vector products and products with few rows (GEMV), bound by the bytes of the matrix.

dots: the reduction runs along memory. The threads of a column read consecutive vectors and add their sums with shuffles; several
warps may share a column.
columns: consecutive threads have consecutive columns, and the threads of axis 1 share the steps. Their sums meet in shared memory.
Constant weights are repacked once, and decoded where they are read.
split_k: thread blocks share the steps, too, where the columns make too few thread blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.core.expr import Expr, Load, Tunable, Var, const, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block
from relax_tune.schedules.analysis import final_block
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.contraction import (
    FEW_ROWS,
    Contraction,
    contraction_roles,
    is_product,
    isolate_contraction,
    packed_steps,
)
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.stream_k import bind_grid, split_k
from relax_tune.schedules.rules.shared.threads import (
    LANES_PER_ROW,
    limit_threads,
    reduce_across_threads,
    rfactor_into_scope,
    thread_counts,
    thread_per_element,
    vector_widths,
)
from relax_tune.schedules.rules.shared.vectorize import set_kind_of_copies
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.symbols import only_tunables
from relax_tune.schedules.target import HardwareInfo

HEIGHTS = (1, 2, 4, 8, 16)
"""Rows of a register tile."""
EVEN = 32
"""A constant number of columns that this divides is split without a remainder."""
MOST_SUMS = 64
"""Sums that a thread may hold in registers."""
PARTS = (1, 2, 4, 8)
"""Parts of a thread block, each at most a warp, that share the steps of a column."""
AT_ONCE = (1, 2, 4)
"""Loads of the matrix that a thread unrolls, so that all of them are in flight at once."""
FIRST_SHARES = 4
"""Shares of the steps in the first guess."""


@dataclass(frozen=True, slots=True)
class GemvProduct:
    """A product with few rows, ready for one of the two forms.

    Attributes:
        roles: The iterators and operands of the product.
        last: The block that stores the sums.
        packed: The number of steps that share a byte.
        group: The number of steps that share a float scale; None without scales.
        widths: The vector widths along the steps, then along the columns.
        steps: The number of steps in the first guess of a share; 0 if unknown.
        split: Thread blocks share the steps.
    """

    roles: Contraction
    last: Block
    packed: int
    group: int | None
    widths: tuple[list[int], list[int]]
    steps: int
    split: bool

    def at_once(self, items: int) -> int:
        """Return the largest unroll factor for which rounds of `items` steps divide the steps."""
        return next(u for u in reversed(AT_ONCE) if (self.steps and self.steps % (items * u) == 0) or u == 1)


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketches of a product with few rows, or an unknown number of rows; none for other functions."""
    if not is_product(func):
        return
    # `dots` comes first, since it reads the matrix in its own layout
    forms = (
        ("dots", _dots, False),
        ("columns", _columns, False),
        ("dots.split_k", _dots, True),
        ("columns.split_k", _columns, True),
    )
    yield from try_forms(
        func, ((f"gemv.{name}", partial(_build, func, hardware, make, split)) for name, make, split in forms)
    )


def _build(
    func: PrimFunc, hardware: HardwareInfo, make: Callable[[Schedule, GemvProduct, HardwareInfo], None], split: bool
) -> Schedule:
    s = Schedule(func)
    make(s, _prepared(s, hardware, split), hardware)
    if split:
        s.guesses = tuple({**g, "SK": FIRST_SHARES} for g in s.guesses)
    return s


def _prepared(s: Schedule, hardware: HardwareInfo, split: bool) -> GemvProduct:
    """Isolate the product from its epilogue and classify its iterators.

    Args:
        split: Sum shares of the steps in separate thread blocks (split-K).

    Raises:
        ScheduleError: For many rows, and for several reduction dimensions.
    """
    main = isolate_contraction(s)
    last = final_block(s.func)
    roles = contraction_roles(s, main, last)
    if len(roles.reduce) != 1 or (roles.known_extent(roles.row) or 0) > FEW_ROWS:
        raise ScheduleError(f"{s.func.name}: expected few rows and one dimension to sum over")
    packed, group = packed_steps(roles.block, roles)
    widths = _widths(roles, roles.reduce[0], hardware), _widths(roles, roles.column, hardware)
    steps = roles.known_extent(roles.reduce[0]) or 0
    if split:
        main, last = split_k(s, main, hardware)
        roles = contraction_roles(s, main, last)
        # The first guess divides the steps into this many shares, so its unroll factor must divide the steps of one
        # share.
        steps //= FIRST_SHARES
    return GemvProduct(roles, last, packed, group, widths, steps, split)


def _dots(s: Schedule, p: GemvProduct, hardware: HardwareInfo) -> None:
    """Give NR columns to TX threads in each of TW parts, which take the steps in vectors; a thread block has TY times NR columns."""
    roles, main, step = p.roles, p.roles.block.name, p.roles.reduce[0]
    reads = [x for x in block_loads(roles.block) if x.indices]
    if not any(_runs_along(x.indices[-1], step) and _has_columns(x, roles) for x in reads):
        raise ScheduleError(f"{s.func.name}: the reduction does not run along the matrix")
    tx, ty = s.tunable("TX", LANES_PER_ROW), s.tunable("TY", (1, 2, 4, 8, 16))
    parts = s.tunable("TW", PARTS) if hardware.has_shuffles else const(1)
    columns = s.tunable("NR", (1, 2, 4, 8))
    width, unroll = s.tunable("VL", p.widths[0]), s.tunable("KU", AT_ONCE)
    limit_threads(s, hardware, mul(mul(tx, parts), ty))
    nest = s.iter_loops(main)
    # Each column of each row keeps one sum for each lane of a vector until the end, hence the product.
    i_0, i_1 = _rows(s, roles, nest, mul(columns, width))
    j_0, j_t, j_1 = s.split(nest[roles.column], [None, ty, columns])
    vectors, lanes = s.split(nest[step], [None, width], divides=_is_constant(s.extent(nest[step])))
    rounds, together, *items = s.split(vectors, [None, unroll, *([parts, tx] if hardware.has_shuffles else [tx])])
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, *i_0, j_0, j_t, *items, rounds, together, *i_1, j_1, lanes])
    s.unroll(together)
    epilogue_loops = s.reverse_compute_at(p.last.name, j_t)
    if hardware.has_shuffles:  # every thread has all sums
        reduce_across_threads(s, main, items, lanes, rows=(*i_1, j_1))
        s.vectorize(epilogue_loops[-1])
        s.unroll(*epilogue_loops[:-1])
    else:  # one thread adds the partial sums of a column
        partial = rfactor_into_scope(s, main, items[0], "shared")
        rfactor_into_scope(s, partial, lanes, "local")
        s.bind(items[0], "item", 0)
        left, *each = s.inner_loops(main, j_t)
        # One more element in a row: threads that add the partial sums of neighbouring columns read different banks.
        s.storage_align(buffer=s.buffer_of(partial).name, factor=1, offset=1)
        s.reorder([each[-1], *each[:-1], left])
        s.decompose_reduction(block=main, loop=left)
        s.reorder([epilogue_loops[-1], *epilogue_loops[:-1]])
        for name in (each[-1], epilogue_loops[-1]):
            s.bind(name, "item", 0)
        set_kind_of_copies(s, {n: "unrolled" for n in (*i_1, j_1)})
    s.set_scope(buffer=s.buffer_of(main).name, scope="local")
    s.bind(j_t, "item", len(items))
    bind_grid(s, j_0, i_0, batch)
    few = ({"MR": 1} if i_0 else {}) | ({"TW": 1} if hardware.has_shuffles else {})
    vector = width.domain[-1]
    s.guess({"TX": 32, "TY": 4, "NR": columns.domain[0], "VL": vector, "KU": p.at_once(32 * vector), **few})


def _columns(s: Schedule, p: GemvProduct, hardware: HardwareInfo) -> None:
    """Give VL columns to each of TX threads; TY threads share the steps of a column, in runs with one float scale."""
    roles, main, step = p.roles, p.roles.block.name, p.roles.reduce[0]
    # Prepacking runs once when the program is loaded, so its threads are not tuned.
    _prepack_columns(s, roles, min(256, hardware.group_size))
    tx, ty = s.tunable("TX", [n for n in thread_counts(hardware, 8) if n <= 128]), s.tunable("TY", (1, 2, 4, 8, 16))
    extent = roles.known_extent(roles.column)
    # vectors that may be incomplete would be loaded element by element
    even = extent is not None and extent % EVEN == 0
    width, unroll = s.tunable("VL", p.widths[1] if even else (1,)), s.tunable("KU", AT_ONCE)
    limit_threads(s, hardware, mul(tx, ty))
    nest = s.iter_loops(main)
    i_0, i_1 = _rows(s, roles, nest, mul(width, p.packed))
    j_0, j_t, lanes = s.split(nest[roles.column], [None, tx, width], divides=even)
    batch = [nest[v] for v in roles.batch]
    outer = [*batch, *i_0, j_0, j_t]
    if p.group is not None and not p.split:
        groups, pairs, together = s.split(nest[step], [None, p.group // p.packed, p.packed])
        s.reorder([*outer, groups, pairs, *i_1, together, lanes])
        epilogue_loops = s.reverse_compute_at(p.last.name, j_t)
        item, partial, summed = _sum_runs_of_scales(s, main, groups, ty)
        s.unroll(s.split(pairs, [None, unroll])[1])
    else:
        if p.group is None:
            rounds, several, item, together = s.split(nest[step], [None, unroll, ty, p.packed])
            run = [rounds, several]
        else:  # a scale is read once a run but multiplies every step: a share may begin inside a run, so it stays in the sum
            rounds, item, pairs, together = s.split(nest[step], [None, ty, p.group // p.packed, p.packed])
            run = [rounds, *s.split(pairs, [None, unroll])]
        s.reorder([*outer, item, *run, *i_1, together, lanes])
        s.unroll(run[-1])
        epilogue_loops = s.reverse_compute_at(p.last.name, j_t)
        partial = summed = rfactor_into_scope(s, main, item, "shared")
    of_item = rfactor_into_scope(s, summed, together, "local", "serial")
    place = next(d for d, e in enumerate(roles.block.body.indices) if e is roles.column)
    for name in (of_item, *({summed} - {partial})):
        sums = s.buffer_of(name)
        rank = len(sums.shape)
        s.permute_layout(buffer=sums.name, order=[*(d for d in range(rank) if d != place), place])
    s.bind(item, "item", 1)
    s.decompose_reduction(block=main, loop=s.inner_loops(main, j_t)[0])
    set_kind_of_copies(s, {lanes: "vectorized", together: "unrolled", **{n: "unrolled" for n in i_1}})
    # every thread has all sums and stores them, which costs little compared with the matrix
    *rows, columns = epilogue_loops
    s.vectorize(columns)
    s.unroll(*rows)
    left = s.buffer_of(partial)
    last = len(left.shape) - 1
    s.permute_layout(buffer=left.name, order=[last, *range(last)])
    s.set_scope(buffer=s.buffer_of(main).name, scope="local")
    s.bind(j_t, "item", 0)
    bind_grid(s, j_0, i_0, batch)
    _guess_columns(s, p, extent if even else None, {"MR": 1} if i_0 else {})


def _guess_columns(s: Schedule, p: GemvProduct, columns: int | None, few: Mapping[str, int]) -> None:
    """Guess the widest vectors for which the columns of a thread block divide `columns`; None allows any width."""
    fits = [
        (threads, width)
        for width in reversed(s.tunables["VL"].domain)
        for threads in (32, 16, 8)
        if threads * width <= 128 and not (columns or 0) % (threads * width)
    ]
    if fits:
        threads, width = fits[0]
        sharing = min(16, 256 // threads)
        each = AT_ONCE[-1] if p.group else p.at_once(sharing * p.packed)
        s.guess({"TX": threads, "TY": sharing, "VL": width, "KU": each, **few})


def _sum_runs_of_scales(s: Schedule, main: str, groups: str, items: Tunable) -> tuple[str, str, str]:
    """Sum the steps of each float scale first, and multiply each sum by its scale once.

    Each thread takes consecutive runs of steps with one scale.

    Returns:
        The loop over threads, the block that adds the runs of a thread, and the block that sums the steps of a run.
    """
    (of_group,) = (n for n in s.rfactor(block=main, loop=groups, scope="local") if not n.endswith("_init"))
    s.hoist_factors(block=of_group)
    group_loops = s.loops_of(of_group)
    left = s.inner_loops(main, group_loops[group_loops.index(groups) - 1])[0]
    item, rounds = s.split(left, [items, None])
    partial = rfactor_into_scope(s, main, item, "shared")
    first, inner = s.split(groups, [items, None])
    s.fuse_sibling_loops(first, item)
    s.fuse_sibling_loops(inner, rounds)
    return first, partial, of_group


def _has_columns(x: Load, roles: Contraction) -> bool:
    return roles.column in free_vars(*x.indices)


def _runs_along(e: Expr, step: Var) -> bool:
    """Return True if an index is the step plus an offset."""
    parts = linear(e, (step,))
    return parts is not None and parts[0].get(step) is const(1)


def _is_constant(e: Expr) -> bool:
    """Return True if an expression is constant for given tunables."""
    return only_tunables(e)


def _widths(roles: Contraction, along: Var, hardware: HardwareInfo) -> list[int]:
    """Return the vector widths for loads of the matrix along an iterator.

    CUDA vectors are arrays, so that the width of one access bounds their bytes; in other languages the elements count as 4 bytes.
    """
    read = [x.buffer.dtype.bytes for x in block_loads(roles.block) if _has_columns(x, roles)]
    size = min(read) if hardware.language == "cuda" else 4
    return vector_widths([i.extent for i in roles.block.iters if i.var is along], hardware, size)


def _prepack_columns(s: Schedule, roles: Contraction, threads: int) -> None:
    """Prepack constant operands with columns last. Raises ScheduleError for other operands without contiguous columns."""
    main = roles.block.name
    for access in block_loads(find_block(s.func, main)):
        if not _has_columns(access, roles):
            continue
        dims = [d for d, e in enumerate(access.indices) if e is roles.column]
        rank = len(access.indices)
        if dims == [rank - 1]:
            continue
        name = access.buffer.name
        is_read_once = sum(x.buffer is access.buffer for x in block_loads(find_block(s.func, main))) == 1
        if access.buffer not in s.func.consts or len(dims) != 1 or not is_read_once:
            raise ScheduleError(f"{s.func.name}: columns of {name!r} are not next to each other")
        (copy,) = s.cache_read(block=main, buffer=name, scope="global")
        order = [*(d for d in range(rank) if d != dims[0]), dims[0]]
        s.permute_layout(buffer=s.buffer_of(copy).name, order=order)
        thread_per_element(s, s.loops_of(copy), threads)
        s.mark_prepack(block=copy)


def _rows(s: Schedule, roles: Contraction, nest: Mapping[Var, str], each: Expr) -> tuple[Sequence[str], Sequence[str]]:
    """Split the rows into tiles; return the loops over tiles and over the rows of a tile, empty without rows.

    Args:
        each: The sums that a thread holds for one row.
    """
    if roles.row is None:
        return (), ()
    known = roles.known_extent(roles.row)
    height = s.tunable("MR", [h for h in HEIGHTS if h == 1 or known is None or h <= known])
    s.require(le(mul(height, each), const(MOST_SUMS)))
    i_0, i_1 = s.split(nest[roles.row], [None, height])
    return (i_0,), (i_1,)
