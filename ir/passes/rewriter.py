"""Rewriting graph functions binding by binding, and keeping equal tensor functions once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from relax_tune.ir.deduce import info_of
from relax_tune.ir.function import AnyFunction, IRModule, PrimFunc
from relax_tune.ir.graph import (
    AnyBinding,
    AnyBlock,
    Binding,
    Body,
    Call,
    CallDPSLibrary,
    CallFunction,
    CallHost,
    CallTIR,
    Function,
    GVar,
    If,
    TupleItem,
    TupleValue,
    Value,
    operands,
)
from relax_tune.ir.op.movement import Reshape
from relax_tune.ir.struct_info import StructInfo, TensorInfo
from relax_tune.ir.structural import workload_key


def replace_operands(value: Value, mapping: Mapping[GVar, Value]) -> Value:
    """`value` with graph variables replaced, inside branches too; the same object when none occurs."""
    if isinstance(value, GVar):
        return mapping.get(value, value)
    if isinstance(value, If):
        cond = replace_operands(value.cond, mapping)
        then, orelse = (_replace_body(b, mapping) for b in (value.then, value.orelse))
        same = cond is value.cond and then is value.then and orelse is value.orelse
        return value if same else If(cond, then, orelse)
    old = operands(value)
    new = tuple(replace_operands(v, mapping) for v in old)
    if all(a is b for a, b in zip(old, new, strict=True)):
        return value
    if isinstance(value, (Call, CallTIR, CallDPSLibrary, CallHost)):
        return replace(value, args=new)
    if isinstance(value, CallFunction):
        return CallFunction(new[0], new[1:])
    if isinstance(value, TupleValue):
        return TupleValue(new)
    assert isinstance(value, TupleItem)
    return TupleItem(new[0], value.index)


def _replace_body(body: Body, mapping: Mapping[GVar, Value]) -> Body:
    blocks = tuple(_replace_block(b, mapping) for b in body.blocks)
    ret = replace_operands(body.ret, mapping)
    same = ret is body.ret and all(a is b for a, b in zip(blocks, body.blocks, strict=True))
    return body if same else Body(blocks, ret)


def _replace_block(block: AnyBlock, mapping: Mapping[GVar, Value]) -> AnyBlock:
    new: list[AnyBinding] = []
    for b in block.bindings:
        value = replace_operands(b.value, mapping)
        new.append(b if value is b.value else replace(b, value=value))
    return (
        block if all(a is b for a, b in zip(new, block.bindings, strict=True)) else replace(block, bindings=tuple(new))
    )


def tensor_info(value: Value) -> TensorInfo:
    """The annotation of a tensor."""
    info = info_of(value)
    assert isinstance(info, TensorInfo), info
    return info


def used_vars(value: Value) -> tuple[GVar, ...]:
    """Distinct graph variables of a value."""
    if isinstance(value, GVar):
        return (value,)
    return tuple(dict.fromkeys(v for o in operands(value) for v in used_vars(o)))


@dataclass(slots=True)
class Emitter:
    """The bindings of one new function, in the making. `mapping` takes old variables to new values."""

    mapping: dict[GVar, Value] = field(default_factory=dict)
    bindings: list[AnyBinding] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)

    def value(self, value: Value) -> Value:
        return replace_operands(value, self.mapping)

    def fresh(self, hint: str) -> str:
        number = self.names.get(hint, 0)
        self.names[hint] = number + 1
        return hint if number == 0 else self.fresh(f"{hint}_{number}")

    def bind(self, value: Value, info: StructInfo, hint: str) -> GVar:
        var = GVar(self.fresh(hint), info)
        self.bindings.append(Binding(var, value))
        return var

    def keep(self, binding: AnyBinding) -> None:
        """The binding as it is, over new values."""
        value = self.value(binding.value)
        self.names.setdefault(binding.var.name, 1)
        self.bindings.append(binding if value is binding.value else replace(binding, value=value))

    def view(self, value: Value, info: TensorInfo, hint: str = "view") -> Value:
        """`value` under the dims of `info`; nothing is emitted when it has them."""
        assert info.shape is not None
        if tensor_info(value).shape == info.shape:
            return value
        return self.bind(Call(Reshape(info.shape), (value,)), info, hint)


@dataclass(slots=True)
class FunctionTable:
    """Named functions of a module in the making, structurally equal tensor functions once."""

    functions: dict[str, AnyFunction]
    keys: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, functions: Mapping[str, AnyFunction]) -> FunctionTable:
        table = cls(dict(functions))
        for name, f in functions.items():
            if isinstance(f, PrimFunc):
                table.keys.setdefault(workload_key(f), name)
        return table

    def add(self, func: PrimFunc) -> str:
        """The name under which `func` or an equal function is held."""
        key = workload_key(func)
        known = self.keys.get(key)
        if known is not None:
            return known
        name, i = func.name, 0
        while name in self.functions:
            i += 1
            name = f"{func.name}_{i}"
        self.functions[name] = func if name == func.name else replace(func, name=name)
        self.keys[key] = name
        return name


def rewrite_function(func: Function, visit: Callable[[Emitter, AnyBinding], None]) -> Function:
    """A function rebuilt by `visit`, which emits something for every binding. Same object when nothing changed."""
    out = Emitter(names={p.name: 1 for p in func.params} | {b.var.name: 1 for b in func.bindings})
    blocks: list[AnyBlock] = []
    for block in func.blocks:
        start = len(out.bindings)
        for binding in block.bindings:
            visit(out, binding)
        new = tuple(out.bindings[start:])
        same = len(new) == len(block.bindings) and all(a is b for a, b in zip(new, block.bindings, strict=True))
        blocks.append(block if same else replace(block, bindings=new))
    ret = out.value(func.ret)
    if ret is func.ret and all(a is b for a, b in zip(blocks, func.blocks, strict=True)):
        return func
    return replace(func, blocks=tuple(blocks), ret=ret)


def map_graphs(module: IRModule, fn: Callable[[Function, FunctionTable], Function]) -> IRModule:
    """`fn` on every graph function; tensor functions it makes go into the table. Same object when nothing changed."""
    table = FunctionTable.of(module.functions)
    changed = False
    for name, f in module.functions.items():
        if isinstance(f, Function):
            new = fn(f, table)
            changed = changed or new is not f
            table.functions[name] = new
    changed = changed or len(table.functions) != len(module.functions)
    return replace(module, functions=table.functions) if changed else module
