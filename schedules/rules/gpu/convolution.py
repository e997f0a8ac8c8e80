"""GPU rule for convolutions with fused producers and epilogues.

implicit_gemm, implicit_gemm_split_k: the convolution is a matrix product of the weights and the im2col matrix. Only slices of that
matrix exist, in shared memory (implicit GEMM, Chetlur et al. 2014, cuDNN).
direct: each thread computes a run of neighbouring output positions and reads their windows from the input. It serves depthwise
convolutions, where few channels read the same input.

Tests: `tests/schedules/rules/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import as_int, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.analysis import final_block, reductions
from relax_tune.schedules.loop_tree import block_loads, find_alloc, find_block
from relax_tune.schedules.rules.shared.blocks import writer_of
from relax_tune.schedules.rules.shared.conv_analysis import (
    ConvolutionRoles,
    find_convolution,
    fuse_dims,
    inline_around_windows,
    loops_by_iter,
    output_loops,
)
from relax_tune.schedules.rules.shared.forms import first_applicable, try_forms
from relax_tune.schedules.rules.shared.register_tiles import tile_product
from relax_tune.schedules.rules.shared.staging import copy_strategies
from relax_tune.schedules.rules.shared.stream_k import Decomposition
from relax_tune.schedules.rules.shared.threads import limit_threads
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.symbols import variables_of
from relax_tune.schedules.target import HardwareInfo

TAPS = 7
"""Reduction loops of at most this extent are unrolled."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketches of a convolution; none for other functions."""
    nodes = reductions(func)
    if len(nodes) != 1 or nodes[0].init is None or find_convolution(nodes[0]) is None:
        return
    for name, split in (("implicit_gemm", False), ("implicit_gemm_split_k", True)):
        some = (
            partial(_implicit_gemm, func, hardware, split, asynchronous) for asynchronous in copy_strategies(hardware)
        )
        yield from first_applicable(func, f"convolution.{name}", some)
    yield from try_forms(func, [("convolution.direct", partial(_direct, func, hardware))])


def _prepared(s: Schedule) -> tuple[str, ConvolutionRoles, str | None]:
    """Inline producers and consumers into at most one block before and one after the convolution.

    Returns:
        The convolution's block, its roles, and the block that makes its input, if any.
    """
    main = reductions(s.func)[0].name
    producer = inline_around_windows(s, main)
    if s.buffer_of(main) in s.func.output_buffers:
        s.cache_write(block=main, scope="global")
    roles = find_convolution(find_block(s.func, main))
    if roles is None:
        raise ScheduleError(f"{s.func.name}: after inlining, it is no convolution")
    return main, roles, producer


def _implicit_gemm(func: PrimFunc, hardware: HardwareInfo, split: bool, ahead: bool) -> Schedule:
    """Schedule an implicit GEMM: output positions are its columns, and channels and taps are its steps.

    Args:
        split: Use split-K.
        ahead: Copy slices ahead of their use with `cp.async`.

    Raises:
        ScheduleError: For grouped convolutions.
    """
    s = Schedule(func)
    main, roles, producer = _prepared(s)
    # In a grouped convolution a channel reads its part of the input only; as one matrix product it would be mostly
    # zeros.
    if roles.each is not None:
        raise ScheduleError(f"{func.name}: expected channels that all read the same input")
    node, places = find_block(s.func, main), [w.place for w in roles.windows]
    first = node.body.indices.index(places[0])
    read, others = _im2col(s, main, roles, producer)
    name = roles.weights.buffer.name
    s.cache_read(block=main, buffer=name, scope="global")
    weights, order = f"{name}_cache", [roles.channel_dim, *(roles.weights.indices.index(v) for v in roles.steps)]
    s.permute_layout(buffer=weights, order=order)
    after, epilogue = output_loops(s, main), final_block(s.func).name
    nest = loops_by_iter(s, main)
    s.reorder([nest[v] for v in nest if v not in roles.steps] + [nest[v] for v in roles.steps])
    # One iterator of places and one of steps make the convolution a product as `tile_product` expects it.
    s.fuse_block_iters(block=main, names=[nest[v] for v in places])
    s.fuse_block_iters(block=main, names=[nest[v] for v in roles.steps])
    s.fuse_block_iters(block=epilogue, names=[after[v] for v in places])
    fuse_dims(s, node.body.buffer, first, len(places))
    _fuse_copy_dims(s, weights, 1, len(roles.steps))
    _fuse_copy_dims(s, read, others, len(roles.steps))
    _fuse_copy_dims(s, read, others + 1, len(places))
    form: Decomposition = "split_k" if split else "data_parallel"
    tile_product(s, main, hardware, form, ahead, [writer_of(s, read), writer_of(s, weights)])
    return s


def _fuse_copy_dims(s: Schedule, buffer: str, first: int, count: int) -> None:
    """Fuse `count` neighbouring dimensions of a copied buffer, and the loops of the copy over them."""
    block = writer_of(s, buffer)
    node, nest = find_block(s.func, block), loops_by_iter(s, block)
    loops = [nest[v] for v in variables_of(node.body.indices)]
    s.reorder(loops)
    s.fuse_block_iters(block=block, names=loops[first : first + count])
    fuse_dims(s, find_alloc(s.func, buffer), first, count)


def _im2col(s: Schedule, main: str, roles: ConvolutionRoles, producer: str | None) -> tuple[str, int]:
    """Copy the input into im2col order: other dimensions, then channels and taps, then output positions.

    Args:
        producer: The block that makes the input, which is inlined into the copy.

    Returns:
        The copied buffer and the number of its other dimensions.
    """
    name = roles.source.buffer.name
    s.reindex(block=main, buffer=name, dims=[w.dim for w in roles.windows])
    # Inlined after the reindexing, the producer is computed by the copy, not by each thread that multiplies.
    if producer is not None:
        s.compute_inline(producer)
    buffer = f"{name}_reindex"
    (indices,) = (x.indices for x in block_loads(find_block(s.func, main)) if x.buffer.name == buffer)
    steps, places = [v for v in roles.steps if v in indices], [w.place for w in roles.windows]
    if len(steps) < len(roles.steps):
        raise ScheduleError(f"{s.func.name}: {name!r} is not indexed by each step")
    others = [d for d, e in enumerate(indices) if e not in (*steps, *places)]
    s.permute_layout(buffer=buffer, order=[*others, *(indices.index(v) for v in (*steps, *places))])
    return buffer, len(others)


def _direct(func: PrimFunc, hardware: HardwareInfo) -> Schedule:
    """Give each thread W neighbouring output positions of a row, whose windows overlap in its registers."""
    s = Schedule(func)
    main, roles, producer = _prepared(s)
    if producer is not None:
        s.compute_inline(producer)
    s.set_scope(buffer=s.buffer_of(main).name, scope="local")
    items, lines = s.tunable("TX", (4, 8, 16, 32, 64)), s.tunable("TY", (1, 2, 4, 8, 16, 32))
    run = s.tunable("W", (1, 2, 4))
    limit_threads(s, hardware, mul(items, lines))
    nest, epilogue = loops_by_iter(s, main), final_block(s.func).name
    *_, column = [w.place for w in roles.windows]
    steps = [nest[v] for v in roles.steps]
    others = [n for v, n in nest.items() if v is not column and v not in roles.steps]
    c_0, c_t, c_1 = s.split(nest[column], [None, items, run])
    l_0, l_t = s.split(others[-1], [None, lines])
    s.reorder([*others[:-1], l_0, c_0, l_t, c_t, *steps, c_1])
    after = s.reverse_compute_at(epilogue, c_t)
    s.decompose_reduction(block=main, loop=steps[0])
    s.unroll(*after, *(s.loops_of(b)[-1] for b in (main, f"{main}_init")))
    for v in roles.steps:
        # Unrolled taps make the overlap of neighbouring windows visible to the compiler, which then loads it once.
        if (as_int(s.extent(nest[v])) or TAPS + 1) <= TAPS:
            s.unroll(nest[v])
    s.bind(c_t, "item", 0)
    s.bind(l_t, "item", 1)
    s.bind(c_0, "group", 0)
    s.bind(l_0, "group", 1)
    if others[:-1]:
        s.bind(s.fuse(others[:-1]), "group", 2)
    s.guess({"TX": 32, "TY": 4, "W": 2}, {"TX": 8, "TY": 8, "W": 1})
    return s
