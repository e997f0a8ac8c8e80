"""A builder of graph functions that annotates each value when it is emitted.

Tests: `tests/ir/deduce/test_deduce.py`, `tests/runtime/vm/test_machine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from numpy.typing import NDArray

from relax_tune.errors import DeduceError, UserError
from relax_tune.ir.core import graph as g
from relax_tune.ir.core import graph_walk
from relax_tune.ir.core.dtype import DType, dtype, f32
from relax_tune.ir.core.expr import Expr, ExprLike, Var, expr
from relax_tune.ir.core.function import AnyFunction, Bound, ExternFunc, IRModule, PrimFunc
from relax_tune.ir.core.struct_info import CallableInfo, ObjectInfo, StructInfo, TensorInfo, info_symbols
from relax_tune.ir.deduce.deduce import infer_value, require_bounds, side_env, signature
from relax_tune.ir.deduce.relations import check_annotation, solve
from relax_tune.ir.op.base import Deduction, OperatorSpec, RuntimeCheck, env_of
from relax_tune.ir.text.printer import excerpt

F = TypeVar("F", bound=AnyFunction)

__all__ = ["GraphBuilder", "check_annotation", "infer_value"]


class GraphBuilder:
    """Builds one graph function, and the module around it.

    >>> g = GraphBuilder()
    >>> n = g.symbol("n", upper=512)
    >>> x = g.input("x", (n, 4))
    >>> y = g.call(Relu(), x)
    >>> module = g.finish(y)
    """

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self._prefix = ""
        self._bounds: list[Bound] = []
        self._params: list[g.GVar] = []
        self._bindings: list[g.AnyBinding] = []
        self._constants: dict[str, NDArray[Any]] = {}
        self._functions: dict[str, AnyFunction] = {}
        self._names: dict[str, int] = {}
        self._defined: set[Var] = set()
        self.deduction = Deduction()
        self.so_far = IRModule(self._functions, self._constants)

    def inner(self, name: str, prefix: str = "") -> GraphBuilder:
        """Return a builder of another function of this module; it shares the weights, the functions and the bounds.

        Args:
            prefix: Prefix of the names of the constants that it adds.
        """
        builder = GraphBuilder(name)
        builder._prefix = self._prefix + prefix
        builder._bounds, builder._constants, builder._functions = self._bounds, self._constants, self._functions
        builder.so_far, builder.deduction.env = self.so_far, self.deduction.env
        return builder

    @property
    def parameters(self) -> tuple[g.GVar, ...]:
        return tuple(self._params)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Build functions that an error in the block takes back."""
        before = dict(self._functions)
        try:
            yield
        except BaseException:
            self._functions.clear()
            self._functions.update(before)
            raise

    def put(self, function: g.Function) -> g.FunctionRef:
        """Add a graph function of an inner builder. Returns it as a value."""
        self._functions[function.name] = function
        return self.function(function.name)

    def in_scope(self) -> tuple[Var, ...]:
        """Return the symbols that have a value here, by name. A declared symbol has one where a parameter shows it."""
        shown = {v for p in self._params for v in info_symbols(p.info)}
        visible = shown | (self._defined - {b.var for b in self._bounds})
        return tuple(sorted(visible, key=lambda v: v.name))

    def symbol(self, name: str, lower: int = 0, upper: int | None = None) -> Var:
        """Declare a shape symbol with `lower <= value` and, when given, `value <= upper`."""
        if lower < 0 or (upper is not None and upper < lower):
            raise UserError(f"symbol {name!r}: expected 0 <= lower <= upper, got {lower} and {upper}")
        var = Var(name)
        self._declare(Bound(var, lower, upper))
        self._defined.add(var)
        return var

    def _declare(self, bound: Bound) -> None:
        self._bounds.append(bound)
        self.deduction.env = env_of(self._bounds)

    def fresh(self, hint: str) -> str:
        """Return `hint`, followed by a number if the name is taken."""
        number = self._names.get(hint, 0)
        self._names[hint] = number + 1
        return hint if number == 0 else self.fresh(f"{hint}_{number}")

    def input(self, name: str, shape: Sequence[ExprLike] | None, element: DType | None = f32) -> g.GVar:
        """Declare a tensor parameter of the function."""
        dims = None if shape is None else tuple(expr(d) for d in shape)
        return self.parameter(name, TensorInfo(dims, element))

    def parameter(self, name: str, info: StructInfo) -> g.GVar:
        """Declare a parameter of any kind: a tensor, shape, scalar, tuple, function or object."""
        if name in self._names:
            raise UserError(f"expected distinct parameter names, got {name!r} twice")
        self._defined.update(info_symbols(info))
        var = g.GVar(self.fresh(name), info)
        self._params.append(var)
        return var

    def constant(self, name: str, array: NDArray[Any]) -> g.Constant:
        """Add a weight. The array is referenced, not copied."""
        name = self._prefix + name
        if name in self._constants:
            raise UserError(f"expected distinct constant names, got {name!r} twice")
        self._constants[name] = array
        return g.Constant(name, TensorInfo(tuple(expr(d) for d in array.shape), dtype(array.dtype)))

    def add(self, function: PrimFunc | ExternFunc) -> str:
        """Add a tensor function or library routine; return its name."""
        if function.name in self._functions or function.name == self.name:
            raise UserError(f"expected distinct function names, got {function.name!r} twice")
        self._functions[function.name] = function
        return function.name

    def include(self, module: IRModule) -> None:
        """Add the functions of another module, with its weights and bounds. A name in both must be the same object."""
        for name, f in module.functions.items():
            if self._functions.setdefault(name, f) is not f or name == self.name:
                raise UserError(f"expected distinct function names, got {name!r} twice")
        for name, array in module.constants.items():
            if self._constants.setdefault(name, array) is not array:
                raise UserError(f"expected distinct constant names, got {name!r} twice")
        known = {b.var for b in self._bounds}
        for bound in module.bounds:
            if bound.var not in known:
                self._declare(bound)

    def function(self, name: str) -> g.FunctionRef:
        """Return an included graph function as a value."""
        graphs = self._included(g.Function)
        if name not in graphs:
            known = ", ".join(graphs) or "none"
            raise UserError(f"expected a graph function that was included, got {name!r}; there are: {known}")
        return g.FunctionRef(name, signature(graphs[name]))

    def _included(self, kind: type[F]) -> dict[str, F]:
        """Return the included functions of one class, by name."""
        return {n: f for n, f in self._functions.items() if isinstance(f, kind)}

    def emit(self, value: g.Value, hint: str = "v") -> g.GVar:
        """Bind `value` to a new variable with the deduced annotation. Raises DeduceError, showing the binding."""
        try:
            info = infer_value(value, self.deduction)
        except DeduceError as error:
            self._fail(error, g.Binding(g.GVar(hint, ObjectInfo()), value))
        var = g.GVar(self.fresh(hint), info)
        self._bindings.append(g.Binding(var, value))
        return var

    def _fail(self, error: DeduceError, binding: g.AnyBinding) -> NoReturn:
        """Raise `error` with the function so far and a caret under `binding`."""
        blocks = (g.BindingBlock((*self._bindings, binding)),)
        so_far = g.Function(self.name, tuple(self._params), blocks, binding.var, binding.var.info)
        raise DeduceError(f"{error}\n{excerpt(so_far, binding)}") from None

    def call(self, op: OperatorSpec, *args: g.Value, hint: str | None = None) -> g.GVar:
        """Emit an operator on values."""
        return self.emit(g.Call(op, args), hint or op.name)

    def call_function(self, callee: str | g.Value, *args: g.Value, hint: str | None = None) -> g.GVar:
        """Emit a call of an included graph function, or of a function that a variable holds."""
        target = self.function(callee) if isinstance(callee, str) else callee
        name = target.name if isinstance(target, (g.FunctionRef, g.GVar)) else "call"
        return self.emit(g.CallFunction(target, args), hint or name)

    def call_host(self, routine: str, args: Sequence[g.Value], out: StructInfo, pure: bool = False) -> g.GVar:
        """Emit a call of an opaque routine of the host program, by name."""
        return self.emit(g.CallHost(routine, tuple(args), out, pure), routine.rpartition(".")[2])

    def call_tir(
        self,
        callee: str,
        args: Sequence[g.Value],
        out: TensorInfo | Sequence[TensorInfo],
        scalars: Sequence[ExprLike] = (),
        inplace: Sequence[int | None] = (),
    ) -> g.GVar:
        """Emit a `call_tir`. `out` annotates its outputs.

        Raises UserError for a callee that was not added with `add`.

        Args:
            inplace: For each output the position of the argument whose memory it takes, or None (`call_tir_inplace`).
        """
        if callee not in (added := self._included(PrimFunc)):
            known = ", ".join(added) or "none"
            raise UserError(
                f"call_tir: expected the name of a tensor function, got {callee!r:.80}; added so far: {known}"
            )
        outs = (out,) if isinstance(out, TensorInfo) else tuple(out)
        numbers = tuple(expr(s) for s in scalars)
        return self.emit(g.CallTIR(callee, tuple(args), outs, numbers, tuple(inplace)), callee)

    def call_library(
        self,
        routine: str,
        args: Sequence[g.Value],
        out: TensorInfo | Sequence[TensorInfo],
        scalars: Sequence[ExprLike] = (),
    ) -> g.GVar:
        """Emit a `call_dps_library`. `out` annotates its outputs."""
        outs = (out,) if isinstance(out, TensorInfo) else tuple(out)
        hint = routine.rpartition(".")[2]
        return self.emit(g.CallDPSLibrary(routine, tuple(args), outs, tuple(expr(s) for s in scalars)), hint)

    def branch(
        self,
        cond: g.Value | Expr,
        then: Callable[[], g.Value],
        orelse: Callable[[], g.Value],
        hint: str = "chosen",
        assume: bool = True,
    ) -> g.GVar:
        """Emit a branch with the value of `then()` where `cond` holds, else of `orelse()`. Each side emits its own
        bindings.

        Args:
            assume: Whether deduction on the sides assumes the condition.
        """
        test = g.PrimValue(cond) if isinstance(cond, Expr) else cond
        sides: list[g.Body] = []
        outer, defined, env = self._bindings, set(self._defined), self.deduction.env
        try:
            for taken, side in ((True, then), (False, orelse)):
                self._bindings, self._defined = [], set(defined)
                self.deduction.env = side_env(env, test, taken) if assume else env
                ret = side()
                sides.append(g.Body(graph_walk.into_blocks(self._bindings), ret))
        finally:
            self._bindings, self._defined, self.deduction.env = outer, defined, env
        return self.emit(g.If(test, sides[0], sides[1]), hint)

    def call_of(self, value: g.Value) -> g.Call | None:
        """Return the call that computes a value, if it was emitted in this graph or branch; None for others."""
        computed = next((b.value for b in reversed(self._bindings) if b.var is value), None)
        return computed if isinstance(computed, g.Call) else None

    def item(self, value: g.Value, index: int) -> g.GVar:
        """Emit one field of a tuple."""
        return self.emit(g.TupleItem(value, index), "item")

    def match_cast(self, value: g.Value, info: StructInfo, hint: str = "cast") -> g.GVar:
        """Assert that `value` satisfies `info`. Undecided conditions are checked at run time.

        Raises DeduceError when the value can never have that annotation.
        """
        name = g.name_of(value, hint)
        actual = value.info
        try:
            meaning = solve(CallableInfo((info,), ObjectInfo()), (actual,), self.deduction.env)
            new = {v: e for v, e in meaning.items() if v not in self._defined}
            self._defined = check_annotation(name, actual, info, self.deduction, self._defined)
            require_bounds(name, new, self.deduction)
        except DeduceError as error:
            self._fail(error, g.MatchCast(g.GVar(hint, info), value, info))
        var = g.GVar(self.fresh(hint), info)
        self._bindings.append(g.MatchCast(var, value, info))
        return var

    @property
    def checks(self) -> tuple[RuntimeCheck, ...]:
        """The checks that deduction has left to run time so far."""
        return tuple(self.deduction.checks)

    def finish(self, result: g.Value | Sequence[g.Value], declared: StructInfo | None = None) -> IRModule:
        """Return the module. declared: annotation of the result, checked against the deduced one

        Raises DeduceError when the two can never agree.
        """
        functions: Mapping[str, AnyFunction] = {self.name: self.define(result, declared), **self._functions}
        return IRModule(functions, dict(self._constants), tuple(self._bounds))

    def define(self, result: g.Value | Sequence[g.Value], declared: StructInfo | None = None) -> g.Function:
        """Return only the function; see `finish`."""
        ret: g.Value = g.TupleValue(tuple(result)) if isinstance(result, Sequence) else result
        actual = ret.info
        pure = not any(graph_walk.is_impure(b.value) for b in self._bindings)
        function = g.Function(
            self.name, tuple(self._params), graph_walk.into_blocks(self._bindings), ret, declared or actual, pure
        )
        if declared is not None:
            try:
                check_annotation(f"result of {self.name}", actual, declared, self.deduction)
            except DeduceError as error:
                raise DeduceError(f"{error}\n{excerpt(function, ret)}") from None
        return function
