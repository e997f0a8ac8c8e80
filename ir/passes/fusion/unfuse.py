"""A fused function as several: cut at buffers, each part a tensor function that computes what later parts read.

Nothing is decided here: a cut is an alternative to the fused loops that measuring compares (DESIGN 2, "variant").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import Param, PrimFunc
from relax_tune.ir.core.stmt import Block
from relax_tune.ir.passes.fusion.plain_loops import block_loads, plain_blocks, with_blocks
from relax_tune.ir.passes.fusion.symbol_interface import lift_symbols
from relax_tune.ir.rewrite.pattern_kinds import PatternKind, block_kind
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text


@dataclass(frozen=True, slots=True, eq=False)
class FunctionStep:
    """A tensor function over its own symbols, called on buffers of the whole (inputs, then outputs) and scalars over the whole
    function's symbols."""

    func: PrimFunc
    args: tuple[Buffer, ...]
    scalars: tuple[Expr, ...]


def step_of(
    func: PrimFunc, name: str, blocks: Sequence[Block], inputs: Sequence[Buffer], outputs: Sequence[Buffer]
) -> FunctionStep:
    """Some blocks of `func`, or ones made for it, as a function of their own."""
    outside = {*inputs, *outputs}
    inner = tuple(a for a in func.allocs if a not in outside)
    consts = tuple(c for c in func.consts if c in inputs)
    params: tuple[Param, ...] = (*inputs, *outputs, *func.scalar_params)
    lifted = lift_symbols(with_blocks(PrimFunc(name, params, len(outputs), func.body, inner, consts), blocks), Env())
    return FunctionStep(lifted.func, (*inputs, *outputs), lifted.scalars)


def cut_points(func: PrimFunc) -> tuple[str, ...]:
    """The blocks that parts of `func` begin with after the first, such that a product is a part with what is done to its elements
    before the next product; a row function between or around products is a part, and so is what a product reads that is computed.
    Nothing for a function without products, or of one part."""
    blocks = plain_blocks(func) or ()
    products = [k for k, b in enumerate(blocks) if block_kind(b) is PatternKind.OUT_FUSIBLE]
    found = []
    for k, end in zip(products, (*products[1:], len(blocks)), strict=False):
        found.append(k)
        if any(b.is_reduction for b in blocks[k + 1 : end]):
            found.append(k + 1)
    return tuple(blocks[k].name for k in found if k > 0)


def split_at(func: PrimFunc, begins: Sequence[str]) -> tuple[FunctionStep, ...]:
    """The parts of `func`, the second and later ones beginning with the blocks named. What a part computes and another reads is
    an argument of both.

    Raises ScheduleError when those are not blocks of an unscheduled function, in its order and after its first."""
    blocks = plain_blocks(func) or ()
    names = [b.name for b in blocks]
    at = [names.index(b) for b in begins if b in names[1:]]
    if len(at) != len(begins) or at != sorted(set(at)) or not at:
        raise ScheduleError(
            f"{func.name}: wanted blocks to cut at, in order and after the first, found {list(begins)}; it has {names}"
        )
    parts = [blocks[a:b] for a, b in zip([0, *at], [*at, len(blocks)], strict=True)]
    return tuple(_part(func, number, parts) for number in range(len(parts)))


def _part(func: PrimFunc, number: int, parts: Sequence[Sequence[Block]]) -> FunctionStep:
    mine = parts[number]
    later = {x.buffer for p in parts[number + 1 :] for b in p for x in block_loads(b)}
    written = dict.fromkeys(b.body.buffer for b in mine)
    before = {b.body.buffer for p in parts[:number] for b in p}
    if before & set(written):
        raise ScheduleError(f"{func.name}: wanted each buffer written by one part, found {before & set(written)}")
    outputs = tuple(b for b in written if b in later or b in func.output_buffers)
    inputs = tuple(dict.fromkeys(x.buffer for b in mine for x in block_loads(b) if x.buffer not in written))
    step = step_of(func, f"{func.name}_part{number}", mine, inputs, outputs)
    # as tasks are, so that what a trace names is the same whatever the whole function calls things
    normal = parse_prim_func(print_text(step.func, normalise=True))
    return replace(step, func=replace(normal, name=step.func.name))
