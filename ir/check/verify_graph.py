"""Well-formedness of graph functions: A-normal form, definition before use, fitting calls, deducible annotations.

Tests: `tests/ir/check/test_verify.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from numpy.typing import NDArray

from relax_tune.errors import DeduceError, VerifyError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.check.inplace import inplace_conflicts
from relax_tune.ir.core import graph as g
from relax_tune.ir.core import graph_walk
from relax_tune.ir.core.dtype import dtype
from relax_tune.ir.core.expr import Expr, Var, const, free_vars
from relax_tune.ir.core.function import ExternFunc, IRModule, PrimFunc
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    TensorInfo,
    TupleInfo,
    info_dims,
    info_symbols,
)
from relax_tune.ir.deduce.deduce import check_condition, infer_value, side_env, signature
from relax_tune.ir.deduce.relations import call_differences, conflict, differences, solve, undetermined
from relax_tune.ir.op.base import Deduction, env_of
from relax_tune.ir.text.printer import excerpt

INFOS = (ObjectInfo, TensorInfo, ShapeInfo, PrimInfo, TupleInfo, CallableInfo)


def verify_function(f: g.Function, module: IRModule) -> None:
    """Check one graph function of `module`.

    Raises:
        VerifyError: with the binding.
    """
    _Graph(f, module).run()


class _Graph:
    def __init__(self, f: g.Function, module: IRModule) -> None:
        self.f = f
        self.module = module
        self.ctx = Deduction(env_of(module.bounds))
        self.defined: set[g.GVar] = set()
        self.symbols: set[Var] = {b.var for b in module.bounds}

    def fail(self, message: str, node: object) -> NoReturn:
        raise VerifyError(f"{self.f.name}: {message}\n{excerpt(self.f, node)}")

    def run(self) -> None:
        for p in self.f.params:
            self.annotation(p)
            self.define(p, p)
            self.symbols.update(info_symbols(p.info))
        self.determined()
        self.blocks(self.f.blocks)
        ret = self.f.ret
        self.result(ret, ret)
        for wrong in inplace_conflicts(self.f, self.module):
            self.fail(f"call_tir_inplace: {wrong.why}", wrong.at)
        self.known(info_symbols(self.f.ret_info), ret)
        problem = conflict(self.f.ret_info, ret.info, self.ctx.env)
        if problem:
            self.fail(f"the result does not fit the declared {self.f.ret_info!r}: {problem}", ret)

    def annotation(self, var: g.GVar) -> None:
        """Require an annotation of a variable, over integer symbols."""
        if not isinstance(var.info, INFOS):
            raise VerifyError(f"{self.f.name}: expected an annotation on {var.name}, got {var.info!r}")
        dims = info_dims(var.info) if isinstance(var.info, (TensorInfo, ShapeInfo)) else None
        for d in dims or ():
            if not isinstance(d, Expr) or not d.dtype.is_int:
                raise VerifyError(f"{self.f.name}: expected integer expressions as dims of {var.name}, got {d!r}")

    def determined(self) -> None:
        """Require that the arguments determine every symbol of the parameters."""
        params = tuple(p.info for p in self.f.params)
        meaning = solve(CallableInfo(params, ObjectInfo()), params)
        for p in self.f.params:
            for v in info_symbols(p.info):
                if meaning.get(v) is None:
                    self.fail(f"parameter {p.name}: {undetermined(v, p.info)}", p)

    def blocks(self, blocks: Sequence[g.AnyBlock]) -> None:
        for block in blocks:
            for b in block.bindings:
                self.annotation(b.var)
                if isinstance(block, g.DataflowBlock) and (b.value.bodies or graph_walk.is_impure(b.value)):
                    what = "an if" if b.value.bodies else "a call with side effects"
                    self.fail(f"expected only pure bindings in a dataflow block, got {what}; bind it outside", b)
                if self.f.pure and graph_walk.is_impure(b.value):
                    self.fail(f"{self.f.name} is declared pure, but this has side effects; say pure=False", b)
                self.binding(b)

    def result(self, ret: g.Value, node: object) -> None:
        """Check a result: an atom, or a tuple of atoms."""
        self.atoms(ret.fields if isinstance(ret, g.TupleValue) else (ret,), node)

    def branch(self, value: g.If, b: g.AnyBinding) -> None:
        """Check each side of an `if` in a separate scope."""
        self.atoms((value.cond,), b)
        try:
            check_condition(value.cond)
        except DeduceError as e:
            self.fail(str(e), b)
        defined, symbols, env = set(self.defined), set(self.symbols), self.ctx.env
        for holds, body in ((True, value.then), (False, value.orelse)):
            self.ctx.env = side_env(env, value.cond, holds)
            self.blocks(body.blocks)
            self.result(body.ret, body)
            # Copies for each side: what one side binds is unknown to the other and after the `if`.
            self.defined, self.symbols, self.ctx.env = set(defined), set(symbols), env

    def define(self, var: g.GVar, node: object) -> None:
        if var in self.defined:
            self.fail(f"{var.name} is defined twice", node)
        self.defined.add(var)

    def known(self, symbols: Sequence[Var], node: object) -> None:
        for s in symbols:
            if s not in self.symbols:
                self.fail(f"symbol {s.name} is bound by no parameter and no match_cast before", node)

    def atoms(self, values: Sequence[g.Value], node: object) -> None:
        """Require operands that are atoms in scope."""
        for v in values:
            match v:
                case g.GVar(name):
                    if v not in self.defined:
                        self.fail(f"{name} is used before it is defined", node)
                case g.Constant():
                    self.constant(v, node)
                case g.ShapeValue() | g.PrimValue():
                    self.known(tuple(v.symbols()), node)
                case g.FunctionRef():
                    self.reference(v, node)
                case _:
                    self.fail(
                        f"expected a variable, constant or shape here, got a {type(v).__name__}; bind it first", node
                    )

    def reference(self, v: g.FunctionRef, node: object) -> None:
        function = self.module.functions.get(v.name)
        if not isinstance(function, g.Function):
            known = ", ".join(self.module.graphs) or "none"
            self.fail(f"expected a graph function called {v.name!r}; the module has {known}", node)
        real = signature(function)
        problem = next((str(d) for d in differences(v.info, real, self.ctx.env)), None)
        if problem:
            self.fail(f"{v.name} is not what its annotation says: {problem}", node)

    def constant(self, v: g.Constant, node: object) -> None:
        array = self.module.constants.get(v.name)
        if array is None:
            self.fail(f"the module has no constant called {v.name!r}", node)
        problem = conflict(v.info, info_of_array(array))
        if problem:
            self.fail(f"constant {v.name!r} is not what its annotation says: {problem}", node)

    def binding(self, b: g.AnyBinding) -> None:
        value = b.value
        if isinstance(value, g.If):
            self.branch(value, b)
        else:
            self.atoms((value,) if value.is_atom else value.operands, b)
        if isinstance(b, g.MatchCast):
            self.symbols.update(info_symbols(b.info))
            self.known(info_symbols(b.var.info), b)
            # Only a certain conflict is an error here. Whether the value fits is what the match_cast checks at run
            # time.
            problem = conflict(b.info, value.info, self.ctx.env) or conflict(b.var.info, b.info, self.ctx.env)
            if problem:
                self.fail(f"this match_cast can never hold: {problem}", b)
            self.define(b.var, b)
            return
        if isinstance(value, g.CallTIR):
            self.call_tir(value, b)
        elif isinstance(value, g.CallDPSLibrary):
            self.call_library(value, b)
        self.known(info_symbols(b.var.info), b)
        try:
            deduced = infer_value(value, self.ctx)
        except DeduceError as e:
            self.fail(str(e), b)
        problem = conflict(b.var.info, deduced, self.ctx.env)
        if problem:
            self.fail(f"deduction disagrees with the annotation of {b.var.name}: {problem}", b)
        self.define(b.var, b)

    def call_tir(self, call: g.CallTIR, b: g.AnyBinding) -> None:
        callee = self.module.functions.get(call.callee)
        if not isinstance(callee, PrimFunc):
            known = ", ".join(self.module.prims) or "none"
            self.fail(f"expected a tensor function called {call.callee!r}; the module has {known}", b)
        infos = [*(a.info for a in call.args), *call.out]
        if len(call.out) != callee.outputs or len(infos) != len(callee.buffers):
            expected = f"{len(callee.input_buffers)} arguments and {callee.outputs} outputs"
            self.fail(f"{call.callee} takes {expected}, got {len(call.args)} and {len(call.out)}", b)
        if len(call.scalars) != len(callee.scalar_params):
            self.fail(f"{call.callee} takes {len(callee.scalar_params)} scalars, got {len(call.scalars)}", b)
        self.known(free_vars(*call.scalars), b)
        self.known([s for o in call.out for s in info_symbols(o)], b)
        for buffer, unmet in call_differences(callee, infos, call.scalars, self.ctx.env):
            # Undecided dims are no error: the call compares them at run time.
            problem = next((d for d in unmet if d.proof is Proof.NO), None)
            if problem is not None:
                self.fail(f"{call.callee}, parameter {buffer.name}: {problem}", b)

    def call_library(self, call: g.CallDPSLibrary, b: g.AnyBinding) -> None:
        self.known([*free_vars(*call.scalars), *(s for o in call.out for s in info_symbols(o))], b)
        routine = self.module.functions.get(call.routine)
        if not isinstance(routine, ExternFunc) or routine.signature is None or routine.signature.params is None:
            return
        expected = len(routine.signature.params)
        if expected != len(call.args):
            self.fail(f"{call.routine} takes {expected} arguments, got {len(call.args)}", b)


def info_of_array(array: NDArray[Any]) -> TensorInfo:
    """Return the annotation of a NumPy array."""
    return TensorInfo(tuple(const(d) for d in array.shape), dtype(array.dtype))
