"""Split a fused tensor function into several at its intermediate buffers.

The split form is an alternative to the fused loops, and measurement chooses between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import Param, PrimFunc
from relax_tune.ir.core.plain_loops import block_loads, plain_blocks, with_blocks
from relax_tune.ir.core.stmt import Block
from relax_tune.ir.deduce.pattern_kinds import PatternKind, block_kind
from relax_tune.ir.passes.fusion.symbol_interface import lift_symbols
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text


@dataclass(frozen=True, slots=True, eq=False)
class FunctionStep:
    """A call of a part of a tensor function.

    Attributes:
        func: The part, over new symbols.
        args: Buffers of the whole function: inputs, then outputs.
        scalars: Scalar arguments, over the symbols of the whole function.
    """

    func: PrimFunc
    args: tuple[Buffer, ...]
    scalars: tuple[Expr, ...]


def step_of(
    func: PrimFunc, name: str, blocks: Sequence[Block], inputs: Sequence[Buffer], outputs: Sequence[Buffer]
) -> FunctionStep:
    """Return a function of some blocks of `func`, or of new blocks over its buffers, with its arguments."""
    outside = {*inputs, *outputs}
    inner = tuple(a for a in func.allocs if a not in outside)
    consts = tuple(c for c in func.consts if c in inputs)
    params: tuple[Param, ...] = (*inputs, *outputs, *func.scalar_params)
    lifted = lift_symbols(with_blocks(PrimFunc(name, params, len(outputs), func.body, inner, consts), blocks), Env())
    return FunctionStep(lifted.func, (*inputs, *outputs), lifted.scalars)


def cut_points(func: PrimFunc) -> tuple[str, ...]:
    """Return the names of the blocks to split `func` at; () if there would be only one part.

    A contraction begins a part that includes the elementwise blocks up to the next contraction. If a reduction is among these blocks, they
    form a separate part.
    """
    blocks = plain_blocks(func) or ()
    products = [k for k, b in enumerate(blocks) if block_kind(b) is PatternKind.OUT_FUSIBLE]
    starts = []
    for k, end in zip(products, (*products[1:], len(blocks)), strict=False):
        starts.append(k)
        if any(b.is_reduction for b in blocks[k + 1 : end]):
            starts.append(k + 1)
    return tuple(blocks[k].name for k in starts if k > 0)


def split_at(func: PrimFunc, begins: Sequence[str]) -> tuple[FunctionStep, ...]:
    """Split `func` before each of the named blocks. Buffers between parts become arguments of both.

    Raises:
        ScheduleError: `begins` does not name blocks of an unscheduled function, in its order and after its first.
    """
    blocks = plain_blocks(func) or ()
    names = [b.name for b in blocks]
    at = [names.index(b) for b in begins if b in names[1:]]
    if len(at) != len(begins) or at != sorted(set(at)) or not at:
        raise ScheduleError(
            f"{func.name}: expected names of blocks after the first, in order, got {list(begins)}; the blocks are {names}"
        )
    parts = [blocks[a:b] for a, b in zip([0, *at], [*at, len(blocks)], strict=True)]
    return tuple(_part(func, number, parts) for number in range(len(parts)))


def _part(func: PrimFunc, number: int, parts: Sequence[Sequence[Block]]) -> FunctionStep:
    mine = parts[number]
    later = {x.buffer for p in parts[number + 1 :] for b in p for x in block_loads(b)}
    written = dict.fromkeys(b.body.buffer for b in mine)
    before = {b.body.buffer for p in parts[:number] for b in p}
    if before & set(written):
        raise ScheduleError(f"{func.name}: expected each buffer written by one part, got {before & set(written)}")
    outputs = tuple(b for b in written if b in later or b in func.output_buffers)
    inputs = tuple(dict.fromkeys(x.buffer for b in mine for x in block_loads(b) if x.buffer not in written))
    step = step_of(func, f"{func.name}_part{number}", mine, inputs, outputs)
    # names are normalised, as in tasks, so that a trace does not depend on names of the whole function
    normal = parse_prim_func(print_text(step.func, normalise=True))
    return replace(step, func=replace(normal, name=step.func.name))
