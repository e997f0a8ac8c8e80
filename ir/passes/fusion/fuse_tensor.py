"""Merge the tensor functions of a group into one (`FuseTensorIR`, Relax, section 4.2).

Tests: `tests/ir/passes/fusion/test_fuse.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Load, Var, substitute, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.graph import CallTIR, Constant, GVar, Value
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.plain_loops import block_loads, plain_blocks, with_blocks
from relax_tune.ir.core.stmt import Block, redirect, replace_buffers
from relax_tune.ir.deduce.copies import compares_copies
from relax_tune.ir.deduce.pattern_kinds import Access, access_of, is_trivial, store_axes
from relax_tune.ir.passes.fusion.symbol_interface import LiftedFunction, bind_symbols, lift_symbols, outer_symbols
from relax_tune.ir.rewrite.emitter import tensor_info


@dataclass(frozen=True, slots=True)
class FusionStage:
    """One call of a group.

    Attributes:
        out: Variable that the call binds.
        call: The `call_tir`.
        func: Its callee.
    """

    out: GVar
    call: CallTIR
    func: PrimFunc


@dataclass(frozen=True, slots=True)
class FusedStages:
    """The merged function of a group.

    Attributes:
        lifted: The function over new symbols, and their values.
        args: Arguments for its inputs.
    """

    lifted: LiftedFunction
    args: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class JoinedStages:
    """The blocks of a group over common buffers.

    Attributes:
        inputs: Buffers of the arguments.
        args: The arguments.
        consts: Buffers of arguments that are constants.
        results: Buffer that each stage writes, by the variable that its call binds.
        buffers: Buffers that the stages write, in order.
        blocks: The blocks in order.
    """

    inputs: tuple[Buffer, ...]
    args: tuple[Value, ...]
    consts: tuple[Buffer, ...]
    results: Mapping[GVar, Buffer]
    buffers: tuple[Buffer, ...]
    blocks: tuple[Block, ...]

    def fused(self, name: str, blocks: Sequence[Block], outputs: Sequence[Buffer], env: Env) -> FusedStages:
        """Return a function of these blocks. Buffers that are not outputs are intermediate."""
        allocs = dict.fromkeys(b for b in (*self.buffers, *(x.body.buffer for x in blocks)) if b not in outputs)
        func = PrimFunc(name, (*self.inputs, *outputs), len(outputs), blocks[0].body, tuple(allocs), self.consts)
        return FusedStages(lift_symbols(with_blocks(func, blocks), env), self.args)


def fuse_stages(name: str, stages: Sequence[FusionStage], env: Env) -> FusedStages:
    """Merge the functions of `stages`, in order, into one function.

    The output of the last stage is the output of the group. Values between stages become intermediate buffers. A spatial block with one
    reader is inlined into it. A final permutation is merged into the stores of its producers.
    """
    joined = join_stages(stages, env)
    output = joined.results[stages[-1].out]
    return joined.fused(name, inline(joined.blocks, output), (output,), env)


def join_stages(stages: Sequence[FusionStage], env: Env) -> JoinedStages:
    """Return the blocks of all stages, in order. Values between stages become intermediate buffers."""
    buffer_of: dict[object, Buffer] = {}  # by argument, by (constant, name), or by the variable of a stage
    results: dict[GVar, Buffer] = {}
    inputs: list[Buffer] = []
    args: list[Value] = []
    consts: list[Buffer] = []
    written: list[Buffer] = []
    blocks: list[Block] = []
    names: set[str] = set()

    def unique(hint: str) -> str:
        names.add(name := fresh(hint, names))
        return name

    for stage in stages:
        stage_blocks = plain_blocks(stage.func)
        assert stage_blocks is not None, stage.func.name
        infos = [tensor_info(a) for a in stage.call.args]
        symbols = bind_symbols(stage.func, infos, stage.call.out, stage.call.scalars)
        buffers: dict[Buffer, Buffer] = {}
        for buffer, arg in zip(stage.func.input_buffers, stage.call.args, strict=True):
            # By name, since two uses of a weight are two `Constant` objects, which must become one argument.
            key: object = ("constant", arg.name) if isinstance(arg, Constant) else arg
            if key not in buffer_of:
                buffer_of[key] = replace(buffer, name=unique(buffer.name), shape=_dims(buffer, symbols, env))
                inputs.append(buffer_of[key])
                args.append(arg)
                if isinstance(arg, Constant):
                    consts.append(buffer_of[key])
            buffers[buffer] = buffer_of[key]
        (result,) = stage.func.output_buffers
        # Every stage gets new buffers: two stages may be calls of one function, whose buffers are the same objects.
        for buffer in (result, *stage.func.allocs):
            buffers[buffer] = replace(buffer, name=unique(buffer.name), shape=_dims(buffer, symbols, env))
        results[stage.out] = buffer_of[stage.out] = buffers[result]
        written.extend(buffers[buffer] for buffer in (*stage.func.allocs, result))
        outer = {v: symbols[v] for v in outer_symbols(stage.func) if v in symbols}
        for block in stage_blocks:
            blocks.append(replace_buffers(block, buffers).map_own_exprs(lambda e, o=outer: substitute(e, o)))  # type: ignore[misc]
    return JoinedStages(tuple(inputs), tuple(args), tuple(consts), results, tuple(written), tuple(blocks))


def _dims(buffer: Buffer, symbols: Mapping[Var, Expr], env: Env) -> tuple[Expr, ...]:
    return tuple(simplify(substitute(d, symbols), env) for d in buffer.shape)


def inline(blocks: Sequence[Block], output: Buffer) -> list[Block]:
    """Inline spatial blocks, except the block of `output`, into their readers if no arithmetic is repeated."""
    left = list(blocks)
    # last blocks first, so that a chain of producers is inlined into its final reader
    for block in reversed(blocks):
        if block not in left:
            continue
        at = left.index(block)
        target = block.body.buffer
        readers = [i for i, b in enumerate(left) if i != at and any(r.buffer is target for r in block_loads(b))]
        writers = [b for b in left if b.body.buffer is target]
        axes = store_axes(block)
        # The terms of a reduction would be summed again for each element that reads it. A buffer with several writers
        # (a concatenation) has no single expression for an element.
        if target is output or block.is_reduction or axes is None or len(writers) != 1 or not readers:
            continue
        if len(readers) > 1 and not is_trivial(block):  # each reader would repeat the arithmetic
            continue
        swap = substitution(target, axes, block.body.value)
        if compares_copies(target, [left[i] for i in readers], swap):
            continue
        for i in readers:
            left[i] = left[i].map_own_exprs(swap)
        left.pop(left.index(block))
    return _write_through(left, output)


def substitution(target: Buffer, axes: Sequence[Var], value: Expr) -> Callable[[Expr], Expr]:
    """Return a substitution of the value of an element for each read of it."""

    def swap(e: Expr) -> Expr:
        return transform(
            e,
            lambda x: (
                substitute(value, dict(zip(axes, x.indices, strict=True)))
                if isinstance(x, Load) and x.buffer is target
                else None
            ),
        )

    return swap


def _write_through(blocks: list[Block], output: Buffer) -> list[Block]:
    """Drop a last block that only permutes an intermediate buffer, and permute the stores of the producers instead."""
    last = blocks[-1]
    axes, value = store_axes(last), last.body.value
    if len(blocks) < 2 or last.is_reduction or axes is None or not isinstance(value, Load):
        return blocks
    source = value.buffer
    is_intermediate = any(b.body.buffer is source for b in blocks[:-1])
    if not is_intermediate or access_of(last, value) not in (Access.IDENTITY, Access.PERMUTATION):
        return blocks  # if the block reads a part of the buffer only, producers would write the other elements out of bounds
    # The producer stores at the indices of the intermediate. The k-th index of the output is the one at which the
    # last block read it.
    positions = [value.indices.index(v) for v in axes]

    def order(indices: Sequence[Expr]) -> tuple[Expr, ...]:
        return tuple(indices[p] for p in positions)

    return [redirect(b, lambda buffer, at: (output, order(at)) if buffer is source else None) for b in blocks[:-1]]
