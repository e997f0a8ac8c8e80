"""Emit host programs: the instructions over registers that connect the subgraphs of an outlined function.

Tests: `tests/tuner/emit/test_host_programs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from relax_tune.errors import BuildError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core import graph as g
from relax_tune.ir.core.dtype import DType, bool_
from relax_tune.ir.core.expr import Expr, Var, as_int, eq, free_vars, le
from relax_tune.ir.core.function import Bound
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
    info_dims,
    own_symbols,
)
from relax_tune.ir.deduce.deduce import infer_value, signature
from relax_tune.ir.deduce.relations import differences, is_base, is_known, solve, undetermined
from relax_tune.ir.op.base import Deduction, OperatorSpec, RuntimeCheck, env_of
from relax_tune.ir.op.devices import ToDevice
from relax_tune.ir.op.indexing.movement import VIEWS
from relax_tune.ir.op.shapes import ShapeOperator
from relax_tune.ir.passes.control.counted_loops import CountedLoop
from relax_tune.ir.passes.control.inline_walk import MAX_LINE
from relax_tune.ir.passes.control.outline import OutlinedModule
from relax_tune.ir.text.printer import Excerpts
from relax_tune.runtime.program.host_program import (
    Apply,
    Branch,
    CallHostProgram,
    CallHostRoutine,
    CallSubgraph,
    CheckValue,
    Compute,
    GetItem,
    HostProgram,
    Instruction,
    LoadWeight,
    Move,
    Number,
    Pack,
    Refer,
    Repeat,
    Require,
    Transfer,
    Value,
    Want,
)
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.program.scalars import ScalarBuilder
from relax_tune.tuner.program.program_builder import lower_scalar


def emit_host_program(
    name: str,
    cut: OutlinedModule,
    programs: Mapping[str, Program],
    entry: bool,
    checks: Sequence[RuntimeCheck] = (),
) -> HostProgram:
    """Return the host program of the graph function `name`, whose subgraphs are `programs`.

    Args:
        checks: Conditions over the symbols of the parameters.

    Raises:
        BuildError: The function has a value that no instruction computes.
    """
    return _Emitter(name, cut, programs).run(entry, checks)


_KIND_OF: Mapping[type[StructInfo], Want] = {
    TensorInfo: "tensor", ShapeInfo: "shape", PrimInfo: "scalar", TupleInfo: "tuple", CallableInfo: "function",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim or scalar that an annotation states over symbols, and the register of its value.

    Attributes:
        axis: Number of the dim; 0 for a scalar.
    """

    where: str
    info: StructInfo
    axis: int
    dim: Expr
    register: int
    node: object


@dataclass(frozen=True, slots=True)
class _Requirement:
    """A condition that must hold, as `Require` states it, and the node that is shown otherwise."""

    cond: Expr
    message: str
    values: Sequence[Expr]
    node: object


class _Emitter:
    def __init__(self, name: str, cut: OutlinedModule, programs: Mapping[str, Program]) -> None:
        f = cut.module.graphs[name]
        self.f, self.cut, self.programs = f, cut, programs
        self.excerpts = Excerpts(f)
        self.bounds: dict[Var, Bound] = {b.var: b for b in cut.module.bounds}
        self.ctx = Deduction(env_of(cut.module.bounds))
        self.registers = 0
        self.values: dict[g.GVar, int] = {}
        self.symbols: dict[Var, int] = {}
        self.blocks: list[list[Instruction]] = [[]]
        self.block = self.blocks[0]

    def run(self, entry: bool, checks: Sequence[RuntimeCheck]) -> HostProgram:
        f = self.f
        for p in f.params:
            self.values[p] = self.register()
        self.bind([d for p in f.params for d in self.match(self.values[p], p.info, f"parameter {p.name}", p)])
        for check in checks:
            self.add_check(check)
        for b in f.bindings:
            self.binding(b)
        result = self.value(f.ret, f.ret)
        self.agree(result, f.ret_info, f.ret.info, "the result", f.ret)
        params = tuple(described(p.name, p.info) for p in f.params)
        results = tuple(_results(f.ret, f.ret_info))
        blocks = tuple(map(tuple, self.blocks))
        return HostProgram(f.name, params, results, self.registers, blocks, result, entry)

    def register(self) -> int:
        self.registers += 1
        return self.registers - 1

    def add(self, instruction: Instruction) -> None:
        self.block.append(instruction)

    def shown(self, node: object) -> str:
        return "\n".join(line[:MAX_LINE] for line in self.excerpts.around(node).splitlines())

    # annotations

    def match(self, register: int, info: StructInfo, where: str, node: object) -> list[_Dim]:
        """Emit a check of everything that `info` states without symbols. Returns the dims for `bind`."""
        return _MATCHED[type(info)](self, register, info, where, node)

    def match_tuple(self, register: int, info: TupleInfo, where: str, node: object) -> list[_Dim]:
        self.add(self.want(register, "tuple", None, len(info.fields), (), where, info, node))
        dims: list[_Dim] = []
        for i, part in enumerate(info.fields):
            item = self.register()
            self.add(GetItem(register, i, item))
            dims += self.match(item, part, f"{where}, field {i}", node)
        return dims

    def match_function(self, register: int, info: CallableInfo, where: str, node: object) -> list[_Dim]:
        graphs = self.cut.module.graphs
        fitting = tuple(n for n in self.cut.host_functions if n in graphs and self.fits(info, graphs[n]))
        self.add(CheckValue(register, "function", None, None, fitting, (), where, repr(info), self.shown(node)))
        return []

    def match_scalar(self, register: int, info: PrimInfo, where: str, node: object) -> list[_Dim]:
        if info.value is not None and not (info.dtype.is_int or info.dtype is bool_):
            raise BuildError(f"{self.f.name}: {where}: expected a whole number by symbols, got {info!r}")
        return self.match_dims(register, info, info.dtype, None, where, node)

    def match_dims(
        self, register: int, info: StructInfo, dtype: DType | None, count: int | None, where: str, node: object
    ) -> list[_Dim]:
        dims = info_dims(info) or ()
        into = tuple(self.register() for _ in dims)
        element = None if dtype is None else dtype.name
        self.add(self.want(register, _KIND_OF[type(info)], element, count, into, where, info, node))
        return [_Dim(where, info, axis, d, r, node) for axis, (d, r) in enumerate(zip(dims, into, strict=True))]

    def want(
        self,
        register: int,
        want: Want,
        dtype: str | None,
        count: int | None,
        into: tuple[int, ...],
        where: str,
        info: StructInfo,
        node: object,
    ) -> CheckValue:
        return CheckValue(register, want, dtype, count, (), into, where, repr(info), self.shown(node))

    def fits(self, info: CallableInfo, f: g.Function) -> bool:
        return is_base(info, signature(f), self.ctx.env) is not Proof.NO

    def bind(self, dims: Sequence[_Dim]) -> None:
        """Give new symbols the values that dims determine, and require that every dim and bound holds."""
        if not dims:
            return
        stands = {Var(f"actual{i}"): d.register for i, d in enumerate(dims)}
        # Known symbols are passed to the solver as dims that equal themselves, so it solves only for new ones.
        known = tuple(v for v in free_vars(*(d.dim for d in dims)) if v in self.symbols)
        declared = ShapeInfo((*known, *(d.dim for d in dims)))
        meaning = solve(CallableInfo((declared,), ObjectInfo()), (ShapeInfo((*known, *stands)),), self.ctx.env)
        new = {v: e for v, e in meaning.items() if v not in self.symbols}
        scope = {**self.symbols, **stands}
        for v, e in new.items():
            if e is None:
                first = next(d for d in dims if v in free_vars(d.dim))
                raise BuildError(
                    f"{self.f.name}: {first.where}: {undetermined(v, first.info)}\n{self.shown(first.node)}"
                )
        for (v, _), register in zip(
            new.items(), self.scalars([e for e in new.values() if e is not None], scope), strict=True
        ):
            self.symbols[v] = scope[v] = register
        # One computation for all bounds, then one for all dims: computing takes longer than checking.
        self.require_all([check for v in new for check in self.within_bounds(v, dims)], scope)
        equal: list[_Requirement] = []
        for d, actual in zip(dims, stands, strict=True):
            # The dim that defined its symbol equals it by construction; every other use of the symbol is compared
            # with it.
            if meaning.get(d.dim) is actual if isinstance(d.dim, Var) else False:
                continue
            place = "" if isinstance(d.info, PrimInfo) else f" with dim {d.axis} ({d.dim!r})"
            text = f"{d.where}: expected {d.info!r}{place} equal to {{0}}, got {{1}}"
            equal.append(_Requirement(eq(d.dim, actual), text, (d.dim, actual), d.node))
        self.require_all(equal, scope)

    def within_bounds(self, v: Var, dims: Sequence[_Dim]) -> Iterator[_Requirement]:
        bound = self.bounds.get(v, Bound(v))
        at = next(d for d in dims if v in free_vars(d.dim))
        is_dim = any(d.dim is v and isinstance(d.info, TensorInfo) for d in dims)
        where = at.where if at.where.startswith("match_cast") else "arguments"
        limits = f"{bound.lower} <= {v.name}" + ("" if bound.upper is None else f" <= {bound.upper}")
        text = f"{where}: expected {limits}, got {v.name} = {{0}}"
        # Sizes of tensors are never negative; numbers from users may be.
        if bound.lower > 0 or not is_dim:
            yield _Requirement(le(bound.lower, v), text, (v,), at.node)
        if bound.upper is not None:
            yield _Requirement(le(v, bound.upper), text, (v,), at.node)

    def require(self, cond: Expr, message: str, values: Sequence[Expr], scope: Mapping[Var, int], node: object) -> None:
        self.require_all([_Requirement(cond, message, values, node)], scope)

    def require_all(self, checks: Sequence[_Requirement], scope: Mapping[Var, int]) -> None:
        registers = iter(self.scalars([e for c in checks for e in (c.cond, *c.values)], scope))
        for c in checks:
            test, *values = (next(registers) for _ in range(1 + len(c.values)))
            self.add(Require(test, f"{c.message}\n{self.shown(c.node)}", tuple(values)))

    def add_check(self, check: RuntimeCheck) -> None:
        test, *registers = self.scalars([check.cond, *check.values], self.symbols)
        self.add(Require(test, check.message, tuple(registers)))

    def agree(self, register: int, declared: StructInfo, inferred: StructInfo, where: str, node: object) -> None:
        """Emit a check that a value fits `declared`, unless its inferred annotation proves it."""
        if any(True for _ in differences(declared, inferred, self.ctx.env)):
            self.bind(self.match(register, declared, where, node))

    # values

    def scalars(self, exprs: Sequence[Expr], scope: Mapping[Var, int]) -> list[int]:
        """Emit the computation of scalars over symbols; return their registers."""
        computed = [e for e in dict.fromkeys(exprs) if not isinstance(e, Var)]
        for e in computed:
            if not e.dtype.is_int and e.dtype is not bool_:
                raise BuildError(f"{self.f.name}: expected a whole number or condition over symbols, got {e!r}")
        into = {e: self.register() for e in computed}
        if computed:
            builder = ScalarBuilder()
            used = [v for v in free_vars(*computed) if v in scope]
            slots = {v: builder.symbol(i) for i, v in enumerate(used)}
            slots_of = tuple(lower_scalar(builder, e, slots) for e in computed)
            names = tuple(e.dtype.name for e in computed)
            symbols = tuple(scope[v] for v in used)
            self.add(Compute(builder.code, symbols, slots_of, names, tuple(into.values())))
        return [scope[e] if isinstance(e, Var) else into[e] for e in exprs]

    def value(self, v: g.Value, node: object) -> int:
        """Return the register of an atom, or of a tuple of atoms."""
        if type(v) not in _VALUES:
            raise BuildError(f"{self.f.name}: expected a variable or constant, got a {type(v).__name__}")
        return _VALUES[type(v)](self, v, node)

    def new(self, make: Callable[[int], Instruction]) -> int:
        """Add an instruction that sets a new register, and return the register."""
        into = self.register()
        self.add(make(into))
        return into

    def divides(self, values: Sequence[Expr], node: object) -> None:
        """Emit checks that no value divides by 0."""
        ctx = Deduction(self.ctx.env)
        ctx.require_divisors(values)
        for check in ctx.checks:
            self.require(check.cond, check.message, check.values, self.symbols, node)

    def scalar(self, v: g.PrimValue, node: object) -> int:
        e = v.value
        self.divides((e,), node)
        if e.value is None or not e.dtype.is_float or not math.isfinite(e.value):
            return self.scalars([e], self.symbols)[0]
        number = float(e.value)
        return self.new(lambda into: Number(number, e.dtype.name, into))

    def tuple_of(self, v: g.TupleValue, node: object) -> int:
        into = self.register()
        self.add(Pack(tuple(self.value(x, node) for x in v.fields), into))
        return into

    def shape(self, v: g.ShapeValue, node: object) -> int:
        self.divides(v.values, node)
        into = self.register()
        self.add(Pack(tuple(self.scalars(v.values, self.symbols)), into))
        return into

    def weight(self, v: g.Constant) -> int:
        sizes = [as_int(d) for d in v.info.shape or ()]
        assert v.info.dtype is not None and None not in sizes
        dtype, shape = v.info.dtype.name, tuple(s for s in sizes if s is not None)
        return self.new(lambda into: LoadWeight(v.name, dtype, shape, into))

    def binding(self, b: g.AnyBinding) -> None:
        value = b.value
        if isinstance(b, g.MatchCast):
            name = g.name_of(value, b.var.name)
            self.values[b.var] = register = self.value(value, b)
            self.bind(self.match(register, b.info, f"match_cast of {name}", b))
            self.agree(register, b.var.info, b.info, f"value {b.var.name}", b)
            return
        ctx = Deduction(self.ctx.env)
        inferred = infer_value(value, ctx)
        if isinstance(value, g.CallFunction):  # a callee checks its own arguments
            if (name := _direct(value)) in self.cut.subgraphs:
                self.part(b, name, value)
                return
            inferred = inferred if name else ObjectInfo()  # the signature guarantees the annotation
        else:
            for check in ctx.checks:
                self.require(check.cond, check.message, check.values, self.symbols, b)
        compute = _COMPUTED.get(type(value), _Emitter.value)
        self.values[b.var] = compute(self, value, b)
        self.agree(self.values[b.var], b.var.info, inferred, f"value {b.var.name}", b)

    def call(self, value: g.CallFunction, b: g.Binding) -> int:
        args = tuple(self.value(a, b) for a in value.args)
        direct = _direct(value) or None
        callee = None if direct is not None else self.value(value.callee, b)
        return self.new(lambda into: CallHostProgram(direct, callee, args, into))

    def host(self, value: g.CallHost, b: g.Binding) -> int:
        args = tuple(self.value(a, b) for a in value.args)
        into = self.new(lambda into: CallHostRoutine(value.routine, args, into))
        self.bind(self.match(into, value.out, f"host routine {value.routine!r}", b))
        return into

    def item(self, value: g.TupleItem, b: g.Binding) -> int:
        into = self.register()
        self.add(GetItem(self.value(value.value, b), value.index, into))
        return into

    def symbols_of(self, name: str) -> tuple[Var, ...]:
        """Return the symbols of a subgraph's program. A `Program` keeps only their names."""
        by_name = {v.name: v for v in own_symbols(signature(self.cut.module.graphs[name]))}
        return tuple(by_name[s.name] for s in self.programs[name].symbols)

    def part(self, b: g.Binding, name: str, value: g.CallFunction) -> None:
        """Emit the call of a subgraph's program on the tensors among the arguments, and on the program's symbols."""
        program = self.programs[name]
        f = self.cut.module.graphs[name]
        symbols = tuple(self.symbols[v] for v in self.symbols_of(name))
        args = tuple(self.value(a, b) for a in value.args if not isinstance(a, g.ShapeValue))
        into = tuple(self.register() for _ in program.outputs)
        self.add(CallSubgraph(name, args, symbols, into))
        if isinstance(f.ret, g.TupleValue):
            self.values[b.var] = self.register()
            self.add(Pack(into, self.values[b.var]))
        else:
            (self.values[b.var],) = into

    def operator(self, value: g.Call, b: g.Binding) -> int:
        into = self.register()
        args = tuple(self.value(a, b) for a in value.args)
        op = value.op
        if isinstance(op, ToDevice):
            self.add(Transfer(args[0], op.device, into))
            return into
        if isinstance(op, VIEWS):
            assert isinstance(b.var.info, TensorInfo)
            dims = self.register()
            self.add(Pack(tuple(self.scalars(b.var.info.shape or (), self.symbols)), dims))
            self.add(Apply("reshape_to", (*args, dims), into, self.shown(b)))
            return into
        assert isinstance(op, ShapeOperator) and isinstance(op, OperatorSpec) and not fields(op)
        self.add(Apply(op.name, args, into, self.shown(b)))
        return into

    def repeat(self, loop: CountedLoop, value: g.If, b: g.Binding) -> int:
        """Emit a counted loop, whose function is this branch."""
        calls = (x.value for x in value.then.bindings if isinstance(x.value, g.CallFunction))
        call = next(x for x in calls if _direct(x) == loop.part)
        params = self.f.params
        at = {p: n for n, p in enumerate(params)}
        given = [at[a] for a in call.args if isinstance(a, g.GVar)]
        unchanged = [v - loop.results for v in (*loop.states.values(), *loop.rows.values()) if v >= loop.results]
        others = tuple(dict.fromkeys(n for n in (*given, *unchanged) if n not in loop.states))
        outputs, order = len(self.programs[loop.part].outputs), [*loop.states, *others]

        def number(v: int) -> int:
            return v if v < loop.results else outputs + order.index(v - loop.results)

        into = {n: self.register() for n in (*loop.states, *loop.rows)}
        states, rows, args = (
            tuple(self.values[params[n]] for n in group) for group in (loop.states, loop.rows, others)
        )
        symbols = self.symbols_of(loop.part)
        self.add(
            Repeat(
                loop.part,
                self.symbols[loop.index],
                self.scalar(g.PrimValue(loop.limit), b),
                tuple(self.symbols[v] for v in symbols),
                symbols.index(loop.index) if loop.index in symbols else None,
                states,
                rows,
                args,
                tuple(map(order.index, given)),
                tuple(map(number, loop.states.values())),
                tuple(map(number, loop.rows.values())),
                tuple(into.values()),
            )
        )
        assert isinstance(value.orelse.ret, g.TupleValue)
        fields = [at[v] for v in value.orelse.ret.fields if isinstance(v, g.GVar)]
        return self.new(lambda new: Pack(tuple(into.get(n, self.values[params[n]]) for n in fields), new))

    def branch(self, value: g.If, b: g.Binding) -> int:
        if (loop := self.cut.loops.get(self.f.name)) is not None:
            return self.repeat(loop, value, b)
        cond, into = self.value(value.cond, b), self.register()
        outer = self.block
        at = len(outer)
        starts = []
        for side in (value.then, value.orelse):
            # The block of a side is appended before its bindings are emitted, so that branches nested in it get later
            # numbers.
            starts.append(len(self.blocks))
            self.block = []
            self.blocks.append(self.block)
            self.side(side, into, b)
        self.block = outer
        assert len(outer) == at
        self.add(Branch(cond, starts[0], starts[1], self.shown(b)))
        return into

    def side(self, side: g.Body, into: int, b: g.Binding) -> None:
        values, symbols = dict(self.values), dict(self.symbols)
        for inner in side.bindings:
            self.binding(inner)
        self.add(Move(self.value(side.ret, b), into))
        # What one side defines must not be visible in the other, nor after the branch: only one side runs.
        self.values, self.symbols = values, symbols


_Matching = Callable[[_Emitter, int, Any, str, object], list[_Dim]]
_Computing = Callable[[_Emitter, Any, Any], int]

# the checks of each class of annotation
_MATCHED: Mapping[type[StructInfo], _Matching] = {
    ObjectInfo: lambda emitter, register, info, where, node: [],
    TupleInfo: _Emitter.match_tuple,
    CallableInfo: _Emitter.match_function,
    PrimInfo: _Emitter.match_scalar,
    ShapeInfo: lambda emitter, register, info, *at: emitter.match_dims(register, info, None, info.ndim, *at),
    TensorInfo: lambda emitter, register, info, *at: emitter.match_dims(register, info, info.dtype, info.ndim, *at),
}

# the register of each class of atom, and of tuples of atoms
_VALUES: Mapping[type[g.Value], _Computing] = {
    g.GVar: lambda emitter, v, node: emitter.values[v],
    g.PrimValue: lambda emitter, v, node: emitter.scalar(v, node),
    g.ShapeValue: lambda emitter, v, node: emitter.shape(v, node),
    g.TupleValue: _Emitter.tuple_of,
    g.FunctionRef: lambda emitter, v, node: emitter.new(lambda into: Refer(v.name, into)),
    g.Constant: lambda emitter, v, node: emitter.weight(v),
}

# the instructions that compute each other class of value
_COMPUTED: Mapping[type[g.Value], _Computing] = {
    g.If: _Emitter.branch,
    g.CallFunction: _Emitter.call,
    g.CallHost: _Emitter.host,
    g.Call: _Emitter.operator,
    g.TupleItem: _Emitter.item,
}


def _direct(value: g.CallFunction) -> str:
    """Return the name of the called function, empty if a variable holds it."""
    return value.callee.name if isinstance(value.callee, g.FunctionRef) else ""


def described(name: str, info: StructInfo, path: tuple[int, ...] = ()) -> Value:
    """Describe a parameter or result."""
    element = info.dtype if is_known(info) else None
    if not is_known(info) or element is None:
        return Value(name, _KIND_OF.get(type(info)), repr(info), path=path)
    dims = tuple(repr(d) if d.value is None else str(d.value) for d in info.shape or ())
    return Value(name, "tensor", repr(info), element.name, dims, path)


def _results(ret: g.Value, info: StructInfo, path: tuple[int, ...] = ()) -> list[Value]:
    """Flatten the results of a function, tuples field by field."""
    if isinstance(info, TupleInfo):
        parts = ret.fields if isinstance(ret, g.TupleValue) else [ret] * len(info.fields)
        return [v for i, (r, x) in enumerate(zip(parts, info.fields, strict=True)) for v in _results(r, x, (*path, i))]
    name = g.name_of(ret, "result")
    return [
        described(name + "".join(f"_{i}" for i in path) if path and not isinstance(ret, g.GVar) else name, info, path)
    ]
