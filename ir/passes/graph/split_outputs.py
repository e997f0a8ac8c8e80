"""Separation of outputs that share no computation, so that each one fuses and is scheduled by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, substitute
from relax_tune.ir.core.function import IRModule, Param, PrimFunc
from relax_tune.ir.core.graph import AnyBinding, Binding, CallTIR, Function, GVar, TupleItem, TupleValue, Value
from relax_tune.ir.core.graph_walk import all_uses, used_vars
from relax_tune.ir.core.plain_loops import plain_blocks, read_buffers, with_blocks
from relax_tune.ir.core.stmt import Block
from relax_tune.ir.core.struct_info import TupleInfo
from relax_tune.ir.op.base import env_of
from relax_tune.ir.passes.fusion.symbol_interface import LiftedFunction, bind_symbols, lift_symbols
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, rewrite_function, tensor_info


@dataclass(frozen=True, slots=True)
class OutputGroup:
    """A function of some outputs of another one: the inputs that it reads, and the outputs that it writes."""

    lifted: LiftedFunction
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SeparateOutputs:
    """Split a call whose outputs share no computed value into one call for each group of outputs that do.

    The pieces of a split become slices, which fuse into their readers. Outputs that share a value stay in one call.
    """

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)
        done: dict[str, tuple[OutputGroup, ...]] = {}

        def function(f: Function, table: FunctionTable) -> Function:
            items = _items(f)
            whole_used = {v for value in all_uses(f) for v in _whole(value)}
            fields: dict[GVar, tuple[GVar, ...]] = {}

            def visit(out: Emitter, binding: AnyBinding) -> None:
                value = out.value(binding.value)
                if isinstance(value, TupleItem) and isinstance(value.value, GVar) and value.value in fields:
                    whole = fields[value.value][value.index]
                    if whole is binding.var:
                        return  # emitted at the place of the call
                    if isinstance(binding, Binding):
                        out.mapping[binding.var] = whole
                        return
                call = binding.value
                parts: tuple[OutputGroup, ...] = ()
                if isinstance(call, CallTIR) and len(call.out) > 1 and not call.inplace:
                    if call.callee not in done:
                        done[call.callee] = separate(table.prim(call.callee), env)
                    parts = done[call.callee]
                if len(parts) < 2 or not isinstance(call, CallTIR):
                    out.keep(binding)
                    return
                callee = table.prim(call.callee)
                args = tuple(map(out.value, call.args))
                meaning = bind_symbols(callee, [tensor_info(a) for a in call.args], call.out, call.scalars)
                made: dict[int, GVar] = {}
                for part in parts:
                    made |= self._call(out, binding.var, call, args, part, meaning, table, env, items)
                fields[binding.var] = tuple(made[i] for i in range(len(call.out)))
                if binding.var in whole_used:
                    out.bindings.append(Binding(binding.var, TupleValue(fields[binding.var])))

            return rewrite_function(f, visit)

        return map_graphs(module, function)

    @staticmethod
    def _call(
        out: Emitter,
        var: GVar,
        call: CallTIR,
        args: Sequence[Value],
        part: OutputGroup,
        meaning: Mapping[Var, Expr],
        table: FunctionTable,
        env: Env,
        items: Mapping[tuple[GVar, int], GVar],
    ) -> dict[int, GVar]:
        """Emit one part; return the variable of each of its outputs."""
        callee = table.add(part.lifted.func)
        infos = tuple(call.out[i] for i in part.outputs)
        scalars = tuple(simplify(substitute(e, meaning), env) for e in part.lifted.scalars)
        value = CallTIR(callee, tuple(args[i] for i in part.inputs), infos, scalars)

        def named(i: int) -> GVar:
            # the variable the program takes the field by, where there is one: results keep their names
            known = items.get((var, i))
            return (
                known
                if known is not None and known.info == call.out[i]
                else GVar(out.fresh(f"{var.name}_{i}"), call.out[i])
            )

        found = {i: named(i) for i in part.outputs}
        if len(part.outputs) == 1:
            out.bindings.append(Binding(found[part.outputs[0]], value))
            return found
        whole = out.bind(value, TupleInfo(infos), var.name)
        out.bindings += [Binding(found[i], TupleItem(whole, position)) for position, i in enumerate(part.outputs)]
        return found


def _whole(value: Value) -> tuple[GVar, ...]:
    """Return the variables that a value reads whole; a field of a tuple is not."""
    return () if isinstance(value, TupleItem) and isinstance(value.value, GVar) else used_vars(value)


def _items(f: Function) -> dict[tuple[GVar, int], GVar]:
    """Return the first variable that each field of a tuple is bound to, by the function's own bindings."""
    found: dict[tuple[GVar, int], GVar] = {}
    for b in f.bindings:
        if isinstance(b, Binding) and isinstance(b.value, TupleItem) and isinstance(b.value.value, GVar):
            found.setdefault((b.value.value, b.value.index), b.var)
    return found


def separate(func: PrimFunc, env: Env) -> tuple[OutputGroup, ...]:
    """Split `func` into functions that share no computation, in the order of their first outputs.

    There is one part if all outputs share some.
    """
    blocks = plain_blocks(func)
    if blocks is None:
        return ()
    groups: list[tuple[list[int], set[Block]]] = []
    for i, output in enumerate(func.output_buffers):
        outputs, needed = [i], _needed(func, blocks, output)
        for other in [g for g in groups if g[1] & needed]:
            groups.remove(other)
            outputs, needed = other[0] + outputs, other[1] | needed
        groups.append((outputs, needed))
    if len(groups) < 2:
        return ()
    groups.sort(key=lambda g: min(g[0]))
    return tuple(_part(func, sorted(outputs), [b for b in blocks if b in needed], env) for outputs, needed in groups)


def _needed(func: PrimFunc, blocks: Sequence[Block], output: Buffer) -> set[Block]:
    """Return every block that contributes to an output."""
    found: set[Block] = set()
    wanted, seen = [output], {output, *func.input_buffers}
    while wanted:
        buffer = wanted.pop()
        for b in blocks:
            if b.body.buffer is buffer and b not in found:
                found.add(b)
                fresh = [r for r in read_buffers(b) if r not in seen]
                seen.update(fresh)
                wanted += fresh
    return found


def _part(func: PrimFunc, outputs: Sequence[int], blocks: Sequence[Block], env: Env) -> OutputGroup:
    reads = {r for b in blocks for r in read_buffers(b)}
    inputs = tuple(i for i, b in enumerate(func.input_buffers) if b in reads)
    params: tuple[Param, ...] = (
        *(func.input_buffers[i] for i in inputs),
        *(func.output_buffers[i] for i in outputs),
        *func.scalar_params,
    )
    name = "_".join([func.name, *map(str, outputs)])
    consts = tuple(c for c in func.consts if c in params)
    whole = PrimFunc(name, params, len(outputs), func.body, func.allocs, consts)
    return OutputGroup(lift_symbols(with_blocks(whole, blocks), env), inputs, tuple(outputs))
