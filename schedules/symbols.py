"""Scalar arguments of trace steps: expressions over tunables and shape symbols, as values and as text.

A trace knows no function, so it names shape symbols by their slots: `s0` is the first of `PrimFunc.symbols`, as in the
normalised text that identifies a workload. The trace fits every copy of the function, under any names of its symbols.

Tests: `tests/schedules/traces/test_symbolic_factors.py`.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    Tunable,
    Var,
    const,
    free_vars,
    mul,
    op,
    postorder,
    rebuild,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.scalar_ops import ALGEBRA, INFIX, PYTHON_ARITHMETIC

# Whole numbers in traces stay below this, so that sums of a few products of them fit 64 bits.
LIMIT = 1 << 31
# Longest text given to Python's parser.
MAX_CHARACTERS = 500

_SLOT = re.compile(r"s(0|[1-9][0-9]?)")
_TAKEN = frozenset({"s", "Tunable", "min", "max"})


class SymbolSlot(Var):
    """The shape symbol at `position` of the function that a trace is replayed on."""

    __slots__ = ("position",)
    position: int

    def __init__(self, position: int) -> None:
        super().__init__(f"s{position}", i64)
        self.position = position


_SLOTS = tuple(map(SymbolSlot, range(100)))


def slot(position: int) -> SymbolSlot:
    """Return the one value that stands for a position, from 0 to 99."""
    return _SLOTS[position]


def slot_named(name: str) -> SymbolSlot | None:
    """Return the slot called `s0`, `s1`, ...; None for other names."""
    match = _SLOT.fullmatch(name)
    return None if match is None else slot(int(match[1]))


def require_name(name: str) -> str:
    """Return `name` if a tunable may have it. Raises ScheduleError: a trace is printed as Python."""
    if not name.isidentifier() or keyword.iskeyword(name) or name in _TAKEN or slot_named(name) is not None:
        raise ScheduleError(
            f"expected a tunable's name that is an identifier and none of {', '.join(sorted(_TAKEN))}, s0, s1, ...; got {name!r}"
        )
    return name


def with_slots(e: Expr, func: PrimFunc) -> Expr:
    """Replace the shape symbols of `func` in an expression by their slots. Raises ScheduleError for one that no trace can hold."""
    if isinstance(e, (Tunable, SymbolSlot)):
        return e
    known: dict[Var, Expr] = {v: slot(at) for at, v in enumerate(func.symbols[:100]) if v.dtype is i64}
    for n in postorder((e,)):
        if isinstance(n, Var) and (isinstance(n, (Tunable, SymbolSlot)) or n in known):
            continue
        if (isinstance(n, Const) and n.dtype is i64) or (n.op in ALGEBRA):
            continue
        shown = ", ".join(v.name for v in known) or "no shape symbol"
        raise ScheduleError(
            f"{func.name}: expected numbers, tunables, shape symbols ({shown}), + - * // %, min and max; "
            f"got {n!r} in {e!r}"
        )
    return substitute(e, known)


def with_symbols(e: Expr, func: PrimFunc) -> Expr:
    """Replace the slots in an expression by the shape symbols of `func`. Raises ScheduleError if it has too few."""
    places = [v for v in free_vars(e) if isinstance(v, SymbolSlot)]
    if not places:
        return e
    symbols = func.symbols
    for v in places:
        if v.position >= len(symbols) or symbols[v.position].dtype is not i64:
            names = ", ".join(x.name for x in symbols) or "none"
            raise ScheduleError(f"{func.name}: {e!r} expects {v.position + 1} or more shape symbols, got {names}")
    return substitute(e, {v: symbols[v.position] for v in places})


def read_scalars(
    text: str, known: Callable[[str], Expr | None], described: str, operations: Collection[str] = ALGEBRA
) -> tuple[Expr, ...]:
    """Parse the expressions in `text`, separated by commas, over `known` names, whole numbers and `operations`.

    The text is untrusted: it is parsed by Python's `ast` and never executed.

    Args:
        described: The names, for the error.
    """
    # Python's tokenizer warns of a number followed by letters
    plain = text.strip() and re.search(r"[^\w ()+*/%,.\-]|(?<!\w)\d+[^\W\d]", text) is None
    try:
        tree = ast.parse(f"({text},)", mode="eval").body if plain and len(text) <= MAX_CHARACTERS else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.Tuple):
        raise ScheduleError(
            f"expected expressions separated by commas, in {MAX_CHARACTERS} characters at most; got {text[:MAX_CHARACTERS]!r}"
        )

    def read(node: ast.expr) -> Expr:
        value = known(node.id) if isinstance(node, ast.Name) else None
        if value is not None:
            return value
        # The tree is read by hand instead of evaluated: traces come from databases of other people.
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return mul(read(node.operand), -1)
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value < LIMIT:
            return const(node.value)
        name, args = "", list[ast.expr]()
        if isinstance(node, ast.BinOp):
            name, args = PYTHON_ARITHMETIC.get(type(node.op), ""), [node.left, node.right]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            name, args = node.func.id if node.func.id in ("min", "max") else "", node.args
        if name not in operations or len(args) != 2:
            shown = " ".join(INFIX.get(o, o) for o in operations)
            raise ScheduleError(
                f"expected one of {described}, a number, or {shown} of them (numbers below {LIMIT}), "
                f"got {ast.unparse(node)!r}"
            )
        parts = tuple(map(read, args))
        return rebuild(op(name, parts, parts[0].dtype), parts)

    return tuple(read(node) for node in tree.elts)


def only_tunables(*roots: Expr) -> bool:
    """Return whether every variable under `roots` is a tunable: the values of the tunables decide the expressions."""
    return all(isinstance(v, Tunable) for v in free_vars(*roots))


def are_variables(exprs: Iterable[Expr]) -> bool:
    """Return whether every expression is a variable."""
    return all(isinstance(e, Var) for e in exprs)


def variables_of(exprs: Iterable[Expr]) -> tuple[Var, ...]:
    """Return the expressions that are variables, in order."""
    return tuple(e for e in exprs if isinstance(e, Var))


def by_variable(keys: Sequence[Expr], values: Sequence[Expr]) -> dict[Var, Expr]:
    """Map each variable among `keys` to the value at its place."""
    return {k: v for k, v in zip(keys, values) if isinstance(k, Var)}
