"""Constraints written as text: the arithmetic and comparisons of Python expressions, evaluated for whole columns at once.

`"64 <= block_x * block_y <= 1024"` over one column per parameter gives for every row the value of Python's own
evaluation; a row on which Python would divide by zero breaks the constraint. The text is parsed, never executed.

Tests: `tests/tuner/search/test_named.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_tune.errors import UserError
from relax_tune.tuner.search.space import BoolArray

Column = npt.NDArray[Any]
"""Values of one parameter, (R,): integers, floats, truth values or text."""

# Evaluation is recursive; this depth is far below Python's limit, wherever it is called from.
MAX_DEPTH = 60

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.remainder,
    ast.Pow: np.power,
    ast.BitAnd: np.bitwise_and,
    ast.BitOr: np.bitwise_or,
    ast.BitXor: np.bitwise_xor,
}
_DIVIDES = (ast.Div, ast.FloorDiv, ast.Mod)
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
}
_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {"min": np.minimum, "max": np.maximum}
_GRAMMAR = (
    "parameters, numbers, text, + - * / // % ** & | ^, comparisons, `in` a list, `and`, `or`, `not`, min, max and abs"
)


@dataclass(frozen=True, slots=True)
class _Value:
    """The value of a subexpression on each row, and the rows on which Python would have raised ZeroDivisionError."""

    value: Any
    raised: Any


class TextConstraint:
    """One constraint of a search space.

    Raises:
        UserError: Text that is no expression of this language, or a name that is no parameter; a caret shows where.
    """

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text = text
        try:
            self._root = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise UserError(
                f"expected a constraint as a Python expression over {_listed(names)}, got {text!r:.200}: {error}"
            ) from None
        self._check(names)

    def __call__(self, columns: Mapping[str, Column]) -> BoolArray:
        """Return a mask (R,) of the rows that satisfy it; `columns` has a column (R,) for every parameter."""
        count = len(next(iter(columns.values()))) if columns else 1
        # Rows that divide by zero are masked afterwards.
        with np.errstate(all="ignore"):
            result = _evaluate(self._root, columns)
        holds = np.broadcast_to(_truth(result.value) & ~np.asarray(result.raised, dtype=np.bool_), (count,))
        return np.array(holds, dtype=np.bool_)

    def _check(self, names: Collection[str]) -> None:
        # Level by level and not by recursion, since the depth is what has to be checked.
        level: list[ast.AST] = [self._root]
        depth = 0
        while level:
            depth += 1
            if depth > MAX_DEPTH:
                raise UserError(
                    f"expected a constraint nested at most {MAX_DEPTH} deep, got {self.text!r:.80}; split it in two"
                )
            for node in level:
                self._check_node(node, names)
            level = [child for node in level for child in _operands(node)]

    def _check_node(self, node: ast.AST, names: Collection[str]) -> None:
        if isinstance(node, ast.Name) and node.id not in names:
            raise self._refused(node, f"{node.id!r} is no parameter; there are {_listed(names)}")
        if not _known(node):
            raise self._refused(node, f"a constraint may use {_GRAMMAR}")

    def _refused(self, node: ast.AST, why: str) -> UserError:
        at = getattr(node, "col_offset", 0)
        return UserError(f"expected a constraint this search can evaluate: {why}\n  {self.text.strip()}\n  {' ' * at}^")


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "no parameters"


def _known(node: ast.AST) -> bool:
    match node:
        case ast.Name() | ast.BoolOp():
            return True
        case ast.Constant(value=value):
            return isinstance(value, (bool, int, float, str)) and abs(_size(value)) < 2**62
        case ast.BinOp(op=op):
            return type(op) in _ARITHMETIC
        case ast.UnaryOp(op=op):
            return isinstance(op, (ast.USub, ast.UAdd, ast.Not))
        case ast.Compare(ops=ops, comparators=others):
            return all(
                type(o) in _COMPARISONS or (isinstance(o, (ast.In, ast.NotIn)) and isinstance(c, (ast.List, ast.Tuple)))
                for o, c in zip(ops, others)
            )
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return (name in _FUNCTIONS and len(args) >= 2) or (name == "abs" and len(args) == 1)
        case _:
            return False


def _size(value: bool | int | float | str) -> float:
    return 0 if isinstance(value, str) else value


def _operands(node: ast.AST) -> list[ast.AST]:
    """Return the subexpressions of a node. The members of a list after `in` count as the node's own."""
    match node:
        case ast.BoolOp(values=values):
            return list(values)
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.UnaryOp(operand=operand):
            return [operand]
        case ast.Compare(left=left, comparators=others):
            spread = [c.elts if isinstance(c, (ast.List, ast.Tuple)) else [c] for c in others]
            return [left, *(e for part in spread for e in part)]
        case ast.Call(args=args):
            return list(args)
        case _:
            return []


def _evaluate(node: ast.AST, columns: Mapping[str, Column]) -> _Value:
    match node:
        case ast.Constant(value=value):
            return _Value(value, False)
        case ast.Name(id=name):
            return _Value(columns[name], False)
        case ast.BoolOp(op=op, values=values):
            return _junction(isinstance(op, ast.And), [_evaluate(v, columns) for v in values])
        case ast.UnaryOp(op=op, operand=operand):
            inner = _evaluate(operand, columns)
            if isinstance(op, ast.Not):
                return _Value(~_truth(inner.value), inner.raised)
            return _Value(-_number(inner.value) if isinstance(op, ast.USub) else _number(inner.value), inner.raised)
        case ast.BinOp(op=op, left=left, right=right):
            a, b = _evaluate(left, columns), _evaluate(right, columns)
            raised = np.logical_or(a.raised, b.raised)
            x, y = _number(a.value), _number(b.value)
            if isinstance(op, _DIVIDES):
                # Divided by 1 instead of 0: NumPy would give 0 for integers and infinity for floats, and neither is
                # an error.
                raised, y = np.logical_or(raised, y == 0), np.where(y == 0, 1, y)
            # NumPy refuses integers to negative integer powers.
            if isinstance(op, ast.Pow) and np.any(np.asarray(y) < 0):
                x = np.asarray(x, dtype=np.float64)
            return _Value(_ARITHMETIC[type(op)](x, y), raised)
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _comparison(_evaluate(left, columns), ops, others, columns)
        case ast.Call(func=ast.Name(id=name), args=args):
            parts = [_evaluate(a, columns) for a in args]
            value = _number(parts[0].value)
            for part in parts[1:]:
                value = _FUNCTIONS[name](value, _number(part.value))
            return _Value(np.abs(value) if name == "abs" else value, _any(p.raised for p in parts))
    raise AssertionError(f"unchecked node {ast.dump(node)}")


def _junction(every: bool, parts: list[_Value]) -> _Value:
    """Evaluate `and` / `or` from left to right: a part that Python would not reach cannot raise. The result is a truth
    value.
    """
    total, raised = _truth(parts[0].value), parts[0].raised
    for part in parts[1:]:
        reached = total if every else ~total
        raised = np.logical_or(raised, np.logical_and(reached, part.raised))
        total = (total & _truth(part.value)) if every else (total | _truth(part.value))
    return _Value(total, raised)


def _comparison(left: _Value, ops: list[ast.cmpop], others: list[ast.expr], columns: Mapping[str, Column]) -> _Value:
    steps = []
    for op, other in zip(ops, others):
        if isinstance(other, (ast.List, ast.Tuple)):
            members = [_evaluate(e, columns) for e in other.elts]
            member_of: Any = np.zeros((), dtype=np.bool_)
            for member in members:
                member_of = member_of | _compared(ast.Eq(), left.value, member.value)
            value = ~member_of if isinstance(op, ast.NotIn) else member_of
            steps.append(_Value(value, np.logical_or(left.raised, _any(m.raised for m in members))))
            continue
        right = _evaluate(other, columns)
        steps.append(_Value(_compared(op, left.value, right.value), np.logical_or(left.raised, right.raised)))
        left = right
    return _junction(True, steps)


def _compared(op: ast.cmpop, a: Any, b: Any) -> Any:
    """Compare columns. Text and numbers are unequal, and ordering them raises."""
    texts = [np.asarray(v).dtype.kind == "U" for v in (a, b)]
    if texts[0] != texts[1]:
        return np.full(np.broadcast_shapes(np.shape(a), np.shape(b)), isinstance(op, ast.NotEq))
    return _COMPARISONS[type(op)](a, b)


def _truth(value: Any) -> Any:
    array = np.asarray(value)
    return array != "" if array.dtype.kind == "U" else array != 0


def _number(value: Any) -> Any:
    """Return an operand of arithmetic: truth values count as 0 and 1.

    Raises:
        UserError: The operand is text.
    """
    array = np.asarray(value)
    if array.dtype.kind == "U":
        raise UserError("expected numbers in the arithmetic of a constraint, got a text parameter; compare it with ==")
    return array.astype(np.int64) if array.dtype.kind == "b" else array


def _any(parts: Any) -> Any:
    total: Any = False
    for part in parts:
        total = np.logical_or(total, part)
    return total
