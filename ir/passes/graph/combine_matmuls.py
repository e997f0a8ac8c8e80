"""Merge matmuls of one value by several weights into one wide matmul, whose columns the readers use.

Tests: `tests/ir/passes/graph/test_combine_matmuls.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.check.aliasing import is_view
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Expr, add, as_int, const, mul
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import AnyBinding, AnyBlock, Binding, Call, CallTIR, Constant, Function, GVar, Value
from relax_tune.ir.core.graph_walk import all_blocks, all_uses, nested_values, used_vars
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.deduce.deduce import infer_value
from relax_tune.ir.op.base import Deduction, env_of, product
from relax_tune.ir.op.math.elementwise import Add, Unary
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.fusion.symbol_interface import lift_symbols
from relax_tune.ir.passes.graph.constant_fold import add_constant
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, rewrite_function

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear function `unary(... (x @ w + bias))` as a chain of bindings.

    Attributes:
        steps: Variables bound to the matmul, the sum with the bias if there is one, and the elementwise functions.
        lead: Dims of the result before the last one.
        width: Last dim of the result.
    """

    x: GVar
    matmul: Matmul
    weight: Constant
    bias: Constant | None
    unary: tuple[Unary, ...]
    steps: tuple[GVar, ...]
    lead: tuple[Expr, ...]
    width: int
    dtype: DType

    @property
    def end(self) -> GVar:
        return self.steps[-1]

    @property
    def alike(self) -> tuple[object, ...]:
        """A key that is equal for linear functions that one wide matmul can compute."""
        # `transpose_b` is False or True, that is axis 0 or 1: the axis that is summed.
        rows = None if self.weight.info.shape is None else self.weight.info.shape[self.matmul.transpose_b]
        return (self.x, self.matmul, self.dtype, rows, repr(self.unary))


@dataclass(frozen=True, slots=True)
class Wide:
    """Linear functions that become one wide matmul.

    Attributes:
        parts: The linear functions.
        starts: First column of each part.
        width: Columns of the wide matmul.
    """

    parts: tuple[Linear, ...]
    starts: tuple[int, ...]
    width: int


@dataclass(frozen=True, slots=True)
class CombineParallelMatmuls:
    """Merge parallel matmuls, such as query, key and value (merged QKV).

    `x @ w1 + b1`, `x @ w2 + b2` ... become `x @ [w1 w2 ...] + [b1 b2 ...]`. The weights are concatenated when building. Readers use columns
    of the wide result, and `FuseOps(through_columns=True)` fuses the selection of columns into the readers. There are fewer calls, `x` is
    read once, and no value is copied.

    Matmuls with an elementwise epilogue (gate and up) are not merged, since they would then write and read one more value. Neither are
    matmuls whose results the function returns.

    Attributes:
        epilogues: Whether matmuls with elementwise epilogues are merged as well.
    """

    epilogues: bool = False

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)
        constants: dict[str, Array] = dict(module.constants)
        merged: dict[tuple[object, ...], Constant] = {}

        def function(f: Function, table: FunctionTable) -> Function:
            wides = self._find(f, Deduction(env))
            if not wides:
                return f
            first = {w.parts[0].steps[0]: w for w in wides}
            home = {p.end: (w, i) for w in wides for i, p in enumerate(w.parts)}
            inner = {v for w in wides for p in w.parts for v in p.steps}
            combined: dict[Wide, GVar] = {}
            # A view of a part selects its columns itself, in the dims of the view.
            read_directly = {v for value in all_uses(f) if not is_view(value) for v in used_vars(value) if v in home}

            def columns(out: Emitter, end: GVar, dims: Sequence[Expr]) -> CallTIR:
                wide, i = home[end]
                part = wide.parts[i]
                func = take_columns(part, wide.width, wide.starts[i], dims, Deduction(out.env))
                assert func is not None
                lifted = lift_symbols(func, out.env)
                info = TensorInfo(tuple(dims), part.dtype)
                return CallTIR(table.add(lifted.func), (combined[wide],), (info,), lifted.scalars)

            def visit(out: Emitter, binding: AnyBinding) -> None:
                value = binding.value
                if binding.var in first:
                    wide = first[binding.var]
                    combined[wide] = self._emit(out, wide, constants, merged)
                if binding.var in home and binding.var in read_directly:
                    part = home[binding.var][0].parts[home[binding.var][1]]
                    call = columns(out, binding.var, (*part.lead, const(part.width)))
                    out.bindings.append(Binding(binding.var, call))
                elif binding.var in inner:
                    return
                elif is_view(value) and isinstance(value, Call) and value.args[0] in home:
                    assert isinstance(value.args[0], GVar) and isinstance(binding.var.info, TensorInfo)
                    call = columns(out, value.args[0], binding.var.info.shape or ())
                    out.bindings.append(Binding(binding.var, call))
                else:
                    out.keep(binding)

            return rewrite_function(f, visit, env)

        new = map_graphs(module, function)
        return module if new is module else replace(new, constants=constants)

    def _find(self, f: Function, ctx: Deduction) -> list[Wide]:
        readers: dict[GVar, list[Value]] = {}
        for value in all_uses(f):
            for v in used_vars(value):
                readers.setdefault(v, []).append(value)
        uses = Counter(v.name for v in nested_values(f) if isinstance(v, Constant))
        wides: list[Wide] = []
        for block in all_blocks(f):
            alike: dict[tuple[object, ...], list[Linear]] = {}
            for part in _linears(block, readers):
                # a weight with other uses would be stored twice
                if uses[part.weight.name] == 1 and self._may_merge(part, readers[part.end], ctx):
                    alike.setdefault(part.alike, []).append(part)
            for parts in alike.values():
                if len(parts) > 1:
                    ends = np.cumsum([p.width for p in parts]).tolist()
                    wides.append(Wide(tuple(parts), (0, *ends[:-1]), ends[-1]))
        return wides

    def _may_merge(self, part: Linear, readers: Sequence[Value], ctx: Deduction) -> bool:
        """Return whether every reader of the part can read columns of the wide product."""
        for value in readers:
            op = value.op if isinstance(value, Call) else None
            if is_view(value):
                info = infer_value(value, ctx)
                dims = info.shape if isinstance(info, TensorInfo) else None
                if dims is None or take_columns(part, part.width, 0, dims, ctx) is None:
                    return False
            elif not isinstance(op, Matmul) and not (self.epilogues and op is not None):
                return False
        return True

    @staticmethod
    def _emit(
        out: Emitter, wide: Wide, constants: dict[str, Array], merged: dict[tuple[object, ...], Constant]
    ) -> GVar:
        """Emit the wide product."""
        parts, head = wide.parts, wide.parts[0]

        def concatenated(hint: str, arrays: Sequence[Array], axis: int) -> Constant:
            # functions that share weights also share the merged weights
            key = (hint, *(p.weight.name for p in parts))
            if key not in merged:
                merged[key] = add_constant(
                    constants, "_".join([hint, parts[0].weight.name]), np.concatenate(arrays, axis)
                )
            return merged[key]

        axis = 0 if head.matmul.transpose_b else 1
        weight = concatenated("merged", [constants[p.weight.name] for p in parts], axis)
        info = TensorInfo((*head.lead, const(wide.width)), head.dtype)
        hint = head.steps[0].name
        var = out.bind(Call(head.matmul, (out.value(head.x), weight)), info, f"{hint}_merged")
        if any(p.bias is not None for p in parts):
            # Adding zero changes no result but the sign of a zero.
            zero = [np.zeros(p.width, head.dtype.numpy) for p in parts]
            rows = [z if p.bias is None else constants[p.bias.name] for p, z in zip(parts, zero, strict=True)]
            var = out.bind(Call(Add(), (var, concatenated("merged_bias", rows, 0))), info, f"{hint}_biased")
        for op in head.unary:
            var = out.bind(Call(op, (var,)), info, op.name)
        return var


def _linears(block: AnyBlock, readers: Mapping[GVar, list[Value]]) -> list[Linear]:
    """Return the products by weights in a block, each with the bias and elementwise functions that are its only readers."""
    variable_of = {id(b.value): b.var for b in block.bindings if isinstance(b, Binding)}
    linears: list[Linear] = []
    for b in block.bindings:
        value, info = b.value, b.var.info
        if not isinstance(b, Binding) or not isinstance(value, Call) or not isinstance(value.op, Matmul):
            continue
        x, w = value.args
        if not isinstance(x, GVar) or not isinstance(w, Constant) or len(w.info.shape or ()) != 2:
            continue
        if not isinstance(info, TensorInfo) or info.shape is None or info.dtype is None:
            continue
        width = as_int(info.shape[-1])
        if width is None:
            continue
        steps, bias, unary = [b.var], None, list[Unary]()
        while True:
            after = readers.get(steps[-1], [])
            (call,) = after if len(after) == 1 else (None,)
            if not isinstance(call, Call) or id(call) not in variable_of or variable_of[id(call)].info != info:
                break
            other = [a for a in call.args if a is not steps[-1]]
            # Only before the elementwise functions: f(x @ w) + b cannot be merged as f(x @ w + b).
            if isinstance(call.op, Add) and not unary and bias is None and len(other) == 1:
                if not isinstance(other[0], Constant) or other[0].info.shape != (const(width),):
                    break
                bias = other[0]
            elif isinstance(call.op, Unary):
                unary.append(call.op)
            else:
                break
            steps.append(variable_of[id(call)])
        if readers.get(steps[-1]):
            lead = info.shape[:-1]
            linears.append(Linear(x, value.op, w, bias, tuple(unary), tuple(steps), lead, width, info.dtype))
    return linears


def take_columns(part: Linear, width: int, start: int, dims: Sequence[Expr], ctx: Deduction) -> PrimFunc | None:
    """Return the function `wide (*lead, width) -> columns (dims)` that selects `part.width` columns from `start`.

    Return None if no product of last dims equals the number of columns of the part.
    """
    sizes = [as_int(product(dims[p:])) for p in range(len(dims) + 1)]
    for split in (p for p, size in enumerate(sizes) if size == part.width):
        rows = dims[:split]
        plain = len(rows) == len(part.lead) and all(map(ctx.same, rows, part.lead))
        if plain or (len(part.lead) == 1 and ctx.same(product(rows), part.lead[0])):
            break
    else:
        return None
    b = TensorBuilder("columns")
    x = b.input("x", (*part.lead, const(width)), part.dtype)
    y = b.output("y", dims, part.dtype)

    def value(*i: Expr) -> Expr:
        row = i[:split] if plain else (_flat(i[:split], rows),)
        return x[(*row, add(_flat(i[split:], dims[split:]), const(start)))]

    b.compute(y, value, "columns")
    return b.finish()


def _flat(indices: Sequence[Expr], dims: Sequence[Expr]) -> Expr:
    """Return the row-major position of `indices` in `dims`."""
    at: Expr = const(0)
    for i, d in zip(indices, dims, strict=True):
        at = add(mul(at, d), i)
    return at
