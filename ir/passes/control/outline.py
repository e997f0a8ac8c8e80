"""Outlining: functions with control flow become host functions that call straight-line subgraphs (Relax, section 3.1).

A subgraph is a graph function of tensor operations only, whose parameters determine every symbol in its dims. Branches, calls, side
effects, shapes, tuples, casts and sizes that depend on data remain in the host function.

Tests: `tests/ir/passes/control/test_outline.py`.
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
from relax_tune.ir.passes.control.counted_loops import CountedLoop, LoopForm, loop_form
from relax_tune.ir.passes.control.runtime_shapes import RuntimeShapeInliner
from relax_tune.ir.rewrite.dead_code import without_dead_code
from relax_tune.ir.text.printer import excerpt


@dataclass(frozen=True, slots=True, eq=False)
class OutlinedModule:
    """A module after outlining.

    Attributes:
        host_functions: Names of the functions with control flow.
        subgraphs: Names of the straight-line functions that they call.
        loops: The host functions that are counted loops.
    """

    module: IRModule
    host_functions: tuple[str, ...]
    subgraphs: tuple[str, ...]
    loops: Mapping[str, CountedLoop] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutlineSubgraphs:
    """Turn `roots`, and the functions they call without inlining, into host functions with outlined subgraphs.

    Attributes:
        loops: Whether counted loops get one subgraph for an iteration, and another for appending its rows.

    Raises:
        BuildError: The rank or element type of an operator's argument is known only at run time.
        DeduceError: Shapes contradict each other.
    """

    roots: tuple[str, ...] = ("main",)
    loops: bool = True

    def __call__(self, module: IRModule) -> IRModule:
        return self.run(module).module

    def run(self, module: IRModule) -> OutlinedModule:
        functions: dict[str, AnyFunction] = {n: f for n, f in module.functions.items() if not isinstance(f, g.Function)}
        hosts: dict[str, g.Function] = {}
        bounds: list[Bound] = list(module.bounds)
        recursive = _recursive(module)
        todo = list(reversed(self.roots))
        while todo:
            name = todo.pop()
            f = module.functions[name]
            if name in hosts or not isinstance(f, g.Function):
                continue
            walk = RuntimeShapeInliner(module, recursive)
            hosts[name] = walk.root(f, f.params)
            bounds += walk.bounds
            todo += reversed(graph_walk.callees(hosts[name]))
        functions.update(hosts)
        subgraphs: list[str] = []
        loops: dict[str, CountedLoop] = {}
        for name, f in hosts.items():
            outliner = Outliner(f, functions)
            form = loop_form(f) if self.loops else None
            if form is None:
                functions[name] = outliner.function()
            else:
                functions[name], loops[name] = outliner.loop(form)
            subgraphs += outliner.subgraphs
        new = replace(module, functions=functions, bounds=tuple(bounds))
        return OutlinedModule(new, tuple(hosts), tuple(subgraphs), loops)


def _recursive(module: IRModule) -> frozenset[str]:
    """Return the functions that call themselves, directly or indirectly."""
    calls = {n: graph_walk.callees(f) for n, f in module.graphs.items()}
    recursive = set[str]()
    for name in calls:
        reachable, stack = set[str](), list(calls[name])
        while stack:
            callee = stack.pop()
            if callee not in reachable:
                reachable.add(callee)
                stack += calls.get(callee, ())
        if name in reachable:
            recursive.add(name)
    return frozenset(recursive)


def is_straight_line(f: g.Function) -> bool:
    """Return whether a function is a sequence of operators on tensors of known dims."""
    if not all(is_known(p.info) for p in f.params) or not _tensors(f.ret.info):
        return False
    # Values that kernels cannot compute: control flow, and shapes, which the host computes as numbers.
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
    """Return whether an annotation describes a tensor, or a tuple that contains only tensors."""
    return all(map(_tensors, info.fields)) if isinstance(info, TupleInfo) else isinstance(info, TensorInfo)


@dataclass(slots=True)
class _Line:
    """A sequence of bindings that is being outlined.

    Attributes:
        readers: Bindings that read each variable; None stands for the result.
        out: Finished bindings.
        region: Tensor operations of the next subgraph.
        after: Bindings that depend on the next subgraph.
        in_region: Variables that the region binds.
        waiting: Variables and symbols that `after` binds.
    """

    readers: dict[g.GVar, list[g.AnyBinding | None]]
    out: list[g.AnyBinding] = field(default_factory=list)
    region: list[g.AnyBinding] = field(default_factory=list)
    after: list[g.AnyBinding] = field(default_factory=list)
    in_region: set[g.GVar] = field(default_factory=set)
    waiting: set[g.GVar | Var] = field(default_factory=set)


class Outliner:
    """Outlines one function. Its subgraphs are added to `functions`."""

    def __init__(self, f: g.Function, functions: dict[str, AnyFunction]) -> None:
        self.f, self.functions = f, functions
        self.subgraphs: list[str] = []
        self.names = {p.name for p in f.params}
        self.symbols: set[Var] = {v for p in f.params for v in info_symbols(p.info)}

    def function(self) -> g.Function:
        bindings = self.body(self.f)
        return replace(self.f, blocks=graph_walk.into_blocks(bindings))

    def loop(self, form: LoopForm) -> tuple[g.Function, CountedLoop]:
        """Outline a counted loop. Its function stays the recursion that the loop means."""
        self.names.update(b.var.name for b in (*form.steps, *form.appends, form.again))
        computed = {b.var for b in form.steps}
        results = tuple(dict.fromkeys(v for v in (*form.states.values(), *form.rows.values()) if v in computed))
        lines = self.call(form.steps, results)
        part, appending = self.subgraphs[0], None
        if form.appends:
            read = used_vars(form.again.value)
            lines += self.call(form.appends, tuple(b.var for b in form.appends if b.var in read))
            appending = self.subgraphs[1]
        (b,) = self.f.bindings
        assert isinstance(b.value, g.If)
        then = g.Body(graph_walk.into_blocks([*lines, form.again]), form.again.var)
        f = replace(self.f, blocks=graph_walk.into_blocks([replace(b, value=g.If(b.value.cond, then, b.value.orelse))]))
        number = {v: n for n, v in enumerate((*results, *f.params))}
        states, rows = ({at: number[v] for at, v in values.items()} for values in (form.states, form.rows))
        return f, CountedLoop(part, appending, form.index, form.limit, states, rows, len(results))

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
        inside = any(v in line.in_region for v in uses)
        late = not line.waiting.isdisjoint((*uses, *b.symbols()))
        new = [v for v in info_symbols(b.info) if v not in self.symbols] if isinstance(b, g.MatchCast) else []
        if self.is_step(b, inside, bool(new)):
            # a step that reads a postponed binding cannot join the pending subgraph, which runs before it
            if late:
                self.flush(line)
            line.region.append(b)
            line.in_region.add(b.var)
            return
        if isinstance(b.value, g.If):
            known = set(self.symbols)
            sides = []
            for side in (b.value.then, b.value.orelse):
                sides.append(g.Body(graph_walk.into_blocks(self.body(side)), side.ret))
                # What a side binds is unknown after it.
                self.symbols = set(known)
            b = replace(b, value=g.If(b.value.cond, sides[0], sides[1]))
        self.symbols.update(new)
        if graph_walk.is_impure(b.value):  # side effects must not move across tensor operations
            self.flush(line)
            line.out.append(b)
        elif inside or late:
            line.after.append(b)
            line.waiting.update((b.var, *new))
        else:
            line.out.append(b)

    def is_step(self, b: g.AnyBinding, inside: bool, binds: bool) -> bool:
        """Return whether a binding belongs into a subgraph.

        Args:
            inside: Whether it reads a value of the pending subgraph.
            binds: Whether it binds symbols.

        Raises:
            BuildError: It is a tensor operation that cannot be lowered.
        """
        value = b.value
        if isinstance(b, g.MatchCast):
            return inside and not binds and is_known(value.info) and is_known(b.info)
        if isinstance(value, g.TupleItem):
            return inside
        # A view moves no data, and the host makes it without a kernel. One that reads the pending subgraph stays in
        # it, since it would be postponed otherwise.
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
            f"{self.f.name}: {b.var.name}: expected known dims and dtypes to lower {what}, got arguments "
            f"{[a.info for a in value.operands]!r} and result {b.var.info!r}; add a match_cast\n{excerpt(self.f, b)}"
        )

    def flush(self, line: _Line) -> None:
        """Outline the pending tensor operations, then emit the bindings that depend on them."""
        if line.region:
            self.outline(line)
        line.out += line.after
        line.region, line.after, line.in_region, line.waiting = [], [], set(), set()

    def outline(self, line: _Line) -> None:
        """Outline the pending operations; emit the call of the subgraph, and the tuples of its results that are read."""
        inside = set(map(id, line.region))
        results: list[g.GVar] = []
        tuples: list[g.AnyBinding] = []
        for b in tuple(line.region):
            # Only values that bindings outside of the region read become results. All others stay free to be fused
            # away.
            if all(id(r) in inside for r in line.readers.get(b.var, ())):
                continue
            if not isinstance(b.var.info, TupleInfo):
                results.append(b.var)
                continue
            items = [g.GVar(self.fresh(b.var.name), info) for info in b.var.info.fields]
            line.region += [g.Binding(v, g.TupleItem(b.var, i)) for i, v in enumerate(items)]
            tuples.append(g.Binding(b.var, g.TupleValue(tuple(items))))
            results += items
        # Without results a region is still called for its checks.
        if results or any(isinstance(b, g.MatchCast) for b in line.region):
            line.out += self.call(line.region, tuple(results))
        line.out += tuples

    def call(self, steps: Sequence[g.AnyBinding], results: tuple[g.GVar, ...]) -> list[g.AnyBinding]:
        """Add the subgraph of `steps` to the module and return the bindings that call it."""
        bound = {b.var for b in steps}
        outer = tuple(dict.fromkeys(v for b in steps for v in used_vars(b.value) if v not in bound))
        symbols = dict.fromkeys(v for b in steps for v in b.symbols())
        # A symbol that is a bare dim is read off the argument. Every other one has to be given.
        dims = {d for p in outer for d in tensor_dims(p.info) if isinstance(d, Var)}
        # symbols that no dim of a parameter determines are passed as a shape value
        sizes = tuple(v for v in (*symbols, *_symbols(outer)) if v not in dims)
        sizes = tuple(dict.fromkeys(sizes))
        mapping: dict[g.Value, g.Value] = {v: g.GVar(v.name, v.info) for v in (*outer, *(b.var for b in steps))}
        params = [p for v in outer if isinstance(p := mapping[v], g.GVar)]
        if sizes:
            params.append(g.GVar(self.fresh("sizes"), ShapeInfo(sizes)))
        body = [_renamed(b, mapping) for b in steps]
        returned = tuple(mapping[v] for v in results)
        ret: g.Value = returned[0] if len(returned) == 1 else g.TupleValue(returned)
        name = self.subgraph_name()
        subgraph = g.Function(name, tuple(params), graph_walk.into_blocks(body), ret, ret.info)
        self.functions[name] = subgraph
        self.subgraphs.append(name)
        args: tuple[g.Value, ...] = (*outer, g.ShapeValue(sizes)) if sizes else outer
        call = g.CallFunction(g.FunctionRef(name, signature(subgraph)), args)
        if len(results) == 1:
            return [g.Binding(results[0], call)]
        packed = g.GVar(self.fresh(name), TupleInfo(tuple(v.info for v in results)))
        return [g.Binding(packed, call), *(g.Binding(v, g.TupleItem(packed, i)) for i, v in enumerate(results))]

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
