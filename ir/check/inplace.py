"""Legality of in-place outputs (`call_tir_inplace`, Relax): proofs from the loops and the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from relax_tune.ir.check.aliasing import AliasSets, AllocatedTensor, allocated_tensors
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Const, Load, loads
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import AnyBinding, Body, CallTIR, Function, GVar, Value
from relax_tune.ir.core.graph_walk import all_bindings, nested_values
from relax_tune.ir.core.stmt import Block, BufferStore, IfThenElse, blocks, replace_buffers, seq, statements, walk

# -- the loops ---------------------------------------------------------------------------------------------------------


def why_not_inplace(func: PrimFunc, output: Buffer, source: Buffer) -> str | None:
    """Return why `output` may not share the memory of the input `source`, or None when it may.

    Legal: one block reads `source`, and each of its instances reads only the element that it then writes.
    The answer holds for scheduled functions too, since primitives never split the instance of a block."""
    if output.dtype is not source.dtype or len(output.shape) != len(source.shape):
        return f"{output!r} is not like {source!r}"
    for s in walk(func.body):
        if isinstance(s, (IfThenElse, BufferStore)) and any(x.buffer in (source, output) for x in loads(*s.own_exprs)):
            return f"{source.name} is read outside of blocks"
    order = blocks(func.body)
    readers = [b for b in order if any(x.buffer is source for x in reads_of(b))]
    # An argument that nobody reads may be overwritten at any time.
    if not readers:
        return None
    block = readers[0]
    if len(readers) > 1:
        return f"blocks {block.name} and {readers[1].name} both read {source.name}"
    if block.body.buffer is not output:
        return f"block {block.name} reads {source.name} and does not write {output.name}"
    if next(b for b in order if b.body.buffer is output) is not block:
        return f"{output.name} is written before block {block.name} reads {source.name}"
    # The first store of a reduction overwrites the element that later iterations still read.
    if block.is_reduction or block.init is not None:
        return f"block {block.name} reduces: it reads {source.name} after it has begun to write {output.name}"
    stored = [i for i in block.body.indices if not isinstance(i, Const)]
    # Every iterator must choose the element. With a further one, a second instance would read what the first has
    # stored.
    if len(set(stored)) != len(stored) or set(stored) != {i.var for i in block.iters}:
        return f"block {block.name} may write an element of {output.name} more than once"
    for x in reads_of(block):
        if x.buffer is output or (x.buffer is source and x.indices != block.body.indices):
            written = ", ".join(map(repr, block.body.indices))
            return f"block {block.name} reads {x!r} where it writes {output.name}[{written}]"
    return None


def reads_of(block: Block) -> tuple[Load, ...]:
    """Return the distinct reads of a block, in its statements, bindings and predicate."""
    stores = [block.body] if block.init is None else [block.body, block.init]
    return loads(*(e for s in stores for e in (s.value, *s.indices)), *block.bindings, block.predicate)


def merge_aliased_params(func: PrimFunc, same: Mapping[Buffer, Buffer]) -> PrimFunc:
    """Read inputs through the outputs that share their memory, so that no two pointers of a kernel overlap.

    Args:
        same: input -> output. Loop nests that would only store an element to itself are dropped.
    """
    body = replace_buffers(func.body, same)
    parts = statements(body)
    remaining = [p for p in parts if not blocks(p) or not all(_stays(b) for b in blocks(p))]
    return replace(func, params=tuple(p for p in func.params if p not in same), body=seq(*remaining))


def _stays(block: Block) -> bool:
    value = block.body.value
    there = isinstance(value, Load) and value.buffer is block.body.buffer and value.indices == block.body.indices
    return there and block.init is None


# -- the graph ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class InplaceConflict:
    """An illegal in-place output.

    Attributes:
        var: variable that the call binds.
        output: number of the output.
        why: reason.
        at: node of the program to show.
    """

    var: GVar
    output: int
    why: str
    at: object


def inplace_conflicts(f: Function, module: IRModule) -> Iterator[InplaceConflict]:
    """Yield the illegal in-place outputs of `f`.

    An output is illegal when the function does not own the argument's memory, when the argument is read later, or when the
    loops of the tensor function forbid it.
    """
    if not any(isinstance(v, CallTIR) and v.inplace for v in nested_values(f)):
        return
    yield from _InplaceChecker(module).body(f)


class _InplaceChecker:
    """A walk over a function in program order.

    Attributes:
        aliases: alias sets, in-place outputs as separate tensors.
        allocated_in: body that allocates each tensor.
        overwritten_by: output that overwrote each tensor.
    """

    def __init__(self, module: IRModule) -> None:
        self.module = module
        self.aliases = AliasSets(inplace=False)
        self.allocated_in: dict[AllocatedTensor, Function | Body] = {}
        self.overwritten_by: dict[AllocatedTensor, AllocatedTensor] = {}

    def body(self, body: Function | Body) -> Iterator[InplaceConflict]:
        for b in body.bindings:
            # The sides first: what either of them overwrites is lost for the bindings after the `if`.
            for side in b.value.bodies:
                yield from self.body(side)
            yield from self.reads(b.value, b)
            if isinstance(b.value, CallTIR) and b.value.inplace:
                yield from self.call(b, b.value, body)
            self.aliases.bind(b.var, b.value)
            allocated = (
                enumerate(b.value.out) if isinstance(b.value, CallTIR) else allocated_tensors(b.value, b.var.info)
            )
            self.allocated_in.update({(b.var, i): body for i, _ in allocated})
        yield from self.reads(body.ret, body.ret if isinstance(body, Function) else body)

    def reads(self, value: Value, at: object) -> Iterator[InplaceConflict]:
        for t in self.aliases.read_tensors(value):
            if t in self.overwritten_by:
                var, i = self.overwritten_by[t]
                yield InplaceConflict(
                    var, i, f"{t[0].name} is used here, after {var.name} was written in its memory", at
                )

    def call(self, b: AnyBinding, call: CallTIR, body: Function | Body) -> Iterator[InplaceConflict]:
        for i, at in enumerate(call.inplace):
            if at is None:
                continue
            arg = call.args[at]
            name = getattr(arg, "name", repr(arg))
            tensors = set(self.aliases.tensors_of(arg))
            t = next(iter(tensors), None)
            why: str | None = None
            if not isinstance(arg, GVar) or t is None or len(tensors) != 1 or t not in self.allocated_in:
                why = f"{name} is not computed by this function: its memory belongs to a parameter or a weight, or is unknown"
            elif self.allocated_in[t] is not body:
                why = f"{name} is allocated outside this side of the branch"
            elif t in self.overwritten_by:
                why = f"{name} was overwritten before, by {self.overwritten_by[t][0].name}"
            else:
                why = self.loops(call, i, t)
                self.overwritten_by[t] = b.var, i
            if why is not None:
                expected = f"expected an argument that output {i} of {call.callee} may overwrite"
                yield InplaceConflict(b.var, i, f"{expected}: {why}; call_tir gives it new memory", b)

    def loops(self, call: CallTIR, i: int, t: AllocatedTensor) -> str | None:
        func = self.module.prim(call.callee)
        sources = sources_of(func, call, t, self.aliases)
        return next((w for s in sources if (w := why_not_inplace(func, func.output_buffers[i], s)) is not None), None)


def sources_of(func: PrimFunc, call: CallTIR, t: AllocatedTensor, aliases: AliasSets) -> list[Buffer]:
    """Return the parameters of `func` whose arguments lie in the memory of `t`."""
    pairs = zip(func.input_buffers, call.args, strict=True)
    return [b for b, arg in pairs if isinstance(arg, GVar) and t in aliases.tensors_of(arg)]


def ordering_constrained(f: Function) -> frozenset[GVar]:
    """Return the variables whose bindings must keep their order: in-place calls, and earlier readers of the overwritten memory."""
    calls = {v for v in nested_values(f) if isinstance(v, CallTIR) and v.inplace}
    if not calls:
        return frozenset()
    # With the output as a new tensor: as an alias, every later reader of the output would count as a reader of the
    # old value.
    aliases = AliasSets(inplace=False)
    reads: list[tuple[GVar, set[AllocatedTensor]]] = []
    overwritten: set[AllocatedTensor] = set()
    for b in all_bindings(f):
        var, value = b.var, b.value
        reads.append((var, aliases.read_tensors(value)))
        if isinstance(value, CallTIR) and value in calls:
            overwritten.update(t for at in value.inplace if at is not None for t in aliases.tensors_of(value.args[at]))
        aliases.bind(var, value)
    return frozenset(var for var, read in reads if read & overwritten)
