"""Base classes of operators: deduction, legalisation, decomposition and semantics in NumPy.

An operator is a frozen dataclass whose fields are its attributes. Its deduction rule is a function of annotations (Relax, section
3.3). `infer` never guesses: an undecided condition gives a coarser annotation or a run-time check.

Tests: `tests/ir/op/test_deduction.py`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.bounds import Env, Solver
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.arith.solver import installed_solver
from relax_tune.ir.core.dtype import DType, is_floating
from relax_tune.ir.core.expr import Expr, ExprLike, eq, expr, ge, mul, ne, postorder
from relax_tune.ir.core.function import Bound, PrimFunc
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.core.tensor_builder import Tensor, TensorBuilder

Array = NDArray[Any]
HalfPolicy = Literal["prefer", "allow", "pass_through", "table", "never"]
QUIET = {"quiet": True}  # the text form omits such an attribute at its default
_PLACEHOLDER = re.compile(r"\{(\d{1,3})\}")


@dataclass(frozen=True, slots=True)
class RuntimeCheck:
    """A condition over symbols that deduction could not decide.

    Attributes:
        cond: condition that must hold at run time.
        message: complete sentence; `{0}`, `{1}` ... stand for the run-time values of `values`.
        values: expressions to show.
    """

    cond: Expr
    message: str
    values: tuple[Expr, ...] = ()

    def text(self, numbers: Sequence[int]) -> str:
        """Return the message with `numbers` in place of `{0}`, `{1}` ...; other braces stay."""
        return _PLACEHOLDER.sub(lambda m: str(numbers[int(m[1])]), self.message)


@dataclass(slots=True)
class Deduction:
    """Context of a deduction.

    Attributes:
        env: facts about symbols.
        checks: run-time checks that the deduction relies on.
        choices: an undecided broadcast dim becomes a `select` between both sides; False: it becomes unknown.
    """

    env: Env = field(default_factory=Env)
    checks: list[RuntimeCheck] = field(default_factory=list)
    choices: bool = False

    def simplify(self, e: ExprLike) -> Expr:
        return simplify(expr(e), self.env)

    def equal(self, a: ExprLike, b: ExprLike) -> Proof:
        """Prove `a == b` for every admissible symbol value."""
        x, y = expr(a), expr(b)
        return Proof.YES if x is y else prove(eq(x, y), self.env)

    def same(self, a: ExprLike, b: ExprLike) -> bool:
        """Return True if `a == b` is proved."""
        return self.equal(a, b) is Proof.YES

    def proves(self, cond: Expr) -> Proof:
        return prove(cond, self.env)

    def require_equal(self, a: ExprLike, b: ExprLike, what: str) -> None:
        """Require `a == b`; an undecided condition becomes a check. `what` names the place.

        Raises:
            DeduceError: the condition never holds.
        """
        x, y = expr(a), expr(b)
        proof = self.equal(x, y)
        if proof is Proof.NO:
            raise DeduceError(f"{what}: expected equal dims, got {x!r} and {y!r}")
        if proof is Proof.UNKNOWN:
            self.require(eq(x, y), f"{what}: expected {x!r} == {y!r}, got {{0}} and {{1}}", x, y)

    def require_at_least(self, e: ExprLike, least: int, what: str) -> None:
        """Require `e >= least`; an undecided condition becomes a check. `what` names `e`.

        Raises:
            DeduceError: the condition never holds.
        """
        x = expr(e)
        proof = self.proves(ge(x, least))
        if proof is Proof.NO:
            raise DeduceError(f"{what}: expected at least {least}, got {x!r}")
        if proof is Proof.UNKNOWN:
            self.require(ge(x, least), f"{what}: expected at least {least}, got {{0}} ({x!r})", x)

    def require(self, cond: Expr, message: str, *values: Expr) -> None:
        check = RuntimeCheck(cond, message, values)
        # Operators of a model often require the same, which one check covers.
        if check not in self.checks:
            self.checks.append(check)

    def require_divisors(self, values: Sequence[Expr]) -> None:
        """Require that nothing in scalar values divides by 0."""
        for quotient in postorder(values):
            divisor = quotient.args[1] if quotient.op in ("floordiv", "floormod") else None
            if divisor is not None and self.proves(ne(divisor, 0)) is not Proof.YES:
                message = f"expected {divisor!r}, the divisor in {quotient!r}, to be non-zero, got 0"
                self.require(ne(divisor, 0), message)


@dataclass(frozen=True, slots=True)
class IndexUse:
    """Elements of an argument that an operator uses as indices.

    Attributes:
        position: position of the argument.
        size: size of the indexed dim.
        stride, offset: flattened elements `offset`, `offset + stride`, ...; (1, 0) selects all.
    """

    position: int
    size: Expr
    stride: int = 1
    offset: int = 0


class Decomposer(Protocol):
    """Emitter of the simpler operators of a decomposition."""

    @property
    def deduction(self) -> Deduction:
        """Facts about the symbols."""

    def call(self, op: OperatorSpec, *args: Value, hint: str | None = None) -> Value:
        """Emit an operator and return its result; `hint` names it. Raises DeduceError."""

    def literal(self, value: float, dtype: DType) -> Value:
        """Return a constant without dims."""


class OperatorBuilder(TensorBuilder):
    """Builder of the tensor function of an operator call.

    Attributes:
        infos: annotations of the arguments; their dims and dtypes are known.
        ctx: facts about the symbols.
    """

    def __init__(self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool], ctx: Deduction) -> None:
        super().__init__(name)
        self.infos, self.ctx = tuple(infos), ctx
        self._constant = (*consts, *(False for _ in infos[len(consts) :]))

    def shape(self, position: int) -> tuple[Expr, ...]:
        return shape_of(self.infos[position])

    def dtype(self, position: int) -> DType:
        return dtype_of(self.infos[position])

    def argument(self, position: int, name: str, shape: Sequence[ExprLike] | None = None) -> Tensor:
        """Declare an argument as input `name`.

        Args:
            shape: equal dims in another form, to be declared instead.
        """
        dims = self.shape(position) if shape is None else shape
        return self.input(name, dims, self.dtype(position), self._constant[position])


@dataclass(frozen=True, slots=True)
class OperatorSpec(Operator):
    """Base of every operator. Subclasses set `name` and `arity`, and declare their attributes as fields.

    half_policy: treatment of float arguments by mixed precision (`ir/passes/graph/mixed_precision`):

    * `prefer`: stored in 16 bits, since reading them dominates the time;
    * `allow`: may be stored in 16 bits;
    * `pass_through`: the result is stored in the type of the arguments;
    * `table`: as `pass_through`, and a table is stored in 16 bits even for other readers, since it is large;
    * `never`: the computation needs more digits.

    unpacks: the operator widens packed integers; constant folding does not evaluate it."""

    name: ClassVar[str]
    arity: ClassVar[int] = 1
    unpacks: ClassVar[bool] = False
    half_policy: ClassVar[HalfPolicy] = "never"

    @abstractmethod
    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        """Deduce the annotation of the result.

        Raises:
            DeduceError: arguments that can never fit.
        """

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        """Lower to a tensor function called `name`, for arguments of fully known annotations, over the symbols of `infos`.

        Args:
            consts: for each argument, True if its values are the same at every call.
            ctx: facts about the symbols.
        """
        b = OperatorBuilder(name, infos, consts, ctx or Deduction())
        self.build(b)
        return b.finish()

    @abstractmethod
    def build(self, b: OperatorBuilder) -> None:
        """Declare the arguments and results with `b`, in order, and define the results by loops."""

    def decompose(self, args: Sequence[Value], infos: Sequence[TensorInfo], g: Decomposer) -> Value | None:
        """Decompose into simpler operators emitted with `g`, for arguments of fully known annotations.

        Returns None if the loops of `build` are better. Rules on the whole operator run before `ir/passes/graph/decompose`."""
        return None

    @abstractmethod
    def evaluate(self, arrays: Sequence[Array]) -> Array | tuple[Array, ...]:
        """Evaluate in NumPy, with attributes without symbols.

        Sums and transcendental functions run in float64. The result has the declared dtype, or float64 when a float argument came
        as float64."""

    def indexed(self, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
        """Return the arguments used as indices, for arguments of known dims."""
        return ()

    def reads(self, position: int) -> HalfPolicy:
        """Return the policy for one argument."""
        return self.half_policy

    def takes_small(self) -> bool:
        """Return whether tensors may have types of at most 8 bits that only memory holds. Other operators require a cast first."""
        return self.half_policy in ("pass_through", "table")

    def storing(self, dtype: DType) -> OperatorSpec:
        """Return the operator for arguments stored as `dtype`, a 16-bit float, and computed in float32.

        Intermediate values of the operator may have that type too."""
        return self

    def tensors(self, infos: Sequence[StructInfo]) -> tuple[TensorInfo, ...]:
        """Require `arity` tensors, and return them. Raises DeduceError."""
        if len(infos) != self.arity:
            raise DeduceError(f"{self.name}: expected {self.arity} arguments, got {len(infos)}")
        tensors: list[TensorInfo] = []
        for position, info in enumerate(infos):
            if not isinstance(info, TensorInfo):
                raise DeduceError(f"{self.name}: expected a tensor as argument {position}, got {info!r}")
            tensors.append(info)
        return tuple(tensors)

    def same_dtype(self, infos: Sequence[TensorInfo]) -> DType | None:
        """Return the common element type of all arguments; None when one is unknown.

        Raises:
            DeduceError: element types differ.
        """
        known = [i.dtype for i in infos if i.dtype is not None]
        for d in known[1:]:
            if d is not known[0]:
                raise DeduceError(f"{self.name}: expected one dtype, got {known[0]} and {d}; cast one of them first")
        return known[0] if len(known) == len(infos) else None


def env_of(bounds: Sequence[Bound]) -> Env:
    """Return declared bounds as facts for proofs, with the solver if one is installed.

    Passes ask the same questions about a module one after the other, so the same bounds give the same object, which remembers its proofs.
    """
    given = tuple(bounds)
    # without bounds, one object would remember the symbols of all modules of the process
    return _env_of(given, installed_solver()) if given else Env(solver=installed_solver())


@lru_cache(maxsize=8)
def _env_of(bounds: tuple[Bound, ...], solver: Solver | None) -> Env:
    return Env({b.var: (b.lower, b.upper) for b in bounds}, solver=solver)


def shape_of(info: TensorInfo) -> tuple[Expr, ...]:
    """Return the dims of a fully known annotation."""
    if info.shape is None:
        raise DeduceError(f"expected a tensor of known dims, got {info!r}; add a match_cast before it")
    return info.shape


def dtype_of(info: TensorInfo) -> DType:
    if info.dtype is None:
        raise DeduceError(f"expected a tensor of known dtype, got {info!r}; add a match_cast before it")
    return info.dtype


def product(dims: Sequence[ExprLike]) -> Expr:
    """Return the product of dims, left to right; 1 for none."""
    result = expr(1)
    for d in dims:
        result = mul(result, d)
    return result


def float_result(value: Array, arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Round `value` to `dtype`, or to float64 when an argument came as float64 (references in double precision)."""
    if any(a.dtype == np.float64 for a in arrays) and is_floating(dtype):
        return np.asarray(value, np.float64)
    return np.asarray(value).astype(dtype, copy=False)


def wide(a: Array) -> Array:
    """Convert floats to float64; return other arrays unchanged."""
    return a.astype(np.float64, copy=False) if is_floating(a.dtype) else a


def axis_index(name: str, axis: int, ndim: int) -> int:
    """Normalise a possibly negative axis to 0 .. ndim-1. Raises DeduceError."""
    if not -ndim <= axis < ndim:
        raise DeduceError(f"{name}: expected an axis in {-ndim}..{ndim - 1}, got {axis}")
    return axis % ndim
