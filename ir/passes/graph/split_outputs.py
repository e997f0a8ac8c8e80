"""Separation of outputs that share no computation, so that each is fused and scheduled separately.

Tests: `tests/ir/passes/test_graph_passes.py`.
"""

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
    """A function that computes some outputs of another one.

    Attributes:
        lifted: The function over new symbols.
        inputs: Positions of the inputs that it reads.
        outputs: Positions of the outputs that it writes.
    """

    lifted: LiftedFunction
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SeparateOutputs:
    """Split a call into one call per group of outputs that share a computed value.

    The pieces of a split operator become slices, which fuse into their readers.
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
                    field = fields[value.value][value.index]
                    if field is binding.var:
                        return  # bound where the call was
                    if isinstance(binding, Binding):
                        out.mapping[binding.var] = field
                        return
                call = binding.value
                parts: tuple[OutputGroup, ...] = ()
                # The positions of in-place outputs refer to the whole call.
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
                outputs: dict[int, GVar] = {}
                for part in parts:
                    outputs |= self._call(out, binding.var, call, args, part, meaning, table, env, items)
                fields[binding.var] = tuple(outputs[i] for i in range(len(call.out)))
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
            # reuse the variable that the program binds the field to, so that results have the same names
            known = items.get((var, i))
            return (
                known
                if known is not None and known.info == call.out[i]
                else GVar(out.fresh(f"{var.name}_{i}"), call.out[i])
            )

        variables = {i: named(i) for i in part.outputs}
        if len(part.outputs) == 1:
            out.bindings.append(Binding(variables[part.outputs[0]], value))
            return variables
        results = out.bind(value, TupleInfo(infos), var.name)
        out.bindings += [Binding(variables[i], TupleItem(results, position)) for position, i in enumerate(part.outputs)]
        return variables


def _whole(value: Value) -> tuple[GVar, ...]:
    """Return the variables whose whole value is read, not a field of it."""
    return () if isinstance(value, TupleItem) and isinstance(value.value, GVar) else used_vars(value)


def _items(f: Function) -> dict[tuple[GVar, int], GVar]:
    """Return the first variable that each field of a tuple is bound to, outside of branches."""
    items: dict[tuple[GVar, int], GVar] = {}
    for b in f.bindings:
        if isinstance(b, Binding) and isinstance(b.value, TupleItem) and isinstance(b.value.value, GVar):
            items.setdefault((b.value.value, b.value.index), b.var)
    return items


def separate(func: PrimFunc, env: Env) -> tuple[OutputGroup, ...]:
    """Split `func` into functions that share no computation, in the order of their first outputs; () if it cannot be split."""
    blocks = plain_blocks(func)
    if blocks is None:
        return ()
    groups: list[tuple[list[int], set[Block]]] = []
    for i, output in enumerate(func.output_buffers):
        outputs, needed = [i], _needed(func, blocks, output)
        # A block that two outputs share joins their groups, and through it groups may join that shared nothing
        # before.
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
    needed: set[Block] = set()
    stack, visited = [output], {output, *func.input_buffers}
    while stack:
        buffer = stack.pop()
        for b in blocks:
            if b.body.buffer is buffer and b not in needed:
                needed.add(b)
                new = [r for r in read_buffers(b) if r not in visited]
                visited.update(new)
                stack += new
    return needed


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
    part = PrimFunc(name, params, len(outputs), func.body, func.allocs, consts)
    return OutputGroup(lift_symbols(with_blocks(part, blocks), env), inputs, tuple(outputs))
