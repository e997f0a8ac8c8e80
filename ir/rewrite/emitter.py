"""Rewriting graph functions binding by binding, and keeping equal tensor functions once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.core.function import AnyFunction, IRModule, PrimFunc
from relax_tune.ir.core.graph import (
    AnyBinding,
    AnyBlock,
    Binding,
    Body,
    Call,
    CallDPSLibrary,
    CallFunction,
    CallHost,
    CallTIR,
    Constant,
    Function,
    GVar,
    If,
    TupleItem,
    TupleValue,
    Value,
    all_bindings,
    operands,
)
from relax_tune.ir.core.names import unused
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.deduce.deduce import info_of, side_env
from relax_tune.ir.op.movement import VIEWS, Reshape


def replace_operands(value: Value, mapping: Mapping[Value, Value]) -> Value:
    """`value` with variables and weights replaced, inside branches too; the same object when none occurs."""
    if isinstance(value, (GVar, Constant)):
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
    return with_operands(value, new)


def with_operands(value: Value, new: Sequence[Value]) -> Value:
    """`value`, which is no `if`, made of other operands."""
    if isinstance(value, CallTIR) and value.inplace:
        # a value that became a weight keeps its memory
        kept = tuple(None if at is None or isinstance(new[at], Constant) else at for at in value.inplace)
        return replace(value, args=tuple(new), inplace=kept if any(at is not None for at in kept) else ())
    if isinstance(value, (Call, CallTIR, CallDPSLibrary, CallHost)):
        return replace(value, args=tuple(new))
    if isinstance(value, CallFunction):
        return CallFunction(new[0], tuple(new[1:]))
    if isinstance(value, TupleValue):
        return TupleValue(tuple(new))
    if isinstance(value, TupleItem):
        return TupleItem(new[0], value.index)
    return value


def _replace_body(body: Body, mapping: Mapping[Value, Value]) -> Body:
    blocks = tuple(_replace_block(b, mapping) for b in body.blocks)
    ret = replace_operands(body.ret, mapping)
    same = ret is body.ret and all(a is b for a, b in zip(blocks, body.blocks, strict=True))
    return body if same else Body(blocks, ret)


def _replace_block(block: AnyBlock, mapping: Mapping[Value, Value]) -> AnyBlock:
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


def returned(func: Function) -> set[GVar]:
    """The variables whose memory the function hands out: its results, and what those view, rename or take out of tuples.

    A built program wants each result computed, and by itself: these may be replaced by nothing that it holds already."""
    made = {b.var: b.value for b in func.bindings}
    found: set[GVar] = set()
    stack = list(used_vars(func.ret))
    while stack:
        v = stack.pop()
        value = made.get(v)
        if v not in found and value is not None:
            found.add(v)
            if isinstance(value, (GVar, TupleValue, TupleItem)) or is_view(value):
                stack.extend(used_vars(value))
    return found


def is_view(value: Value) -> bool:
    """Whether a value is another one's memory under other dims."""
    return isinstance(value, Call) and isinstance(value.op, VIEWS)


@dataclass(slots=True)
class Emitter:
    """The bindings of one new function, in the making. `mapping` takes old variables and weights to new values.

    known: what a pass remembers of values that exist here, forgotten at the end of the side of an `if` it was found on; env: what
    holds of the symbols here; depth: how many branches this is inside."""

    mapping: dict[Value, Value] = field(default_factory=dict)
    bindings: list[AnyBinding] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    known: dict[object, Value] = field(default_factory=dict)
    env: Env = field(default_factory=Env)
    depth: int = 0

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
        name = unused(func.name, self.functions)
        self.functions[name] = func if name == func.name else replace(func, name=name)
        self.keys[key] = name
        return name


def rewrite_function(
    func: Function,
    visit: Callable[[Emitter, AnyBinding], None],
    env: Env | None = None,
    mapping: Mapping[Value, Value] | None = None,
) -> Function:
    """A function rebuilt by `visit`, which emits something for every binding. Same object when nothing changed.

    The bindings inside the sides of an `if` are visited before the `if` itself, which `visit` gets over its new sides.
    env: what is known of the symbols; `Emitter.env` adds what an `if` says of them on the side being visited. mapping: what is
    replaced from the start."""
    names = dict.fromkeys((v.name for v in (*func.params, *_variables(func))), 1)
    out = Emitter(dict(mapping or {}), names=names, env=env or Env())
    blocks = _rewrite_blocks(func.blocks, out, visit)
    ret = out.value(func.ret)
    return func if blocks is func.blocks and ret is func.ret else replace(func, blocks=blocks, ret=ret)


def _variables(func: Function) -> Iterator[GVar]:
    return (b.var for b in all_bindings(func))


def _rewrite_blocks(
    old: tuple[AnyBlock, ...], out: Emitter, visit: Callable[[Emitter, AnyBinding], None]
) -> tuple[AnyBlock, ...]:
    blocks: list[AnyBlock] = []
    for block in old:
        start = len(out.bindings)
        for binding in block.bindings:
            if isinstance(binding.value, If):
                value = _rewrite_sides(binding.value, out, visit)
                binding = binding if value is binding.value else replace(binding, value=value)
            visit(out, binding)
        new = tuple(out.bindings[start:])
        blocks.append(block if same_objects(new, block.bindings) else replace(block, bindings=new))
    return old if same_objects(blocks, old) else tuple(blocks)


def _rewrite_sides(value: If, out: Emitter, visit: Callable[[Emitter, AnyBinding], None]) -> If:
    """Each side in a scope of its own: what it defines, and what is found out there, ends with it."""
    cond = out.value(value.cond)
    outer = (out.mapping, out.bindings, out.known, out.env)
    sides: list[Body] = []
    for body in (value.then, value.orelse):
        out.mapping, out.bindings, out.known = dict(outer[0]), [], dict(outer[2])
        out.env = side_env(outer[3], cond, body is value.then)
        out.depth += 1
        blocks = _rewrite_blocks(body.blocks, out, visit)
        ret = out.value(body.ret)
        out.depth -= 1
        sides.append(body if blocks is body.blocks and ret is body.ret else Body(blocks, ret))
        out.mapping, out.bindings, out.known, out.env = outer
    return value if same_objects((cond, *sides), (value.cond, value.then, value.orelse)) else If(cond, *sides)


def same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
    """The very same objects, in order."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


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
