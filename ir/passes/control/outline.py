"""Outlining: functions with control flow become host functions that call straight-line subgraphs (paper section 3.1).

A subgraph is a graph function of tensor operations only; its parameters determine every symbol in its dims. The host function
keeps branches, calls, side effects, shapes, tuples, casts and sizes that depend on data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from relax_tune.errors import BuildError
from relax_tune.ir.check.aliasing import is_view
from relax_tune.ir.core import graph as g
from relax_tune.ir.core import graph_walk
from relax_tune.ir.core.expr import Var
from relax_tune.ir.core.function import AnyFunction, Bound, IRModule
from relax_tune.ir.core.graph_walk import operator_of, used_vars
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.struct_info import (
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
    info_parts,
    info_symbols,
    tensor_dims,
)
from relax_tune.ir.deduce.deduce import signature
from relax_tune.ir.deduce.relations import is_known
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.shapes import ShapeOperator
from relax_tune.ir.passes.control.runtime_shapes import RuntimeShapeInliner
from relax_tune.ir.rewrite.dead_code import without_dead_code
from relax_tune.ir.text.printer import excerpt


@dataclass(frozen=True, slots=True, eq=False)
class OutlinedModule:
    """A module after outlining.

    host_functions: names of the functions with control flow.
    subgraphs: names of the straight-line functions that they call."""

    module: IRModule
    host_functions: tuple[str, ...]
    subgraphs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OutlineSubgraphs:
    """Turn `roots`, and the functions they call without inlining, into host functions with outlined subgraphs.

    Raises BuildError, showing the place, for an operator on a tensor whose rank or element type is known only at run
    time; DeduceError for shapes that can never fit.
    """

    roots: tuple[str, ...] = ("main",)

    def __call__(self, module: IRModule) -> IRModule:
        return self.run(module).module

    def run(self, module: IRModule) -> OutlinedModule:
        functions: dict[str, AnyFunction] = {n: f for n, f in module.functions.items() if not isinstance(f, g.Function)}
        whole: dict[str, g.Function] = {}
        bounds: list[Bound] = list(module.bounds)
        recursive = _recursive(module)
        todo = list(reversed(self.roots))
        while todo:
            name = todo.pop()
            f = module.functions[name]
            if name in whole or not isinstance(f, g.Function):
                continue
            walk = RuntimeShapeInliner(module, recursive)
            whole[name] = walk.root(f, f.params)
            bounds += walk.bounds
            todo += reversed(graph_walk.callees(whole[name]))
        functions.update(whole)
        subgraphs: list[str] = []
        for name, f in whole.items():
            outliner = Outliner(f, functions)
            functions[name] = outliner.function()
            subgraphs += outliner.subgraphs
        return OutlinedModule(
            replace(module, functions=functions, bounds=tuple(bounds)), tuple(whole), tuple(subgraphs)
        )


def _recursive(module: IRModule) -> frozenset[str]:
    """Return the functions that call themselves, directly or not."""
    calls = {n: graph_walk.callees(f) for n, f in module.graphs.items()}
    found = set[str]()
    for name in calls:
        seen, stack = set[str](), list(calls[name])
        while stack:
            callee = stack.pop()
            if callee not in seen:
                seen.add(callee)
                stack += calls.get(callee, ())
        if name in seen:
            found.add(name)
    return frozenset(found)


def is_straight_line(f: g.Function) -> bool:
    """Return whether a function is a sequence of operators on tensors of known dims."""
    if not all(is_known(p.info) for p in f.params) or not _tensors(f.ret.info):
        return False
    stays = (g.If, g.CallFunction, g.CallHost, g.ShapeValue, g.PrimValue, g.FunctionRef)
    computed = [b for b in f.bindings if not _asserts(b)]
    for v in (x for b in computed for x in (b.value, *b.value.operands)):
        if isinstance(v, stays) or operator_of(v, ShapeOperator) is not None:
            return False
    return not any(isinstance(b, g.MatchCast) and not isinstance(b.value.info, TensorInfo) for b in computed)


def _asserts(b: g.AnyBinding) -> bool:
    """Return whether a binding only asserts facts about symbols, which inlining turns into a check."""
    return isinstance(b, g.MatchCast) and isinstance(b.value, (g.ShapeValue, g.PrimValue))


def _tensors(info: StructInfo) -> bool:
    """Return whether an annotation is of tensors only, also inside tuples."""
    return all(map(_tensors, info.fields)) if isinstance(info, TupleInfo) else isinstance(info, TensorInfo)


@dataclass(slots=True)
class _Line:
    """A sequence of bindings that is being outlined.

    out: finished bindings.
    region: tensor operations of the next subgraph.
    after: bindings that wait for the next subgraph."""

    readers: dict[g.GVar, list[g.AnyBinding | None]]
    out: list[g.AnyBinding] = field(default_factory=list)
    region: list[g.AnyBinding] = field(default_factory=list)
    after: list[g.AnyBinding] = field(default_factory=list)
    made: dict[g.GVar, g.AnyBinding] = field(default_factory=dict)
    waiting: set[g.GVar | Var] = field(default_factory=set)


class Outliner:
    """Outlines one function; its subgraphs go into `functions`."""

    def __init__(self, f: g.Function, functions: dict[str, AnyFunction]) -> None:
        self.f, self.functions = f, functions
        self.subgraphs: list[str] = []
        self.names = {p.name for p in f.params}
        self.symbols: set[Var] = {v for p in f.params for v in info_symbols(p.info)}

    def function(self) -> g.Function:
        bindings = self.body(self.f)
        return replace(self.f, blocks=graph_walk.into_blocks(bindings))

    def body(self, body: g.Function | g.Body) -> list[g.AnyBinding]:
        bindings = [b for block in without_dead_code(body.blocks, body.ret) for b in block.bindings]
        self.names.update(b.var.name for b in bindings)
        line = _Line({})
        for b in bindings:
            for v in used_vars(b.value):
                line.readers.setdefault(v, []).append(b)
        for v in used_vars(body.ret):
            line.readers.setdefault(v, []).append(None)
        for b in bindings:
            self.binding(b, line)
        self.flush(line)
        return line.out

    def binding(self, b: g.AnyBinding, line: _Line) -> None:
        uses = used_vars(b.value)
        inside = any(v in line.made for v in uses)
        late = not line.waiting.isdisjoint((*uses, *b.symbols()))
        new = [v for v in info_symbols(b.info) if v not in self.symbols] if isinstance(b, g.MatchCast) else []
        if self.is_step(b, inside, bool(new)):
            if late:
                self.flush(line)
            line.region.append(b)
            line.made[b.var] = b
            return
        if isinstance(b.value, g.If):
            known = set(self.symbols)
            sides = []
            for side in (b.value.then, b.value.orelse):
                sides.append(g.Body(graph_walk.into_blocks(self.body(side)), side.ret))
                self.symbols = set(known)
            b = replace(b, value=g.If(b.value.cond, sides[0], sides[1]))
        self.symbols.update(new)
        if graph_walk.is_impure(b.value):
            self.flush(line)
            line.out.append(b)
        elif inside or late:
            line.after.append(b)
            line.waiting.update((b.var, *new))
        else:
            line.out.append(b)

    def is_step(self, b: g.AnyBinding, inside: bool, binds: bool) -> bool:
        """Return whether a binding belongs to a subgraph. Raises BuildError for a tensor operation that cannot be
        lowered.
        """
        value = b.value
        if isinstance(b, g.MatchCast):
            return inside and not binds and is_known(value.info) and is_known(b.info)
        if isinstance(value, g.TupleItem):
            return inside
        if is_view(value) and not inside:
            (x,) = value.operands
            return isinstance(x, g.Constant)
        shapes = operator_of(value, ShapeOperator) is not None
        if shapes or not isinstance(value, (g.Call, g.CallTIR, g.CallDPSLibrary)):
            return False
        fields = info_parts(b.var.info)
        if all(map(is_known, (*(a.info for a in value.operands), *fields))):
            return True
        operator = operator_of(value, OperatorSpec)
        what = "the call" if operator is None else operator.name
        raise BuildError(
            f"{self.f.name}: {b.var.name}: wanted known dims and dtypes to lower {what}, found arguments "
            f"{[a.info for a in value.operands]!r} and result {b.var.info!r}; add a match_cast\n{excerpt(self.f, b)}"
        )

    def flush(self, line: _Line) -> None:
        """Outline the pending tensor operations, then emit the bindings that waited for them."""
        if line.region:
            self.outline(line)
        line.out += line.after
        line.region, line.after, line.made, line.waiting = [], [], {}, set()

    def outline(self, line: _Line) -> None:
        """Make a subgraph of the pending operations; emit its call and the tuples of its results that are read."""
        inside = set(map(id, line.region))
        results: list[g.GVar] = []
        tuples: list[g.AnyBinding] = []
        for b in tuple(line.region):
            if all(id(r) in inside for r in line.readers.get(b.var, ())):
                continue
            if not isinstance(b.var.info, TupleInfo):
                results.append(b.var)
                continue
            items = [g.GVar(self.fresh(b.var.name), info) for info in b.var.info.fields]
            line.region += [g.Binding(v, g.TupleItem(b.var, i)) for i, v in enumerate(items)]
            tuples.append(g.Binding(b.var, g.TupleValue(tuple(items))))
            results += items
        if results or any(isinstance(b, g.MatchCast) for b in line.region):
            line.out += self.call(line.region, tuple(results))
        line.out += tuples

    def call(self, steps: Sequence[g.AnyBinding], results: tuple[g.GVar, ...]) -> list[g.AnyBinding]:
        """Add the subgraph of `steps` to the module and return the bindings that call it."""
        own = {b.var for b in steps}
        outer = tuple(dict.fromkeys(v for b in steps for v in used_vars(b.value) if v not in own))
        symbols = dict.fromkeys(v for b in steps for v in b.symbols())
        alone = {d for p in outer for d in tensor_dims(p.info) if isinstance(d, Var)}
        sizes = tuple(v for v in (*symbols, *_symbols(outer)) if v not in alone)
        sizes = tuple(dict.fromkeys(sizes))
        mapping: dict[g.Value, g.Value] = {v: g.GVar(v.name, v.info) for v in (*outer, *(b.var for b in steps))}
        params = [p for v in outer if isinstance(p := mapping[v], g.GVar)]
        if sizes:
            params.append(g.GVar(self.fresh("sizes"), ShapeInfo(sizes)))
        body = [_renamed(b, mapping) for b in steps]
        made = tuple(mapping[v] for v in results)
        ret: g.Value = made[0] if len(made) == 1 else g.TupleValue(made)
        name = self.subgraph_name()
        subgraph = g.Function(name, tuple(params), graph_walk.into_blocks(body), ret, ret.info)
        self.functions[name] = subgraph
        self.subgraphs.append(name)
        given: tuple[g.Value, ...] = (*outer, g.ShapeValue(sizes)) if sizes else outer
        call = g.CallFunction(g.FunctionRef(name, signature(subgraph)), given)
        if len(results) == 1:
            return [g.Binding(results[0], call)]
        together = g.GVar(self.fresh(name), TupleInfo(tuple(v.info for v in results)))
        return [g.Binding(together, call), *(g.Binding(v, g.TupleItem(together, i)) for i, v in enumerate(results))]

    def fresh(self, hint: str) -> str:
        self.names.add(name := fresh(hint, self.names))
        return name

    def subgraph_name(self) -> str:
        i = len(self.subgraphs)
        while (name := f"{self.f.name}_part{i}") in self.functions:
            i += 1
        return name


def _renamed(b: g.AnyBinding, mapping: Mapping[g.Value, g.Value]) -> g.AnyBinding:
    var = mapping[b.var]
    assert isinstance(var, g.GVar)
    return replace(b, var=var, value=g.replace_operands(b.value, mapping))


def _symbols(values: Iterable[g.GVar]) -> Iterator[Var]:
    return (v for x in values for v in info_symbols(x.info))
