"""Writes graph functions binding by binding; every value is annotated when it is emitted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from relax_tune.errors import DeduceError, UserError
from relax_tune.ir.dtype import DType, dtype, f32
from relax_tune.ir.expr import Expr, ExprLike, Var, expr, free_vars
from relax_tune.ir.function import AnyFunction, Bound, ExternFunc, IRModule, PrimFunc
from relax_tune.ir.graph import (
    AnyBinding,
    Binding,
    CallDPSLibrary,
    CallTIR,
    Constant,
    DataflowBlock,
    Function,
    GVar,
    MatchCast,
    ShapeValue,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.graph import Call as GraphCall
from relax_tune.ir.op.base import Deduction, OperatorSpec, RuntimeCheck, env_of
from relax_tune.ir.struct_info import ObjectInfo, ShapeInfo, StructInfo, TensorInfo, TupleInfo


def info_of(value: Value) -> StructInfo:
    """The annotation of an atom, a tuple of atoms or a destination-passing call."""
    if isinstance(value, (GVar, Constant)):
        return value.info
    if isinstance(value, ShapeValue):
        return ShapeInfo(value.values)
    if isinstance(value, TupleValue):
        return TupleInfo(tuple(info_of(f) for f in value.fields))
    if isinstance(value, (CallTIR, CallDPSLibrary)):
        return value.out[0] if len(value.out) == 1 else TupleInfo(value.out)
    if isinstance(value, TupleItem):
        owner = info_of(value.value)
        if not isinstance(owner, TupleInfo):
            raise DeduceError(f"wanted a tuple to take item {value.index} of, found {owner!r}")
        if not 0 <= value.index < len(owner.fields):
            raise DeduceError(f"wanted an item in 0..{len(owner.fields) - 1}, found {value.index}")
        return owner.fields[value.index]
    return ObjectInfo()


def infer_value(value: Value, ctx: Deduction) -> StructInfo:
    """The annotation of any value, operator calls included. Raises DeduceError."""
    if not isinstance(value, GraphCall):
        return info_of(value)
    if not isinstance(value.op, OperatorSpec):
        raise DeduceError(f"wanted an operator with deduction, found {value.op!r}")
    return value.op.infer([info_of(a) for a in value.args], ctx)


class GraphBuilder:
    """Builds one module with one graph function.

    >>> g = GraphBuilder()
    >>> n = g.symbol("n", upper=512)
    >>> x = g.input("x", (n, 4))
    >>> y = g.call(Relu(), x)
    >>> module = g.finish(y)
    """

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self._bounds: list[Bound] = []
        self._params: list[GVar] = []
        self._bindings: list[AnyBinding] = []
        self._constants: dict[str, NDArray[Any]] = {}
        self._functions: dict[str, AnyFunction] = {}
        self._names: dict[str, int] = {}
        self._seen: set[Var] = set()
        self.deduction = Deduction()

    def symbol(self, name: str, lower: int = 0, upper: int | None = None) -> Var:
        """A shape symbol with `lower <= value` and, when given, `value <= upper`."""
        if lower < 0 or (upper is not None and upper < lower):
            raise UserError(f"symbol {name!r}: wanted 0 <= lower <= upper, found {lower} and {upper}")
        var = Var(name)
        self._bounds.append(Bound(var, lower, upper))
        self._seen.add(var)
        self.deduction.env = env_of(self._bounds)
        return var

    def fresh(self, hint: str) -> str:
        """`hint`, with a number when it is taken."""
        number = self._names.get(hint, 0)
        self._names[hint] = number + 1
        return hint if number == 0 else self.fresh(f"{hint}_{number}")

    def input(self, name: str, shape: Sequence[ExprLike] | None, element: DType | None = f32) -> GVar:
        """A parameter of the function."""
        if name in self._names:
            raise UserError(f"wanted distinct parameter names, found {name!r} twice")
        dims = None if shape is None else tuple(expr(d) for d in shape)
        self._seen.update(free_vars(*(dims or ())))
        var = GVar(self.fresh(name), TensorInfo(dims, element))
        self._params.append(var)
        return var

    def constant(self, name: str, array: NDArray[Any]) -> Constant:
        """A weight. The array is kept, not copied."""
        if name in self._constants:
            raise UserError(f"wanted distinct constant names, found {name!r} twice")
        self._constants[name] = array
        return Constant(name, TensorInfo(tuple(expr(d) for d in array.shape), dtype(array.dtype)))

    def add(self, function: PrimFunc | ExternFunc) -> str:
        """Make a tensor function or library routine known; gives its name."""
        if function.name in self._functions or function.name == self.name:
            raise UserError(f"wanted distinct function names, found {function.name!r} twice")
        self._functions[function.name] = function
        return function.name

    def emit(self, value: Value, hint: str = "v") -> GVar:
        """Bind `value` to a new variable with the deduced annotation. Raises DeduceError."""
        var = GVar(self.fresh(hint), infer_value(value, self.deduction))
        self._bindings.append(Binding(var, value))
        return var

    def call(self, op: OperatorSpec, *args: Value, hint: str | None = None) -> GVar:
        """An operator on values."""
        return self.emit(GraphCall(op, args), hint or op.name)

    def call_tir(
        self,
        callee: str,
        args: Sequence[Value],
        out: TensorInfo | Sequence[TensorInfo],
        scalars: Sequence[ExprLike] = (),
    ) -> GVar:
        """`call_tir`; `out` annotates what it writes."""
        outs = (out,) if isinstance(out, TensorInfo) else tuple(out)
        return self.emit(CallTIR(callee, tuple(args), outs, tuple(expr(s) for s in scalars)), callee)

    def call_library(
        self,
        routine: str,
        args: Sequence[Value],
        out: TensorInfo | Sequence[TensorInfo],
        scalars: Sequence[ExprLike] = (),
    ) -> GVar:
        """`call_dps_library`; `out` annotates what it writes."""
        outs = (out,) if isinstance(out, TensorInfo) else tuple(out)
        hint = routine.rpartition(".")[2]
        return self.emit(CallDPSLibrary(routine, tuple(args), outs, tuple(expr(s) for s in scalars)), hint)

    def item(self, value: Value, index: int) -> GVar:
        """One field of a tuple."""
        return self.emit(TupleItem(value, index), "item")

    def match_cast(self, value: Value, info: StructInfo, hint: str = "cast") -> GVar:
        """Assert `info` of `value`: what can be decided now is, the rest is checked at run time.

        Raises DeduceError when the value can never have that annotation."""
        name = value.name if isinstance(value, GVar) else hint
        self._seen = check_annotation(name, info_of(value), info, self.deduction, self._seen)
        var = GVar(self.fresh(hint), info)
        self._bindings.append(MatchCast(var, value, info))
        return var

    @property
    def checks(self) -> tuple[RuntimeCheck, ...]:
        """What deduction left to run time so far."""
        return tuple(self.deduction.checks)

    def finish(self, result: Value | Sequence[Value], declared: StructInfo | None = None) -> IRModule:
        """The module. declared: the result's annotation, checked against the deduced one.

        Raises DeduceError when the two can never agree."""
        ret: Value = TupleValue(tuple(result)) if isinstance(result, Sequence) else result
        found = info_of(ret)
        if declared is not None:
            check_annotation(f"result of {self.name}", found, declared, self.deduction)
        function = Function(
            self.name, tuple(self._params), (DataflowBlock(tuple(self._bindings)),), ret, declared or found
        )
        functions: Mapping[str, AnyFunction] = {self.name: function, **self._functions}
        return IRModule(functions, dict(self._constants), tuple(self._bounds))


def check_annotation(
    name: str, found: StructInfo, wanted: StructInfo, ctx: Deduction, bound: Collection[Var] | None = None
) -> set[Var]:
    """The value `name`, annotated `found`, must have annotation `wanted`: decided now or checked at run time.

    bound: the symbols that have a value; a bare dim of `wanted` outside them is bound by it instead of checked (all are
    bound when None). Returns the symbols that have a value afterwards.
    Raises DeduceError naming the value, the dim and both sizes, when it never fits."""
    have = set(bound or ())
    if isinstance(wanted, ObjectInfo) or isinstance(found, ObjectInfo):
        return have | set(_symbols(wanted))
    if type(found) is not type(wanted):
        raise DeduceError(f"{name}: wanted {wanted!r}, found {found!r}")
    if isinstance(wanted, TupleInfo) and isinstance(found, TupleInfo):
        if len(wanted.fields) != len(found.fields):
            raise DeduceError(f"{name}: wanted {len(wanted.fields)} fields, found {len(found.fields)}")
        for position, (f, w) in enumerate(zip(found.fields, wanted.fields, strict=True)):
            have |= check_annotation(f"{name}[{position}]", f, w, ctx, None if bound is None else have)
        return have
    types = [i.dtype for i in (wanted, found) if isinstance(i, TensorInfo) and i.dtype is not None]
    if len(types) == 2 and types[0] is not types[1]:
        raise DeduceError(f"{name}: wanted dtype {types[0]}, found {types[1]}")
    if isinstance(wanted, (TensorInfo, ShapeInfo)) and isinstance(found, (TensorInfo, ShapeInfo)):
        if wanted.ndim is not None and found.ndim is not None and wanted.ndim != found.ndim:
            raise DeduceError(f"{name}: wanted {wanted.ndim} dims, found {found.ndim}")
        for position, (have_dim, want) in enumerate(zip(_dims(found) or (), _dims(wanted) or (), strict=False)):
            if isinstance(want, Var) and bound is not None and want not in have:
                have.add(want)
            else:
                ctx.require_equal(want, have_dim, f"{name}: dim {position}")
    return have | set(_symbols(wanted))


def _dims(info: StructInfo) -> tuple[Expr, ...] | None:
    return info.shape if isinstance(info, TensorInfo) else info.values if isinstance(info, ShapeInfo) else None


def _symbols(info: StructInfo) -> tuple[Var, ...]:
    if isinstance(info, TupleInfo):
        return tuple(v for f in info.fields for v in _symbols(f))
    return free_vars(*(_dims(info) or ()))
