"""The roles of a convolution's operands and iterators, and layouts of its operands for the inner loops.

Copying the input for each tap turns a convolution into a matmul (im2col; implicit GEMM in Chetlur et al. 2014, cuDNN).

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Load, Tunable, Var, as_int, free_vars, postorder
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import depends_on, final_block, inlinable
from relax_tune.schedules.independence import writers
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.primitives.reduction.reductions import combiner
from relax_tune.schedules.rules.shared.blocks import writer_of
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.symbols import variables_of
from relax_tune.schedules.target import HardwareInfo


@dataclass(frozen=True, slots=True)
class Window:
    """One dimension of the windows: the input's dimension `dim` is read at `place * stride + shift(tap)`."""

    dim: int
    place: Var
    tap: Var
    stride: int


@dataclass(frozen=True, slots=True)
class ConvolutionRoles:
    """A convolution's operands and iterators.

    Attributes:
        source, weights: The loads of the input and of the weights.
        windows: The window dimensions, in the order of the input's dimensions.
        channel: The iterator of output channels.
        channel_dim: The dimension of `channel` in the weights.
        depth: The reduction iterators other than taps.
        each: The number of neighbouring channels that read the same input elements; None if all channels do.
    """

    source: Load
    weights: Load
    windows: tuple[Window, ...]
    channel: Var
    channel_dim: int
    depth: tuple[Var, ...]
    each: int | None

    @property
    def steps(self) -> tuple[Var, ...]:
        """The reduction iterators, taps innermost."""
        return (*self.depth, *(w.tap for w in self.windows))


def find_convolution(block: Block) -> ConvolutionRoles | None:
    """Return the roles of a convolution's block, or None for any other block."""
    accesses, kinds = block_loads(block), {i.var: i.kind for i in block.iters}
    if len(accesses) != 2 or not block.body.value.op or combiner(block)[0] != "add":
        return None
    # Either factor may come first, since a product may be written in both orders.
    for source, weights in (accesses, accesses[::-1]):
        candidates = {v: k for v, k in kinds.items() if k == "reduce" or v not in weights.indices}
        windows = tuple(w for d, e in enumerate(source.indices) if (w := _window(d, e, candidates)) is not None)
        outside = [v for v in variables_of(weights.indices) if kinds.get(v) == "spatial"]
        if not windows or len(outside) != 1 or any(v not in kinds for v in weights.indices):
            continue
        (channel,) = outside
        places, taps = {w.place for w in windows}, {w.tap for w in windows}
        if channel in places or len(places) != len(windows) or len(taps) != len(windows):
            continue
        depth = tuple(i.var for i in block.iters if i.kind == "reduce" and i.var not in taps)
        each = _each(source, channel)
        if each != 0:
            return ConvolutionRoles(source, weights, windows, channel, weights.indices.index(channel), depth, each)
    return None


def _window(dim: int, e: Expr, kinds: Mapping[Var, str]) -> Window | None:
    places, taps = ([v for v in free_vars(e) if kinds.get(v) == k] for k in ("spatial", "reduce"))
    parts = linear(e, [*places, *taps]) if len(places) == len(taps) == 1 else None
    stride = None if parts is None else as_int(parts[0][places[0]])
    return None if stride is None or stride < 1 else Window(dim, places[0], taps[0], stride)


def _each(source: Load, channel: Var) -> int | None:
    """Return how many neighbouring channels read the same input: None if all do, 0 if the dependence is unknown."""
    using = [e for e in source.indices if channel in free_vars(e)]
    if not using:
        return None
    groups = {n.args[1] for n in postorder(using) if n.op == "floordiv" and n.args[0] is channel}
    if not groups:
        return 1
    return (as_int(groups.pop()) or 0) if len(groups) == 1 else 0


def pack_weights(s: Schedule, main: str, roles: ConvolutionRoles, panel: Tunable, steps: Sequence[Var]) -> None:
    """Copy the weights in the order of the inner loops: panels of channels, the reduction, the channels of a panel."""
    name = roles.weights.buffer.name
    packed = f"{name}_cache"
    (copy,) = s.cache_read(block=main, buffer=name, scope="global")
    if roles.weights.buffer in s.func.consts:
        s.mark_prepack(block=copy)
    dim = roles.channel_dim
    rest = [d for v in steps for d, w in enumerate(roles.weights.indices) if w is v]
    order = [dim, *(d if d < dim else d + 1 for d in rest), dim + 1]
    s.tile_layout(buffer=packed, dim=dim, factor=panel, order=order)


def copy_taps(s: Schedule, hardware: HardwareInfo, main: str, roles: ConvolutionRoles) -> None:
    """Copy the input once for each tap of all windows but the first (a partial im2col).

    Output positions are innermost in the copy, and the first window's dimension precedes them.
    """
    name, first = roles.source.buffer.name, roles.windows[0]
    others = roles.windows[1:]
    copied = f"{name}_reindex"
    (copy,) = s.reindex(block=main, buffer=name, dims=[w.dim for w in others])
    node = find_block(s.func, main)
    access = next(x for x in block_loads(node) if x.buffer.name == copied)
    taps = [d for d, e in enumerate(access.indices) if e in [w.tap for w in others]]
    places = [d for d, e in enumerate(access.indices) if e in [w.place for w in others]]
    order = [*(d for d in range(first.dim)), *taps, first.dim, *places]
    loops = [s.loops_of(copy)[d] for d in order]
    s.permute_layout(buffer=copied, order=order)
    # Grouped by the remainder, places at a distance of one stride become neighbours.
    if first.stride > 1:
        at = order.index(first.dim)
        by_remainder = [*range(at), at + 1, at, *range(at + 2, len(order) + 1)]
        s.tile_layout(buffer=copied, dim=at, factor=first.stride, order=by_remainder)
    s.reorder(loops)
    parallelise_copy(s, hardware, loops)


def copy_by_remainder(s: Schedule, hardware: HardwareInfo, main: str, roles: ConvolutionRoles) -> None:
    """Copy the input with the elements of a row grouped by their position modulo the stride."""
    name, last = roles.source.buffer.name, roles.windows[-1]
    s.cache_read(block=main, buffer=name, scope="global")
    rank = len(roles.source.indices)
    order = [d if d <= last.dim else d + 1 for d in range(rank) if d != last.dim]
    s.tile_layout(buffer=f"{name}_cache", dim=last.dim, factor=last.stride, order=[*order, last.dim + 1, last.dim])
    parallelise_copy(s, hardware, s.loops_of(writer_of(s, f"{name}_cache")))


def parallelise_copy(s: Schedule, hardware: HardwareInfo, loops: Sequence[str]) -> None:
    """Vectorise the rows of a copy and spread its planes over workers."""
    v_0, v_1 = s.split(loops[-1], [None, hardware.lanes])
    s.set_tail(v_0, "peel")
    s.vectorize(v_1)
    top = s.fuse(loops[: len(loops) - 2])
    s.set_kind(top, "group" if hardware.has_grid else "parallel")


def inline_around_windows(s: Schedule, main: str) -> str | None:
    """Inline the blocks after a convolution into the last one, and keep the block that makes its input.

    An input element is read through many windows, so the input is computed once, in full. Returns the block that makes it, or None.

    Raises:
        ScheduleError: When other blocks remain.
    """
    roles = find_convolution(find_block(s.func, main))
    assert roles is not None
    for b in blocks(s.func.body):
        if b.name != main and b.body.buffer is not roles.source.buffer and inlinable(s.func, b):
            s.compute_inline(b.name)
    last, source = final_block(s.func), writers(s.func, roles.source.buffer)
    if any(not inlinable(s.func, b) for b in source) or len(source) > 1:
        raise ScheduleError(
            f"{s.func.name}: {roles.source.buffer.name!r} is not written by one block, element by element"
        )
    rest = [b for b in blocks(s.func.body) if b.name not in (main, last.name) and b not in source]
    if rest or (last.name != main and not depends_on(s.func, last, find_block(s.func, main))):
        raise ScheduleError(f"{s.func.name}: expected a convolution and one epilogue")
    return source[0].name if source else None


def loops_by_iter(s: Schedule, block: str, inside: str | None = None) -> dict[Var, str]:
    """Return the innermost loop that feeds each iterator of a block, among the loops inside `inside` or all of them."""
    node = find_block(s.func, block)
    names = s.loops_of(block) if inside is None else s.inner_loops(block, inside)
    feeding_by_iter = {
        i.var: [n for n in names if n in {v.name for v in free_vars(b)}] for i, b in zip(node.iters, node.bindings)
    }
    return {v: feeding[-1] for v, feeding in feeding_by_iter.items() if feeding}


def output_loops(s: Schedule, main: str) -> dict[Var, str]:
    """Return the loop of the last block that reads the convolution's output along each of its spatial iterators."""
    node, last = find_block(s.func, main), final_block(s.func)
    access = next(x for x in block_loads(last) if x.buffer is node.body.buffer)
    nest = loops_by_iter(s, last.name)
    if len(nest) != len(access.indices) or any(e not in nest for e in access.indices):
        raise ScheduleError(f"{s.func.name}: {last.name!r} does not read the convolution element by element")
    pairs = zip(node.body.indices, access.indices, strict=True)
    return {v: nest[e] for v, e in pairs if isinstance(v, Var) and isinstance(e, Var)}


def fuse_dims(s: Schedule, buffer: Buffer, first: int, count: int) -> None:
    """Fuse `count` neighbouring dimensions of a buffer into one."""
    if count < 2:
        return
    names = [f"i{d}" for d in range(len(buffer.shape))]
    joined = names[first]
    for d in range(first + 1, first + count):
        joined = f"({joined}) * n{d} + {names[d]}"
    new = [*names[:first], joined, *names[first + count :]]
    s.transform_layout(buffer=buffer.name, index_map=f"{', '.join(names)} -> {', '.join(new)}")
