"""Bases of the nodes of graph functions: operators, atoms, computations.

Tests: `tests/ir/text/test_text_graph.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from numbers import Integral, Number
from typing import TYPE_CHECKING, Any, ClassVar, Self

from relax_tune.errors import DeduceError
from relax_tune.ir.core.expr import Expr, Var, const, free_vars, substitute
from relax_tune.ir.core.names import same_objects
from relax_tune.ir.core.struct_info import (
    INFOS,
    ObjectInfo,
    StructInfo,
    info_symbols,
)

if TYPE_CHECKING:
    from relax_tune.ir.core.graph import Body, Value


MapInfo = Callable[[StructInfo], StructInfo]


@dataclass(frozen=True, slots=True)
class Operator:
    """Base of graph operators: one frozen subclass per operator in `ir/op`, whose fields are its attributes.

    A subclass sets `name` and implements deduction, legalisation to a tensor function and evaluation in NumPy;
    see `relax_tune.ir.op.base.OperatorSpec`.
    """

    commutative: ClassVar[bool] = False
    """The result does not depend on the order of the arguments."""

    def __post_init__(self) -> None:
        for name in _expression_fields(type(self)):  # type: ignore[arg-type]
            old = getattr(self, name)
            new = _as_expressions(old, f"{getattr(self, 'name', type(self).__name__)}: {name}")
            if new is not old:
                object.__setattr__(self, name, new)

    def symbols(self) -> tuple[Var, ...]:
        """Return the symbols in the attributes."""
        return free_vars(*_expressions(tuple(getattr(self, f.name) for f in fields(self))))

    def substituted(self, mapping: Mapping[Var, Expr]) -> Self:
        """Replace symbols in the attributes of this operator. Returns the same object when none occurs."""
        changed: dict[str, Any] = {}
        for f in fields(self):
            old = getattr(self, f.name)
            new = _substitute_attribute(old, mapping)
            if new != old:
                changed[f.name] = new
        return replace(self, **changed) if changed else self


@cache
def _expression_fields(kind: type[Operator]) -> tuple[str, ...]:
    """Return the names of the attributes that hold expressions."""
    return tuple(f.name for f in fields(kind) if re.search(r"\bExpr\b", str(f.type)))


def _as_expressions(attribute: Any, where: str) -> Any:
    """Turn whole numbers among dims into literals; the same object when there are none. Raises DeduceError for other numbers."""
    if isinstance(attribute, Integral) and not isinstance(attribute, bool):
        return const(int(attribute))
    if isinstance(attribute, (Number, str)):
        raise DeduceError(f"{where}: expected whole numbers or expressions over symbols, got {attribute!r}")
    if isinstance(attribute, tuple):
        converted = tuple(_as_expressions(a, where) for a in attribute)
        return attribute if same_objects(converted, attribute) else converted
    return attribute


def _expressions(attribute: object) -> Iterator[Expr]:
    if isinstance(attribute, Expr):
        yield attribute
    elif isinstance(attribute, tuple):
        for a in attribute:
            yield from _expressions(a)


def _substitute_attribute(attribute: Any, mapping: Mapping[Var, Expr]) -> Any:
    if isinstance(attribute, Expr):
        return substitute(attribute, mapping)
    if isinstance(attribute, tuple):
        return tuple(_substitute_attribute(a, mapping) for a in attribute)
    return attribute


class AtomBase:
    """A value without operands, which may be an operand itself."""

    __slots__ = ()
    is_atom: ClassVar[bool] = True

    @property
    def bodies(self) -> tuple[Body, ...]:
        """The sides of a branch."""
        return ()

    @property
    def operands(self) -> tuple[Value, ...]:
        """The values that this one is computed from."""
        return ()

    @property
    def attributes(self) -> tuple[object, ...]:
        """All that defines the computation, except the operands."""
        return ()

    def with_operands(self, new: Sequence[Value]) -> Self:
        """Replace the operands of this value by `new`. Returns the same object when they are unchanged."""
        assert not new, f"{type(self).__name__} has no operands"
        return self

    def symbols(self) -> Iterator[Var]:
        """Return the symbols that this value mentions, operands and branches included. A symbol may occur several
        times.
        """
        return iter(())

    def with_symbols(self, meaning: Mapping[Var, Expr], info: MapInfo) -> Self:
        """Replace symbols by `meaning` and annotations by `info`. Returns the same object when nothing changes."""
        return self


class ComputationBase:
    """A value computed from operands. See `AtomBase` for the meaning of the methods."""

    __slots__ = ()
    is_atom: ClassVar[bool] = False

    @property
    def info(self) -> StructInfo:
        """The annotation that the value itself states; `ObjectInfo` if deduction determines it."""
        return ObjectInfo()

    @property
    def bodies(self) -> tuple[Body, ...]:
        return ()

    @property
    def operands(self) -> tuple[Value, ...]:
        raise NotImplementedError(f"{type(self).__name__}.operands")

    @property
    def attributes(self) -> tuple[object, ...]:
        return ()

    def with_operands(self, new: Sequence[Value]) -> Self:
        return self if same_objects(new, self.operands) else self._computed_from(tuple(new))

    def _computed_from(self, new: tuple[Value, ...]) -> Self:
        """Return this value computed from other operands."""
        raise NotImplementedError(f"{type(self).__name__}.with_operands")

    def symbols(self) -> Iterator[Var]:
        for a in self.attributes:
            yield from _attribute_symbols(a)
        for v in self.operands:
            yield from v.symbols()

    def with_symbols(self, meaning: Mapping[Var, Expr], info: MapInfo) -> Self:
        return self


def _attribute_symbols(attribute: object) -> Iterator[Var]:
    if isinstance(attribute, Expr):
        yield from free_vars(attribute)
    elif isinstance(attribute, Operator):
        yield from attribute.symbols()
    elif isinstance(attribute, tuple):
        for a in attribute:
            yield from _attribute_symbols(a)
    elif isinstance(attribute, INFOS):
        yield from info_symbols(attribute)
