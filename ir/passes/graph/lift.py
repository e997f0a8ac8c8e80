"""Lifting of computations on weights that are parameters into a separate function, which is called once.

Tests: `tests/ir/passes/graph/test_lift.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from relax_tune.errors import UserError
from relax_tune.ir.core import graph as g
from relax_tune.ir.core import graph_walk
from relax_tune.ir.core.expr import as_int
from relax_tune.ir.core.function import AnyFunction, IRModule
from relax_tune.ir.core.graph_walk import used_vars
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, TupleInfo
from relax_tune.ir.rewrite.emitter import Emitter, rewrite_function


@dataclass(frozen=True, slots=True)
class LiftParameters:
    """Split `main(x, w)` into `main_prepare(w) -> lifted` and `main(x, lifted)` (Relax's LiftTransformParams).

    A value is lifted if operators and tensor functions outside of branches compute it from weights only, and it is not larger than these
    weights, since unpacking is cheaper in the product that reads it (as in `FoldConstants`). Parameters of `main` that are no longer read
    are removed; the others keep their order, and the lifted values follow them. `main_prepare` returns a tuple of the lifted values.

    Attributes:
        weights: Parameters with the same values at every call, such as the weights of a model exported with its weights as inputs.
        function: Name of the function to split.

    Raises:
        UserError: A name is not a parameter, or another function calls `main`, whose signature changes.
    """

    weights: tuple[str, ...]
    function: str = "main"

    def __call__(self, module: IRModule) -> IRModule:
        f = module.functions.get(self.function)
        if not isinstance(f, g.Function):
            raise UserError(f"LiftParameters: the module has no graph function {self.function!r}")
        params = {p.name: p for p in f.params}
        missing = [n for n in self.weights if n not in params]
        if missing:
            raise UserError(f"{f.name}: expected parameters among {', '.join(params)}, got {', '.join(missing)}")
        lifted = _lifted(f, [params[n] for n in dict.fromkeys(self.weights)])
        if not lifted:
            return module
        for other in module.graphs.values():
            if f.name in graph_walk.callees(other):
                raise UserError(f"{f.name}: its signature would change, but {other.name} calls it")
        name = f"{f.name}_prepare"
        while name in module.functions:
            name += "_"
        functions: dict[str, AnyFunction] = dict(module.functions)
        functions[f.name], functions[name] = _rest(f, lifted, self.weights), _prepare(f, lifted, name)
        return replace(module, functions=functions)


def _lifted(f: g.Function, weights: list[g.GVar]) -> list[g.GVar]:
    """Return the variables to lift, in order: those computed from weights only, small enough, and read by the remaining function."""
    sources: dict[g.GVar, frozenset[g.GVar]] = {w: frozenset((w,)) for w in weights if _nbytes(w.info) is not None}
    computed: dict[g.GVar, g.AnyBinding] = {}
    fits: set[g.GVar] = set()
    for b in f.bindings:
        args = b.value.operands
        if not isinstance(b, g.Binding) or not isinstance(b.value, (g.Call, g.CallTIR, g.TupleItem)):
            continue
        known = [a for a in args if isinstance(a, g.GVar)]
        # `FoldConstants` computes values that depend on constants only.
        if not known or not all(isinstance(a, g.Constant) or a in sources for a in args):
            continue
        size = _nbytes(b.var.info)
        if size is None:
            continue
        sources[b.var] = frozenset(w for a in known for w in sources[a])
        computed[b.var] = b
        if isinstance(b.var.info, TensorInfo) and size <= sum(_nbytes(w.info) or 0 for w in sources[b.var]):
            fits.add(b.var)
    # Only the last values of a chain are passed on: the others are read by lifted computations only.
    inside = {id(computed[v].value) for v in fits}
    read = {v for value in graph_walk.all_uses(f) if id(value) not in inside for v in used_vars(value)}
    return [v for v in computed if v in fits and v in read]


def _nbytes(info: StructInfo) -> int | None:
    """Return the bytes of a tensor or of a tuple of tensors; None unless all dims are constants."""
    if isinstance(info, TupleInfo):
        sizes = [_nbytes(i) for i in info.fields]
        return None if None in sizes else sum(s for s in sizes if s is not None)
    if not isinstance(info, TensorInfo) or info.shape is None or info.dtype is None:
        return None
    dims = [as_int(d) for d in info.shape]
    return None if None in dims else math.prod(d for d in dims if d is not None) * info.dtype.bytes


def _needed(f: g.Function, variables: list[g.GVar]) -> list[g.AnyBinding]:
    """Return the bindings of `f` that compute these variables, in order."""
    binding_of = {b.var: b for b in f.bindings}
    needed: set[g.GVar] = set()
    stack: list[g.GVar] = list(variables)
    while stack:
        v = stack.pop()
        if v in binding_of and v not in needed:
            needed.add(v)
            stack.extend(used_vars(binding_of[v].value))
    return [b for b in f.bindings if b.var in needed]


def _prepare(f: g.Function, lifted: list[g.GVar], name: str) -> g.Function:
    """Return the function that computes the lifted variables, over new variables."""
    bindings = _needed(f, lifted)
    used = {v for b in bindings for v in used_vars(b.value)}
    params = [p for p in f.params if p in used]
    copies: dict[g.Value, g.Value] = {v: g.GVar(v.name, v.info) for v in (*params, *(b.var for b in bindings))}
    out = Emitter(mapping=copies)
    copied = []
    for b in bindings:
        var = copies[b.var]
        assert isinstance(var, g.GVar)
        copied.append(g.Binding(var, out.value(b.value)))
    ret = g.TupleValue(tuple(copies[v] for v in lifted))
    infos = TupleInfo(tuple(v.info for v in lifted))
    new_params = tuple(v for v in (copies[p] for p in params) if isinstance(v, g.GVar))
    return g.Function(name, new_params, (g.DataflowBlock(tuple(copied)),), ret, infos)


def _rest(f: g.Function, lifted: list[g.GVar], weights: tuple[str, ...]) -> g.Function:
    """Return `f` with the lifted variables as parameters."""
    new_params = {v: g.GVar(v.name, v.info) for v in lifted}
    mapping: dict[g.Value, g.Value] = dict(new_params.items())
    gone = set(lifted)

    def visit(out: Emitter, binding: g.AnyBinding) -> None:
        if binding.var not in gone:
            out.keep(binding)

    new = rewrite_function(f, visit, mapping=mapping)
    new = _without_unread(new, {b.var for b in _needed(f, lifted)})
    read = {v for value in graph_walk.all_uses(new) for v in used_vars(value)}
    remaining = tuple(p for p in f.params if p in read or p.name not in weights)
    return replace(new, params=(*remaining, *new_params.values()))


def _without_unread(f: g.Function, steps: set[g.GVar]) -> g.Function:
    """Remove the bindings of `steps` that are no longer read."""
    # In a loop, since removing a binding may leave its operands unread.
    while True:
        read = {v for value in graph_walk.all_uses(f) for v in used_vars(value)}
        dead = {b.var for b in graph_walk.all_bindings(f) if b.var in steps and b.var not in read}
        if not dead:
            return f

        def visit(out: Emitter, binding: g.AnyBinding, dead: set[g.GVar] = dead) -> None:
            if binding.var not in dead:
                out.keep(binding)

        f = rewrite_function(f, visit)
