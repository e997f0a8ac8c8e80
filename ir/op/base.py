"""Base classes of operators: deduction, legalisation, decomposition and semantics in NumPy.

An operator is a frozen dataclass whose fields are its attributes. Its deduction rule is a function of annotations (Relax, section
3.3). `infer` never guesses: an undecided condition gives a coarser annotation or a run-time check.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.arith.solver import installed_solver
from relax_tune.ir.core.dtype import DType, is_floating
from relax_tune.ir.core.expr import Expr, ExprLike, eq, expr, ge, mul, ne, postorder
from relax_tune.ir.core.function import Bound, PrimFunc
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo

Array = NDArray[Any]
Halves = Literal["wanted", "allowed", "moved", "gathered", "never"]
QUIET = {"quiet": True}  # an attribute that text leaves out at its default
_PLACEHOLDER = re.compile(r"\{(\d{1,3})\}")


@dataclass(frozen=True, slots=True)
class RuntimeCheck:
    """A condition over symbols that deduction could not decide.

    cond: condition that must hold at run time
    message: complete sentence; `{0}`, `{1}` ... stand for the run-time values of `values`
    values: expressions to show
    """

    cond: Expr
    message: str
    values: tuple[Expr, ...] = ()

    def text(self, found: Sequence[int]) -> str:
        """Return the message with `found` in place of `{0}`, `{1}` ...; other braces stay."""
        return _PLACEHOLDER.sub(lambda m: str(found[int(m[1])]), self.message)


@dataclass(slots=True)
class Deduction:
    """Context of a deduction.

    env: facts about symbols
    checks: run-time checks that the deduction relies on
    choices: an undecided broadcast dim becomes a `select` between both sides; False: it becomes unknown
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
        """Require `a == b`; an undecided condition becomes a check. `what` names the place. Raises DeduceError when it
        never holds.
        """
        x, y = expr(a), expr(b)
        proof = self.equal(x, y)
        if proof is Proof.NO:
            raise DeduceError(f"{what}: wanted equal dims, found {x!r} and {y!r}")
        if proof is Proof.UNKNOWN:
            self.require(eq(x, y), f"{what}: wanted {x!r} == {y!r}, found {{0}} and {{1}}", x, y)

    def require_at_least(self, e: ExprLike, least: int, what: str) -> None:
        """Require `e >= least`; an undecided condition becomes a check. `what` names `e`. Raises DeduceError when it
        never holds.
        """
        x = expr(e)
        proof = self.proves(ge(x, least))
        if proof is Proof.NO:
            raise DeduceError(f"{what}: wanted at least {least}, found {x!r}")
        if proof is Proof.UNKNOWN:
            self.require(ge(x, least), f"{what}: wanted at least {least}, found {{0}} ({x!r})", x)

    def require(self, cond: Expr, message: str, *values: Expr) -> None:
        check = RuntimeCheck(cond, message, values)
        if check not in self.checks:
            self.checks.append(check)

    def require_divisors(self, values: Sequence[Expr]) -> None:
        """Require that nothing in scalar values divides by 0."""
        for quotient in postorder(values):
            divisor = quotient.args[1] if quotient.op in ("floordiv", "floormod") else None
            if divisor is not None and self.proves(ne(divisor, 0)) is not Proof.YES:
                message = f"wanted {divisor!r}, which divides in {quotient!r}, other than 0, found 0"
                self.require(ne(divisor, 0), message)


@dataclass(frozen=True, slots=True)
class IndexUse:
    """Elements of an argument that an operator uses as indices.

    position: position of the argument
    size: size of the indexed dim
    every, column: of the flattened elements those at `column`, `column + every` ...; 1 and 0: all
    """

    position: int
    size: Expr
    every: int = 1
    column: int = 0


class Decomposer(Protocol):
    """Emitter of the simpler operators of a decomposition."""

    @property
    def deduction(self) -> Deduction:
        """Facts about the symbols."""

    def call(self, op: OperatorSpec, *args: Value, hint: str | None = None) -> Value:
        """Emit an operator and return its result; `hint` names it. Raises DeduceError."""

    def literal(self, value: float, dtype: DType) -> Value:
        """Return a constant without dims."""


@dataclass(frozen=True, slots=True)
class OperatorSpec(Operator):
    """Base of every operator. Subclasses set `name` and `arity`, and declare their attributes as fields.

    halves: treatment of float arguments by mixed precision (`ir/passes/graph/mixed_precision`):

    * `wanted`: stored in 16 bits, since reading them dominates the time;
    * `allowed`: may be stored in 16 bits;
    * `moved`: the result is stored in the type of the arguments;
    * `gathered`: as `moved`, and a table is stored in 16 bits even for other readers, since it is large;
    * `never`: the computation needs more digits.

    unpacks: widens packed integers; constant folding leaves such values packed"""

    name: ClassVar[str]
    arity: ClassVar[int] = 1
    unpacks: ClassVar[bool] = False
    """True if the operator unpacks small weights: a build does not compute it if that makes them larger."""
    halves: ClassVar[Halves] = "never"

    @abstractmethod
    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        """Deduce the annotation of the result. Raises DeduceError for arguments that can never fit."""

    @abstractmethod
    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        """Lower to a tensor function called `name`, for arguments of fully known annotations, over the symbols of `infos`.

        consts: for each argument, True if its values are the same at every call
        ctx: facts about the symbols
        """

    def decompose(self, args: Sequence[Value], infos: Sequence[TensorInfo], g: Decomposer) -> Value | None:
        """Decompose into simpler operators emitted with `g`, for arguments of fully known annotations.

        None: the loops of `legalize` are better. Rules on the whole operator run before `ir/passes/graph/decompose`."""
        return None

    @abstractmethod
    def evaluate(self, arrays: Sequence[Array]) -> Array | tuple[Array, ...]:
        """Evaluate in NumPy, with attributes without symbols.

        Sums and transcendental functions run in float64. The result has the declared dtype, or float64 when a float argument came
        as float64."""

    def indexed(self, infos: Sequence[TensorInfo]) -> tuple[IndexUse, ...]:
        """Return the arguments used as indices, for arguments of known dims."""
        return ()

    def reads(self, position: int) -> Halves:
        """Return `halves` of one argument."""
        return self.halves

    def takes_small(self) -> bool:
        """Return whether tensors may have types of at most 8 bits that only memory holds. Others want them cast first."""
        return self.halves in ("moved", "gathered")

    def storing(self, dtype: DType) -> OperatorSpec:
        """Return the operator for arguments stored as `dtype`, a 16-bit float, and computed in float32.

        Intermediate values of the operator may have that type too."""
        return self

    def tensors(self, infos: Sequence[StructInfo]) -> tuple[TensorInfo, ...]:
        """Require `arity` tensors, and return them. Raises DeduceError."""
        if len(infos) != self.arity:
            raise DeduceError(f"{self.name}: wanted {self.arity} arguments, found {len(infos)}")
        found: list[TensorInfo] = []
        for position, info in enumerate(infos):
            if not isinstance(info, TensorInfo):
                raise DeduceError(f"{self.name}: wanted a tensor as argument {position}, found {info!r}")
            found.append(info)
        return tuple(found)

    def same_dtype(self, infos: Sequence[TensorInfo]) -> DType | None:
        """Return the common element type of all arguments; None when one is unknown. Raises DeduceError when they differ."""
        known = [i.dtype for i in infos if i.dtype is not None]
        for d in known[1:]:
            if d is not known[0]:
                raise DeduceError(f"{self.name}: wanted one dtype, found {known[0]} and {d}; cast one of them first")
        return known[0] if len(known) == len(infos) else None


def env_of(bounds: Sequence[Bound]) -> Env:
    """Return declared bounds as facts for proofs, with the solver if one is installed."""
    return Env({b.var: (b.lower, b.upper) for b in bounds}, solver=installed_solver())


def shape_of(info: TensorInfo) -> tuple[Expr, ...]:
    """Return the dims of a fully known annotation."""
    if info.shape is None:
        raise DeduceError(
            f"wanted a tensor of known dims to make a loop nest, found {info!r}; add a match_cast before it"
        )
    return info.shape


def dtype_of(info: TensorInfo) -> DType:
    if info.dtype is None:
        raise DeduceError(
            f"wanted a tensor of known dtype to make a loop nest, found {info!r}; add a match_cast before it"
        )
    return info.dtype


def product(dims: Sequence[ExprLike]) -> Expr:
    """Return the product of dims, left to right; 1 for none."""
    result = expr(1)
    for d in dims:
        result = mul(result, d)
    return result


def is_const(consts: Sequence[bool], position: int) -> bool:
    return position < len(consts) and consts[position]


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
        raise DeduceError(f"{name}: wanted an axis in {-ndim}..{ndim - 1}, found {axis}")
    return axis % ndim
