"""Rewriting graph functions binding by binding, and keeping equal tensor functions once.

Tests: `tests/ir/passes/graph/test_combine_matmuls.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.check.aliasing import is_view
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.core import graph as g
from relax_tune.ir.core import graph_walk
from relax_tune.ir.core.function import AnyFunction, IRModule, PrimFunc
from relax_tune.ir.core.graph_walk import used_vars
from relax_tune.ir.core.names import fresh, same_objects
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.deduce.deduce import side_env
from relax_tune.ir.op.indexing.movement import Reshape


def tensor_info(value: g.Value) -> TensorInfo:
    """Return the annotation of a tensor."""
    info = value.info
    assert isinstance(info, TensorInfo), info
    return info


def returned(func: g.Function) -> set[g.GVar]:
    """Return the variables whose memory the function returns: its results, and all that these view, rename or unpack.

    A built program computes each result into separate memory, so no existing value may replace one of these.
    """
    definitions = {b.var: b.value for b in func.bindings}
    variables: set[g.GVar] = set()
    stack = list(used_vars(func.ret))
    while stack:
        v = stack.pop()
        value = definitions.get(v)
        if v not in variables and value is not None:
            variables.add(v)
            # These share the memory of what they read. All other values are computed into new memory.
            if isinstance(value, (g.GVar, g.TupleValue, g.TupleItem)) or is_view(value):
                stack.extend(used_vars(value))
    return variables


@dataclass(slots=True)
class Emitter:
    """The bindings of one function that is being rewritten.

    Attributes:
        mapping: old variables and weights to new values.
        names: variable names that are taken, with the number of their next copy.
        known: facts about values of this scope; facts from a side of an `if` end with it.
        env: facts about the symbols here.
        depth: number of enclosing branches.
    """

    mapping: dict[g.Value, g.Value] = field(default_factory=dict)
    bindings: list[g.AnyBinding] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    known: dict[object, g.Value] = field(default_factory=dict)
    env: Env = field(default_factory=Env)
    depth: int = 0

    def value(self, value: g.Value) -> g.Value:
        return g.replace_operands(value, self.mapping)

    def fresh(self, hint: str) -> str:
        number = self.names.get(hint, 0)
        self.names[hint] = number + 1
        return hint if number == 0 else self.fresh(f"{hint}_{number}")

    def bind(self, value: g.Value, info: StructInfo, hint: str) -> g.GVar:
        var = g.GVar(self.fresh(hint), info)
        self.bindings.append(g.Binding(var, value))
        return var

    def keep(self, binding: g.AnyBinding) -> None:
        """Emit the binding unchanged, over new values."""
        value = self.value(binding.value)
        self.names.setdefault(binding.var.name, 1)
        self.bindings.append(binding if value is binding.value else replace(binding, value=value))

    def view(self, value: g.Value, info: TensorInfo, hint: str = "view") -> g.Value:
        """Return `value` under the dims of `info`; emit a reshape if they differ."""
        assert info.shape is not None
        if tensor_info(value).shape == info.shape:
            return value
        return self.bind(g.Call(Reshape(info.shape), (value,)), info, hint)


@dataclass(slots=True)
class FunctionTable:
    """Named functions of a module under construction; structurally equal tensor functions are stored once.

    Attributes:
        keys: name of a tensor function by workload key; None until one is added, as many passes add none.
    """

    functions: dict[str, AnyFunction]
    keys: dict[str, str] | None = None

    @classmethod
    def of(cls, functions: Mapping[str, AnyFunction]) -> FunctionTable:
        return cls(dict(functions))

    def prim(self, name: str) -> PrimFunc:
        """Return the tensor function `name`. Raises KeyError."""
        function = self.functions[name]
        if not isinstance(function, PrimFunc):
            raise KeyError(f"expected a tensor function called {name!r}, got a {type(function).__name__}")
        return function

    def add(self, func: PrimFunc) -> str:
        """Add `func` unless the table has an equal function; return its name."""
        if self.keys is None:
            self.keys = {}
            for name, f in self.functions.items():
                if isinstance(f, PrimFunc):
                    self.keys.setdefault(workload_key(f), name)
        key = workload_key(func)
        known = self.keys.get(key)
        if known is not None:
            return known
        name = fresh(func.name, self.functions)
        self.functions[name] = func if name == func.name else replace(func, name=name)
        self.keys[key] = name
        return name


def rewrite_function(
    func: g.Function,
    visit: Callable[[Emitter, g.AnyBinding], None],
    env: Env | None = None,
    mapping: Mapping[g.Value, g.Value] | None = None,
) -> g.Function:
    """Rebuild a function with `visit`, which emits something for every binding. Returns the same object when nothing
    changes.

    The sides of an `if` are visited before the `if` itself. On each side `Emitter.env` has the condition as a fact.

    Args:
        env: facts about the symbols.
        mapping: replacements from the start.
    """
    # All names of the old function are taken from the start: a new variable must not have the name of a binding that
    # is still to come.
    names = dict.fromkeys((v.name for v in (*func.params, *_variables(func))), 1)
    out = Emitter(dict(mapping or {}), names=names, env=env or Env())
    blocks = _rewrite_blocks(func.blocks, out, visit)
    ret = out.value(func.ret)
    return func if blocks is func.blocks and ret is func.ret else replace(func, blocks=blocks, ret=ret)


def _variables(func: g.Function) -> Iterator[g.GVar]:
    return (b.var for b in graph_walk.all_bindings(func))


def _rewrite_blocks(
    old: tuple[g.AnyBlock, ...], out: Emitter, visit: Callable[[Emitter, g.AnyBinding], None]
) -> tuple[g.AnyBlock, ...]:
    blocks: list[g.AnyBlock] = []
    for block in old:
        start = len(out.bindings)
        for binding in block.bindings:
            if isinstance(binding.value, g.If):
                value = _rewrite_sides(binding.value, out, visit)
                binding = binding if value is binding.value else replace(binding, value=value)
            visit(out, binding)
        new = tuple(out.bindings[start:])
        blocks.append(block if same_objects(new, block.bindings) else replace(block, bindings=new))
    return old if same_objects(blocks, old) else tuple(blocks)


def _rewrite_sides(value: g.If, out: Emitter, visit: Callable[[Emitter, g.AnyBinding], None]) -> g.If:
    """Rewrite each side in a separate scope."""
    cond = out.value(value.cond)
    outer = (out.mapping, out.bindings, out.known, out.env)
    sides: list[g.Body] = []
    for body in value.bodies:
        # Copies: a side may use what is known outside, but what it learns holds only if it runs.
        out.mapping, out.bindings, out.known = dict(outer[0]), [], dict(outer[2])
        out.env = side_env(outer[3], cond, body is value.then)
        out.depth += 1
        blocks = _rewrite_blocks(body.blocks, out, visit)
        ret = out.value(body.ret)
        out.depth -= 1
        sides.append(body if blocks is body.blocks and ret is body.ret else g.Body(blocks, ret))
        out.mapping, out.bindings, out.known, out.env = outer
    return value.with_bodies(sides, cond)


def map_graphs(module: IRModule, fn: Callable[[g.Function, FunctionTable], g.Function]) -> IRModule:
    """Apply `fn` to every graph function; new tensor functions go into the table. Returns the same object when
    nothing changes.
    """
    table = FunctionTable.of(module.functions)
    changed = False
    for name, f in module.functions.items():
        if isinstance(f, g.Function):
            new = fn(f, table)
            changed = changed or new is not f
            table.functions[name] = new
    changed = changed or len(table.functions) != len(module.functions)
    return replace(module, functions=table.functions) if changed else module
