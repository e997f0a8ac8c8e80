"""What an operator declares, in one place: deduction, legalisation and its meaning in NumPy.

An operator is a frozen dataclass whose fields are its attributes (paper section 3.3: operators are functions of annotations).
`infer` never guesses: what cannot be decided gives a coarser annotation or a run-time check.
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
from relax_tune.ir.core.expr import Expr, ExprLike, eq, expr, ge, mul
from relax_tune.ir.core.function import Bound, PrimFunc
from relax_tune.ir.core.graph import Operator, Value
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo

Array = NDArray[Any]
Halves = Literal["wanted", "allowed", "moved", "gathered", "never"]
_PLACEHOLDER = re.compile(r"\{(\d{1,3})\}")


@dataclass(frozen=True, slots=True)
class RuntimeCheck:
    """What deduction could not decide: `cond` must hold for every symbol binding.

    message: a complete sentence; `{0}`, `{1}` ... stand for the run-time values of `values`.
    """

    cond: Expr
    message: str
    values: tuple[Expr, ...] = ()

    def text(self, found: Sequence[int]) -> str:
        """The message with `found` in for `{0}`, `{1}` ...; other braces stay."""
        return _PLACEHOLDER.sub(lambda m: str(found[int(m[1])]), self.message)


@dataclass(slots=True)
class Deduction:
    """The facts one deduction may use, and the run-time checks it asks for in return.

    choices: a dim of a broadcast that is one or the other, by which of them a run finds to be 1, is written as that choice, where
    an annotation of the program leaves it unknown."""

    env: Env = field(default_factory=Env)
    checks: list[RuntimeCheck] = field(default_factory=list)
    choices: bool = False

    def simplify(self, e: ExprLike) -> Expr:
        return simplify(expr(e), self.env)

    def equal(self, a: ExprLike, b: ExprLike) -> Proof:
        """Is `a == b` for every admissible symbol value?"""
        x, y = expr(a), expr(b)
        return Proof.YES if x is y else prove(eq(x, y), self.env)

    def same(self, a: ExprLike, b: ExprLike) -> bool:
        """Whether `a == b` is proved."""
        return self.equal(a, b) is Proof.YES

    def proves(self, cond: Expr) -> Proof:
        return prove(cond, self.env)

    def require_equal(self, a: ExprLike, b: ExprLike, what: str) -> None:
        """`a == b` must hold. `what` names the place. Raises DeduceError when it never does; unknown becomes a check."""
        x, y = expr(a), expr(b)
        proof = self.equal(x, y)
        if proof is Proof.NO:
            raise DeduceError(f"{what}: wanted equal dims, found {x!r} and {y!r}")
        if proof is Proof.UNKNOWN:
            self.require(eq(x, y), f"{what}: wanted {x!r} == {y!r}, found {{0}} and {{1}}", x, y)

    def require_at_least(self, e: ExprLike, least: int, what: str) -> None:
        """`e >= least` must hold. `what` names it. Raises DeduceError when it never does; unknown becomes a check."""
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


class Decomposer(Protocol):
    """Writes the simpler operators that one is made of."""

    @property
    def deduction(self) -> Deduction:
        """What is known of the symbols."""

    def call(self, op: OperatorSpec, *args: Value, hint: str | None = None) -> Value:
        """The result of an operator; `hint` names it. Raises DeduceError."""

    def literal(self, value: float, dtype: DType) -> Value:
        """A constant without dims."""


@dataclass(frozen=True, slots=True)
class OperatorSpec(Operator):
    """Base of every operator. Subclasses set `name` and `arity`, and declare their attributes as fields.

    halves: what mixed precision (`ir/passes/graph/mixed_precision`) may do with its arguments of floats. `wanted`: store them in 16
    bits, for the time goes into reading them; `allowed`: read them from 16 bits where they are stored so; `moved`: the result is
    stored as they are; `gathered`: the same, and a weight that single rows are taken of is large: it is stored so whoever reads
    them; `never`: what it computes needs more digits than 16 bits hold."""

    name: ClassVar[str]
    arity: ClassVar[int] = 1
    unpacks: ClassVar[bool] = False
    """Whether it is there so that weights can be small: it is not computed when building where that makes them larger."""
    halves: ClassVar[Halves] = "never"

    @abstractmethod
    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        """The result's annotation. Raises DeduceError for arguments that can never fit."""

    @abstractmethod
    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        """A tensor function called `name` for arguments of fully known annotations, over the same symbols as `infos`.

        consts: which arguments hold the same values at every call; ctx: what is known of the symbols.
        """

    def decompose(self, args: Sequence[Value], infos: Sequence[TensorInfo], g: Decomposer) -> Value | None:
        """The same result by simpler operators, written with `g`, for arguments of fully known annotations; None where its own
        loops are better. A rule that wants the operator whole runs before `ir/passes/graph/decompose`."""
        return None

    @abstractmethod
    def evaluate(self, arrays: Sequence[Array]) -> Array | tuple[Array, ...]:
        """The meaning in NumPy, with attributes that hold no symbols. Sums and transcendental functions run in float64;
        the result has the declared dtype, or float64 when a floating argument came as float64."""

    def reads(self, position: int) -> Halves:
        """`halves` of one argument."""
        return self.halves

    def storing(self, dtype: DType) -> OperatorSpec:
        """The operator for arguments that are stored as `dtype`, a float of 16 bits, and computed with in float32: what it stores
        between its own steps may be of that type, too."""
        return self

    def tensors(self, infos: Sequence[StructInfo]) -> tuple[TensorInfo, ...]:
        """The arguments, which must be `arity` tensors."""
        if len(infos) != self.arity:
            raise DeduceError(f"{self.name}: wanted {self.arity} arguments, found {len(infos)}")
        for position, info in enumerate(infos):
            if not isinstance(info, TensorInfo):
                raise DeduceError(f"{self.name}: wanted a tensor as argument {position}, found {info!r}")
        return tuple(info for info in infos if isinstance(info, TensorInfo))

    def same_dtype(self, infos: Sequence[TensorInfo]) -> DType | None:
        """The one element type of all arguments; None when one is unknown. Raises DeduceError when they differ."""
        known = [i.dtype for i in infos if i.dtype is not None]
        for d in known[1:]:
            if d is not known[0]:
                raise DeduceError(f"{self.name}: wanted one dtype, found {known[0]} and {d}; cast one of them first")
        return known[0] if len(known) == len(infos) else None


def env_of(bounds: Sequence[Bound]) -> Env:
    """Declared bounds as facts for proofs, which ask the solver where one is installed."""
    return Env({b.var: (b.lower, b.upper) for b in bounds}, solver=installed_solver())


def shape_of(info: TensorInfo) -> tuple[Expr, ...]:
    """The dims of a fully known annotation."""
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
    """The product of dims, left to right; 1 for none."""
    result = expr(1)
    for d in dims:
        result = mul(result, d)
    return result


def is_const(consts: Sequence[bool], position: int) -> bool:
    return position < len(consts) and consts[position]


def float_result(value: Array, arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """`value` as `dtype`, or as float64 when an argument came as float64 (references stay in double precision)."""
    if any(a.dtype == np.float64 for a in arrays) and is_floating(dtype):
        return np.asarray(value, np.float64)
    return np.asarray(value).astype(dtype, copy=False)


def wide(a: Array) -> Array:
    """Floats as float64; everything else as it is."""
    return a.astype(np.float64, copy=False) if is_floating(a.dtype) else a


def axis_index(name: str, axis: int, ndim: int) -> int:
    """A possibly negative axis as 0 .. ndim-1. Raises DeduceError."""
    if not -ndim <= axis < ndim:
        raise DeduceError(f"{name}: wanted an axis in {-ndim}..{ndim - 1}, found {axis}")
    return axis % ndim
