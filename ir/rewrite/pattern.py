"""Patterns over the dataflow of graph functions, with captures and conditions.

A pattern is a frozen value that describes a value and what it was computed from. Patterns are composed with functions
and Python's operators:

    x, w = "x", "w"                                       # a text is a capture: any value, known by that name
    product = op(Matmul, x, w)                            # an operator by its class, with attributes: transpose_b=True
    biased = maybe(product, lambda p: p + "bias")         # with a bias or without one
    silu = value("h") * op(Sigmoid, "h")                  # the same name is the same value; + and * in either order
    half = 0.5 * value("h")                               # a number in an operator, or a constant that is it everywhere
    kernel = tir(x, kind=PatternKind.ELEMENTWISE)         # call_tir, by the loops of its function or by its name
    small = product.once().of("n", 64, dtype=f32)         # read by one other value; dims by name, number or expression
    even = small.where(lambda m: eq(m.dim("n") % 8, 0))   # proved, never guessed

Dims and conditions are decided with yes, no or unknown. An unknown one is noted in `Match.unknown`
(`relax_tune.ir.rewrite.match`); a rewrite (`relax_tune.ir.rewrite.rules`) then does not change the place, or puts an
`if` around the new value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from relax_tune.errors import UserError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.deduce.pattern_kinds import PatternKind
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Div, DivScalar, Mul, MulScalar, Sub
from relax_tune.ir.op.reduction.linalg import Matmul

if TYPE_CHECKING:
    from relax_tune.ir.rewrite.match import Match

Operand = Union["Pattern", str, int, float]
"""A pattern, or its short form: the name of a capture, or a number that all elements of a constant equal."""

Dim = Union[Expr, int, str, None, EllipsisType]
"""A dim: an expression or number it must equal, a name for it, None for any; `...` first for any number of leading dims."""


@dataclass(frozen=True)
class Pattern:
    """A description of a value and its computation. Base of all patterns."""

    def named(self, name: str) -> Pattern:
        """Capture the value as `name`. A value captured earlier under the name must be the same."""
        return Named(name, self)

    def once(self) -> Pattern:
        """Require that one binding is the only reader of the value, and the function does not return it."""
        return Once(self)

    def of(self, *dims: Dim, dtype: DType | None = None, ndim: int | None = None) -> Pattern:
        """Require a tensor of these dims (any when none are given), element type and number of dims."""
        return Annotated(self, dims or None, dtype, ndim)

    def where(self, condition: Callable[[Match], bool | Expr | Proof]) -> Pattern:
        """Require a `condition` of the match: a bool, a `Proof`, or an expression over the shape symbols to prove."""
        return Conditional(self, condition)

    def __or__(self, other: Pattern) -> Pattern:
        """Match this pattern, or else `other`."""
        # Flattened, so that a | b | c is one list of alternatives in the written order.
        choices = [c for p in (self, pattern(other)) for c in (p.choices if isinstance(p, Either) else (p,))]
        return choices[0] if len(choices) == 1 else Either(tuple(choices))

    def __getitem__(self, index: int) -> Pattern:
        """Match one field of a tuple."""
        if type(index) is not int or index < 0:
            raise UserError(f"pattern: expected the number of a tuple's field, got {index!r}; such as split[0]")
        return TupleField(self, index)

    def __add__(self, other: Operand) -> Pattern:
        return _with_number(AddScalar, self, other) | op(Add, self, other)

    def __radd__(self, other: Operand) -> Pattern:
        return self + other

    def __sub__(self, other: Operand) -> Pattern:
        return _with_number(AddScalar, self, other, -1) | op(Sub, self, other)

    def __mul__(self, other: Operand) -> Pattern:
        return _with_number(MulScalar, self, other) | op(Mul, self, other)

    def __rmul__(self, other: Operand) -> Pattern:
        return self * other

    def __truediv__(self, other: Operand) -> Pattern:
        return _with_number(DivScalar, self, other) | op(Div, self, other)

    def __matmul__(self, other: Operand) -> Pattern:
        return op(Matmul, self, other, transpose_b=False)


@dataclass(frozen=True)
class Anything(Pattern):
    """Any value."""


@dataclass(frozen=True)
class Named(Pattern):
    name: str
    inner: Pattern = Anything()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise UserError(f"pattern: expected a name for a capture, such as 'x', got {self.name!r:.80}")


@dataclass(frozen=True)
class Operation(Pattern):
    """An operator of a class; `args` None for any arguments. An attribute is a value or a predicate of one."""

    operator: type[Operator]
    args: tuple[Pattern, ...] | None
    attributes: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class TensorCall(Pattern):
    """A `call_tir` of the function `callee`, or of any of a pattern kind; `args` None for any arguments."""

    callee: str | None
    kind: PatternKind | None
    args: tuple[Pattern, ...] | None


@dataclass(frozen=True)
class LibraryOperation(Pattern):
    routine: str
    args: tuple[Pattern, ...] | None


@dataclass(frozen=True)
class Weight(Pattern):
    """A constant whose elements are all `number`; None allows any elements."""

    number: float | None


@dataclass(frozen=True)
class Either(Pattern):
    choices: tuple[Pattern, ...]


@dataclass(frozen=True)
class TupleField(Pattern):
    """A field of a tuple; `index` None for any field."""

    inner: Pattern
    index: int | None


@dataclass(frozen=True)
class Packed(Pattern):
    """A tuple of values of this region."""


@dataclass(frozen=True)
class Once(Pattern):
    inner: Pattern


@dataclass(frozen=True)
class Annotated(Pattern):
    inner: Pattern
    dims: tuple[Dim, ...] | None
    dtype: DType | None
    ndim: int | None

    def __post_init__(self) -> None:
        for position, d in enumerate(self.dims or ()):
            if d is ... and position > 0:
                raise UserError("pattern: expected `...` as the first of the dims, got it later; move it")
            if not (d is None or d is ... or isinstance(d, (str, Expr)) or type(d) is int):
                raise UserError(f"pattern: expected a dim as a number, a name, an expression or None, got {d!r:.80}")


@dataclass(frozen=True)
class Conditional(Pattern):
    inner: Pattern
    condition: Callable[[Match], bool | Expr | Proof]


def pattern(x: Operand) -> Pattern:
    """Convert `x` to a pattern.

    Raises:
        UserError: a value that is no pattern.
    """
    if isinstance(x, Pattern):
        return x
    if isinstance(x, str):
        return Named(x)
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return Weight(x)
    raise UserError(f"pattern: expected a pattern, the name of a capture or a number, got {x!r:.80}")


def value(name: str) -> Pattern:
    """Match any value, captured as `name`."""
    return Named(name)


def op(operator: type[Operator], *args: Operand, **attributes: Any) -> Pattern:
    """Match an operator of this class or a subclass.

    Arguments of a commutative operator match in either order, first as written.

    Args:
        args: patterns of its arguments; any arguments when none are given.
        attributes: values of its attributes, or predicates of them.
    """
    if not (isinstance(operator, type) and issubclass(operator, Operator)):
        raise UserError(f"pattern: expected the class of an operator, such as Matmul, got {operator!r:.80}")
    known = [f.name for f in fields(operator)]
    for name in attributes:
        if name not in known:
            has = f"its attributes are {', '.join(known)}" if known else "it has none"
            raise UserError(f"pattern: expected an attribute of {operator.__name__}, got {name!r}; {has}")
    return Operation(operator, _args(args), tuple(attributes.items()))


def item(owner: Operand) -> Pattern:
    """Match any field of the tuple `owner`; `owner[0]` is its first field."""
    return TupleField(pattern(owner), None)


def packed() -> Pattern:
    """Match a tuple that a binding makes from its fields."""
    return Packed()


def tir(*args: Operand, callee: str | None = None, kind: PatternKind | None = None) -> Pattern:
    """Match a `call_tir` of the tensor function `callee`, of any function of this kind, or of any function.

    Args:
        args: patterns of its arguments; any arguments when none are given.
    """
    return TensorCall(callee, kind, _args(args))


def library(routine: str, *args: Operand) -> Pattern:
    """Match a `call_dps_library` of `routine`."""
    return LibraryOperation(routine, _args(args))


def weight(name: str | None = None, number: float | None = None) -> Pattern:
    """Match a constant; `number` is the value of each of its elements."""
    return Weight(number) if name is None else Named(name, Weight(number))


def maybe(base: Pattern, wrap: Callable[[Pattern], Pattern]) -> Pattern:
    """Match `wrap(base)`, or else `base`."""
    return wrap(base) | base


def _args(args: Sequence[Operand]) -> tuple[Pattern, ...] | None:
    return tuple(pattern(a) for a in args) if args else None


def _with_number(operator: type[Operator], p: Pattern, other: Operand, sign: int = 1) -> Pattern:
    """Match an operator that holds the number as an attribute, as importers write it.

    It matches nothing unless the operand is a number.
    """
    # `Either(())` has no alternatives and never matches, so `p + "bias"` is only the sum of two tensors.
    if not isinstance(other, (int, float)) or isinstance(other, bool):
        return Either(())
    # In float32, as importers round the attribute: 0.1 in the pattern must match the model's 0.1f.
    number = np.float32(sign * other)
    return op(operator, p, value=lambda value: np.float32(value) == number)
