"""Well-formedness of graph functions: A-normal form, definition before use, calls that fit, annotations deduction agrees with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from numpy.typing import NDArray

from relax_tune.errors import DeduceError, VerifyError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.dtype import dtype
from relax_tune.ir.expr import Expr, Var, const, free_vars, substitute
from relax_tune.ir.function import ExternFunc, IRModule, PrimFunc
from relax_tune.ir.graph import (
    AnyBinding,
    CallDPSLibrary,
    CallTIR,
    Constant,
    Function,
    GVar,
    MatchCast,
    ShapeValue,
    TupleValue,
    Value,
    operands,
)
from relax_tune.ir.graph_builder import infer_value, info_of
from relax_tune.ir.op.base import Deduction, env_of
from relax_tune.ir.printer import excerpt
from relax_tune.ir.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
)

INFOS = (ObjectInfo, TensorInfo, ShapeInfo, PrimInfo, TupleInfo, CallableInfo)


def verify_function(f: Function, module: IRModule) -> None:
    """Check one graph function of `module`. Raises VerifyError showing the binding."""
    _Graph(f, module).run()


def conflict(declared: StructInfo, found: StructInfo, env: Env | None = None) -> str | None:
    """Why a value annotated `found` can never be `declared`, or None when it can: unknown parts never conflict."""
    if isinstance(declared, ObjectInfo) or isinstance(found, ObjectInfo):
        return None
    if type(declared) is not type(found):
        return f"wanted {declared!r}, found {found!r}"
    if isinstance(declared, TensorInfo) and isinstance(found, TensorInfo):
        if declared.dtype is not None and found.dtype is not None and declared.dtype is not found.dtype:
            return f"wanted dtype {declared.dtype}, found {found.dtype}"
        return _dims_conflict(declared.shape, declared.ndim, found.shape, found.ndim, env)
    if isinstance(declared, ShapeInfo) and isinstance(found, ShapeInfo):
        return _dims_conflict(declared.values, declared.ndim, found.values, found.ndim, env)
    if isinstance(declared, TupleInfo) and isinstance(found, TupleInfo):
        if len(declared.fields) != len(found.fields):
            return f"wanted {len(declared.fields)} fields, found {len(found.fields)}"
        for i, (a, b) in enumerate(zip(declared.fields, found.fields, strict=True)):
            problem = conflict(a, b, env)
            if problem:
                return f"field {i}: {problem}"
    return None


def _dims_conflict(
    wanted: Sequence[Expr] | None,
    ndim: int | None,
    found: Sequence[Expr] | None,
    found_ndim: int | None,
    env: Env | None,
) -> str | None:
    if ndim is not None and found_ndim is not None and ndim != found_ndim:
        return f"wanted {ndim} dims, found {found_ndim}"
    for axis, (a, b) in enumerate(zip(wanted or (), found or ())):
        if prove_equal(a, b, env) is Proof.NO:
            return f"dim {axis}: wanted {a!r}, found {b!r}"
    return None


def info_symbols(info: StructInfo) -> tuple[Var, ...]:
    """The symbols in an annotation, in order; a signature's own symbols are not its value's."""
    if isinstance(info, TensorInfo):
        return free_vars(*(info.shape or ()))
    if isinstance(info, ShapeInfo):
        return free_vars(*(info.values or ()))
    if isinstance(info, PrimInfo):
        return () if info.value is None else free_vars(info.value)
    if isinstance(info, TupleInfo):
        return tuple(dict.fromkeys(v for f in info.fields for v in info_symbols(f)))
    return ()


class _Graph:
    def __init__(self, f: Function, module: IRModule) -> None:
        self.f = f
        self.module = module
        self.ctx = Deduction(env_of(module.bounds))
        self.defined: set[GVar] = set()
        self.symbols: set[Var] = {b.var for b in module.bounds}

    def fail(self, message: str, node: object) -> NoReturn:
        raise VerifyError(f"{self.f.name}: {message}\n{excerpt(self.f, node)}")

    def run(self) -> None:
        for var in (*self.f.params, *(b.var for b in self.f.bindings)):
            if not isinstance(var.info, INFOS):
                raise VerifyError(f"{self.f.name}: wanted an annotation on {var.name}, found {var.info!r}")
            dims = var.info.shape if isinstance(var.info, TensorInfo) else None
            for d in dims or ():
                if not isinstance(d, Expr) or not d.dtype.is_int:
                    raise VerifyError(f"{self.f.name}: wanted integer expressions as dims of {var.name}, found {d!r}")
        for p in self.f.params:
            self.define(p, p)
            self.symbols.update(info_symbols(p.info))
        for b in self.f.bindings:
            self.binding(b)
        ret = self.f.ret
        parts = ret.fields if isinstance(ret, TupleValue) else (ret,)
        self.atoms(parts, ret)
        self.known(info_symbols(self.f.ret_info), ret)
        problem = conflict(self.f.ret_info, info_of(ret), self.ctx.env)
        if problem:
            self.fail(f"the result does not fit the declared {self.f.ret_info!r}: {problem}", ret)

    def define(self, var: GVar, node: object) -> None:
        if var in self.defined:
            self.fail(f"{var.name} is defined twice", node)
        self.defined.add(var)

    def known(self, symbols: Sequence[Var], node: object) -> None:
        for s in symbols:
            if s not in self.symbols:
                self.fail(f"symbol {s.name} is bound by no parameter and no match_cast before", node)

    def atoms(self, values: Sequence[Value], node: object) -> None:
        """Operands must be atoms that exist."""
        for v in values:
            if isinstance(v, GVar):
                if v not in self.defined:
                    self.fail(f"{v.name} is used before it is defined", node)
            elif isinstance(v, Constant):
                self.constant(v, node)
            elif isinstance(v, ShapeValue):
                self.known(free_vars(*v.values), node)
            else:
                self.fail(f"wanted a variable, constant or shape here, found a {type(v).__name__}; bind it first", node)

    def constant(self, v: Constant, node: object) -> None:
        array = self.module.constants.get(v.name)
        if array is None:
            self.fail(f"the module has no constant called {v.name!r}", node)
        problem = conflict(v.info, info_of_array(array))
        if problem:
            self.fail(f"constant {v.name!r} is not what its annotation says: {problem}", node)

    def binding(self, b: AnyBinding) -> None:
        value = b.value
        self.atoms((value,) if isinstance(value, (GVar, Constant, ShapeValue)) else operands(value), b)
        if isinstance(b, MatchCast):
            self.symbols.update(info_symbols(b.info))
            self.known(info_symbols(b.var.info), b)
            problem = conflict(b.info, info_of(value), self.ctx.env) or conflict(b.var.info, b.info, self.ctx.env)
            if problem:
                self.fail(f"this match_cast can never hold: {problem}", b)
            self.define(b.var, b)
            return
        if isinstance(value, CallTIR):
            self.call_tir(value, b)
        elif isinstance(value, CallDPSLibrary):
            self.call_library(value, b)
        self.known(info_symbols(b.var.info), b)
        try:
            found = infer_value(value, self.ctx)
        except DeduceError as e:
            self.fail(str(e), b)
        problem = conflict(b.var.info, found, self.ctx.env)
        if problem:
            self.fail(f"deduction disagrees with the annotation of {b.var.name}: {problem}", b)
        self.define(b.var, b)

    def call_tir(self, call: CallTIR, b: AnyBinding) -> None:
        callee = self.module.functions.get(call.callee)
        if not isinstance(callee, PrimFunc):
            known = ", ".join(n for n, f in self.module.functions.items() if isinstance(f, PrimFunc)) or "none"
            self.fail(f"wanted a tensor function called {call.callee!r}; the module has {known}", b)
        infos = [*map(info_of, call.args), *call.out]
        if len(call.out) != callee.outputs or len(infos) != len(callee.buffers):
            wanted = f"{len(callee.input_buffers)} arguments and {callee.outputs} outputs"
            self.fail(f"{call.callee} takes {wanted}, found {len(call.args)} and {len(call.out)}", b)
        if len(call.scalars) != len(callee.scalar_params):
            self.fail(f"{call.callee} takes {len(callee.scalar_params)} scalars, found {len(call.scalars)}", b)
        self.known(free_vars(*call.scalars), b)
        self.known([s for o in call.out for s in info_symbols(o)], b)
        meaning: dict[Var, Expr] = dict(zip(callee.scalar_params, call.scalars, strict=True))
        for info, buffer in zip(infos, callee.buffers, strict=True):
            for own, given in zip(buffer.shape, (info.shape or ()) if isinstance(info, TensorInfo) else ()):
                if isinstance(own, Var):
                    meaning.setdefault(own, given)
        for info, buffer in zip(infos, callee.buffers, strict=True):
            bound = all(v in meaning for v in free_vars(*buffer.shape))
            dims = tuple(substitute(d, meaning) for d in buffer.shape) if bound else None
            problem = conflict(TensorInfo(dims, buffer.dtype, len(buffer.shape)), info, self.ctx.env)
            if problem:
                self.fail(f"{call.callee}, parameter {buffer.name}: {problem}", b)

    def call_library(self, call: CallDPSLibrary, b: AnyBinding) -> None:
        self.known([*free_vars(*call.scalars), *(s for o in call.out for s in info_symbols(o))], b)
        routine = self.module.functions.get(call.routine)
        if not isinstance(routine, ExternFunc) or routine.signature is None or routine.signature.params is None:
            return
        wanted = len(routine.signature.params)
        if wanted != len(call.args):
            self.fail(f"{call.routine} takes {wanted} arguments, found {len(call.args)}", b)


def info_of_array(array: NDArray[Any]) -> TensorInfo:
    """The annotation of a NumPy array."""
    return TensorInfo(tuple(const(d) for d in array.shape), dtype(array.dtype))
