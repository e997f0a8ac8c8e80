"""Scalar expressions: shapes, indices, tunables, guards, and the values that tensor functions compute.

Nodes are interned values: `==` is identity and is structural, because the constructors return the existing node. Variables
are identities: two variables with one name are two variables. Constructors fold constants and drop neutral elements; further
algebra is in `relax_tune.ir.arith`, the operations themselves in `relax_tune.ir.core.scalar_ops`.
Comparisons that build IR are functions (`lt(a, b)`); `==` never builds IR.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Union
from weakref import WeakValueDictionary

from relax_tune.ir.core.dtype import DType, bool_, f32, i64
from relax_tune.ir.core.scalar_ops import BITS, MATH, OPS, SCALAR_OPS, converted, wrapped

if TYPE_CHECKING:
    from relax_tune.ir.core.buffer import Buffer

Number = Union[int, float, bool]
ExprLike = Union["Expr", int]


class Expr:
    """Base of scalar expressions.

    Attributes:
        dtype: element type of the value.
        value: the number of a literal, None for other nodes.
        op, args: name and operands of an operation, empty for other nodes.
        children: operands or indices.
    """

    __slots__ = ("__weakref__", "dtype")
    dtype: DType
    value: Number | None = None
    op: str = ""
    args: tuple[Expr, ...] = ()
    children: tuple[Expr, ...] = ()

    def __add__(self, other: ExprLike) -> Expr:
        return add(self, other)

    def __radd__(self, other: ExprLike) -> Expr:
        return add(other, self)

    def __sub__(self, other: ExprLike) -> Expr:
        return sub(self, other)

    def __rsub__(self, other: ExprLike) -> Expr:
        return sub(other, self)

    def __mul__(self, other: ExprLike) -> Expr:
        return mul(self, other)

    def __rmul__(self, other: ExprLike) -> Expr:
        return mul(other, self)

    def __floordiv__(self, other: ExprLike) -> Expr:
        return floordiv(self, other)

    def __rfloordiv__(self, other: ExprLike) -> Expr:
        return floordiv(other, self)

    def __mod__(self, other: ExprLike) -> Expr:
        return floormod(self, other)

    def __rmod__(self, other: ExprLike) -> Expr:
        return floormod(other, self)

    def __neg__(self) -> Expr:
        return mul(self, const(-1, self.dtype))

    def __bool__(self) -> bool:
        raise TypeError(
            "a scalar expression has no truth value; build comparisons with lt/le/eq and decide with prove()"
        )

    def __repr__(self) -> str:
        from relax_tune.ir.core.expr_text import format_expr  # imports this module

        return format_expr(self)


class Const(Expr):
    """A literal."""

    __slots__ = ("value",)
    value: Number


class Var(Expr):
    """A variable: shape symbol, loop variable, block iterator or scalar parameter. Compared by identity; the name is a hint."""

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str, dtype: DType = i64) -> None:
        self.name = name
        self.dtype = dtype


class Tunable(Var):
    """A schedule symbol: a positive integer from the finite, sorted `domain`."""

    __slots__ = ("domain",)
    domain: tuple[int, ...]

    def __init__(self, name: str, domain: Iterable[int]) -> None:
        super().__init__(name, i64)
        self.domain = tuple(sorted(set(domain)))
        if not self.domain or self.domain[0] < 1:
            raise ValueError(f"tunable {name!r}: expected a non-empty domain of positive integers, got {self.domain}")


class Op(Expr):
    """An operation on scalars.

    Attributes:
        op: name in `scalar_ops`.
        args: operands.
        inner: cache, filled on first use: result of `leaves`.
        reach: cache, filled on first use: result of `arith.bounds.reach`; -1 until then.
    """

    __slots__ = ("args", "inner", "op", "reach")
    op: str
    args: tuple[Expr, ...]
    inner: tuple[Var | Load, ...] | None
    reach: int


# Walks read `children` millions of times in a build: a second name of a slot needs no call, unlike a property.
Op.children = Op.__dict__["args"]


class Load(Expr):
    """The element of `buffer` at `indices`. `inner`: leaves of the indices; None until computed."""

    __slots__ = ("buffer", "indices", "inner")
    buffer: Buffer
    indices: tuple[Expr, ...]
    inner: tuple[Var | Load, ...] | None


Load.children = Load.__dict__["indices"]


_consts: WeakValueDictionary[tuple[object, ...], Const] = WeakValueDictionary()
_ops: WeakValueDictionary[tuple[object, ...], Op] = WeakValueDictionary()
_loads: WeakValueDictionary[tuple[object, ...], Load] = WeakValueDictionary()
_intern_lock = RLock()  # guards insertion into the intern tables: two threads must not create one node twice


def const(value: Number, dtype: DType | None = None) -> Const:
    """Return the literal `value`, wrapped below 64 bits; by default int64 for integers and float32 for floats."""
    if dtype is None:
        dtype = bool_ if isinstance(value, bool) else i64 if hasattr(value, "__index__") else f32
    value = bool(value) if dtype is bool_ else float(value) if dtype.is_float else int(value)
    if dtype is not i64 and dtype is not f32:
        value = (
            wrapped(int(value), dtype) if dtype.is_int else float(converted(value, dtype)) if dtype.is_small else value
        )
    key = (dtype, repr(value) if dtype.is_float else value)  # -0.0 is not 0.0
    node = _consts.get(key)
    if node is None:
        node = Const.__new__(Const)
        node.value, node.dtype = value, dtype
        # `setdefault` under the lock returns the node of another thread, if it was faster.
        with _intern_lock:
            return _consts.setdefault(key, node)
    return node


def op(name: str, args: tuple[Expr, ...], dtype: DType) -> Expr:
    """Return the interned operation node, without folding."""
    key = (name, args, dtype)
    node = _ops.get(key)
    if node is None:
        if name not in OPS:
            raise ValueError(f"expected a scalar operation, one of {sorted(OPS)}; got {name!r}")
        node = Op.__new__(Op)
        node.op, node.args, node.dtype, node.inner, node.reach = name, args, dtype, None, -1
        with _intern_lock:
            return _ops.setdefault(key, node)
    return node


def load(buffer: Buffer, indices: Iterable[ExprLike]) -> Load:
    """Return `buffer[indices]`; the number of indices must be the buffer's rank."""
    where = tuple(expr(i) for i in indices)
    if len(where) != len(buffer.shape):
        raise ValueError(f"buffer {buffer.name!r} has {len(buffer.shape)} dims, got {len(where)} indices")
    key = (buffer, where)
    node = _loads.get(key)
    if node is None:
        node = Load.__new__(Load)
        node.buffer, node.indices, node.dtype, node.inner = buffer, where, buffer.dtype, None
        with _intern_lock:
            return _loads.setdefault(key, node)
    return node


def expr(value: ExprLike | float) -> Expr:
    """Turn a number into a literal; an expression passes through."""
    return value if isinstance(value, Expr) else const(value)


def _pair(a: ExprLike | float, b: ExprLike | float) -> tuple[Expr, Expr]:
    if isinstance(a, Expr):
        return a, b if isinstance(b, Expr) else const(b, a.dtype)
    return (const(a, b.dtype), b) if isinstance(b, Expr) else (expr(a), expr(b))


def _folded(fold: Callable[[Any, Any], Any], a: ExprLike, b: ExprLike) -> tuple[Expr, Expr, Const | None]:
    """Return both operands, and the folded literal or None.

    Division by zero and int64 overflow are not folded: an int64 may be a size, which must not wrap."""
    (x, y), literal = _pair(a, b), None
    if isinstance(x, Const) and isinstance(y, Const) and (y.value or fold not in (operator.floordiv, operator.mod)):
        value = fold(x.value, y.value)
        literal = const(value, x.dtype) if x.dtype is not i64 or wrapped(value, i64) == value else None
    return x, y, literal


def as_int(e: ExprLike) -> int | None:
    """Return the value of an integer literal, None for others."""
    if isinstance(e, int):
        return e
    return int(e.value) if isinstance(e, Const) and e.dtype.is_int else None


def _literal(e: Expr, value: Number) -> bool:
    # -0.0 equals 0.0, but is not neutral in the same operations.
    return e.value == value and not (isinstance(e.value, float) and math.copysign(1, e.value) < 0)


def add(a: ExprLike, b: ExprLike) -> Expr:
    x, y, literal = _folded(operator.add, a, b)
    if literal is not None:
        return literal
    # Not for floats: -0.0 + 0.0 is 0.0, and 0 times infinity is NaN.
    if x.dtype.is_int and (_literal(x, 0) or _literal(y, 0)):
        return y if _literal(x, 0) else x
    return op("add", (x, y), x.dtype)


def sub(a: ExprLike, b: ExprLike) -> Expr:
    x, y, literal = _folded(operator.sub, a, b)
    if literal is not None:
        return literal
    if x.dtype.is_int and (_literal(y, 0) or x is y):
        return const(0, x.dtype) if x is y else x
    return op("sub", (x, y), x.dtype)


def mul(a: ExprLike, b: ExprLike) -> Expr:
    x, y, literal = _folded(operator.mul, a, b)
    if literal is not None:
        return literal
    if _literal(x, 1) or _literal(y, 1):
        return y if _literal(x, 1) else x
    if x.dtype.is_int and (_literal(x, 0) or _literal(y, 0)):
        return const(0, x.dtype)
    return op("mul", (x, y), x.dtype)


def div(a: ExprLike, b: ExprLike) -> Expr:
    """Divide floats."""
    x, y = _pair(a, b)
    return x if _literal(y, 1) else op("div", (x, y), x.dtype)


def floordiv(a: ExprLike, b: ExprLike) -> Expr:
    """Divide integers, rounded to minus infinity; the divisor is never zero."""
    x, y, literal = _folded(operator.floordiv, a, b)
    if literal is not None:
        return literal
    if _literal(y, 1):
        return x
    return const(0, x.dtype) if _literal(x, 0) else op("floordiv", (x, y), x.dtype)


def floormod(a: ExprLike, b: ExprLike) -> Expr:
    """Return `a - floordiv(a, b) * b`, for a positive divisor in [0, b)."""
    x, y, literal = _folded(operator.mod, a, b)
    if literal is not None:
        return literal
    return const(0, x.dtype) if _literal(y, 1) or _literal(x, 0) else op("floormod", (x, y), x.dtype)


def ceildiv(a: ExprLike, b: ExprLike) -> Expr:
    """Return ceil(a / b) as floordiv(a + b - 1, b)."""
    x, y = _pair(a, b)
    if _literal(y, 1):
        return x
    return floordiv(add(x, sub(y, 1)), y)


def _extreme(name: str, a: ExprLike, b: ExprLike) -> Expr:
    x, y, literal = _folded(SCALAR_OPS[name].evaluate or min, a, b)
    return literal if literal is not None else x if x is y else op(name, (x, y), x.dtype)


minimum, maximum = (partial(_extreme, name) for name in ("min", "max"))
_COMPARE = {o.name: o.evaluate for o in SCALAR_OPS.values() if o.kind == "comparison" and o.evaluate}


def compare(name: str, a: ExprLike, b: ExprLike) -> Expr:
    """Compare two scalars by `lt`, `le`, `eq` or `ne`, which gives a bool expression."""
    x, y = _pair(a, b)
    if isinstance(x, Const) and isinstance(y, Const):
        return const(_COMPARE[name](x.value, y.value))
    # NaN does not equal itself, so floats are not decided here.
    if x is y and x.dtype.is_int:
        return const(name in ("le", "eq"))
    return op(name, (x, y), bool_)


lt, le, eq, ne = (partial(compare, name) for name in ("lt", "le", "eq", "ne"))


def gt(a: ExprLike, b: ExprLike) -> Expr:
    return compare("lt", b, a)


def ge(a: ExprLike, b: ExprLike) -> Expr:
    return compare("le", b, a)


TRUE = const(True)
FALSE = const(False)


def and_(*args: Expr) -> Expr:
    """Return the conjunction; `and_()` is true."""
    parts: list[Expr] = []
    for a in args:
        if a is FALSE:
            return FALSE
        if a is not TRUE and a not in parts:
            parts.append(a)
    if not parts:
        return TRUE
    result = parts[0]
    for a in parts[1:]:
        result = op("and", (result, a), bool_)
    return result


def or_(a: Expr, b: Expr) -> Expr:
    if a is TRUE or b is TRUE:
        return TRUE
    return b if a is FALSE else a if b is FALSE else op("or", (a, b), bool_)


def not_(a: Expr) -> Expr:
    return op("not", (a,), bool_) if a.value is None else const(not a.value)


def select(cond: Expr, a: ExprLike, b: ExprLike) -> Expr:
    """Choose `a` where `cond` holds, else `b`; both are evaluated."""
    x, y = _pair(a, b)
    if isinstance(cond, Const):
        return x if cond.value else y
    return x if x is y else op("select", (cond, x, y), x.dtype)


def cast(a: Expr, dtype: DType) -> Expr:
    if a.dtype is dtype or a.value is None:
        return a if a.dtype is dtype else op("cast", (a,), dtype)
    return const(a.value if dtype.is_float else converted(a.value, dtype).item(), dtype)


def bitcast(a: Expr, dtype: DType) -> Expr:
    """Read the bits of a number as another type of as many bits."""
    return a if a.dtype is dtype else op("bitcast", (a,), dtype)


def call(name: str, *args: Expr) -> Expr:
    """Apply a function of `MATH` or `BITS`, in the type of its first argument."""
    if name not in MATH and name not in BITS:
        raise ValueError(f"expected one of {sorted(MATH | BITS)}, got {name!r}")
    return op(name, args, args[0].dtype)


def apply(name: str, *args: Expr) -> Expr:
    """Apply a scalar operation through the constructor that folds it, if it has one."""
    constructor = _CONSTRUCTORS.get(name)
    return call(name, *args) if constructor is None else constructor(*args)


def conjuncts(e: Expr) -> tuple[Expr, ...]:
    """Return the parts of a conjunction, left to right; true has none."""
    parts: list[Expr] = []
    stack = [e]
    while stack:
        x = stack.pop()
        if x.op == "and":
            stack.extend(reversed(x.args))
        elif x is not TRUE:
            parts.append(x)
    return tuple(parts)


def rebuild(e: Expr, args: tuple[Expr, ...]) -> Expr:
    """Return `e` with other children, through the folding constructors."""
    if isinstance(e, Load):
        return load(e.buffer, args)
    if e.op in _CONSTRUCTORS:
        return _CONSTRUCTORS[e.op](*args)
    if e.op == "cast":
        return cast(args[0], e.dtype)
    return op(e.op, args, e.dtype) if e.op else e


# the operations whose constructors fold; others are built without folding
_CONSTRUCTORS: Mapping[str, Callable[..., Expr]] = {
    "add": add, "sub": sub, "mul": mul, "div": div, "floordiv": floordiv, "floormod": floormod,
    "min": minimum, "max": maximum, "lt": lt, "le": le, "eq": eq, "ne": ne,
    "and": and_, "or": or_, "not": not_, "select": select,
}  # fmt: skip


def postorder(roots: Iterable[Expr]) -> Iterator[Expr]:
    """Yield every distinct node under `roots`, children first, without recursion."""
    visited: set[Expr] = set()
    for root in roots:
        stack: list[Expr | None] = [root]
        while stack:
            node = stack.pop()
            if node is None:  # the children of the next one are done
                node = stack.pop()
            elif node in visited:
                continue
            elif children := node.children:
                stack += (node, None)
                stack += children[::-1]
                continue
            assert node is not None
            visited.add(node)
            yield node


def transform(e: Expr, leaf: Callable[[Expr], Expr | None]) -> Expr:
    """Rewrite bottom-up: replace each rebuilt node by `leaf(node)`, or keep it for None. Shared nodes are visited once."""
    if not e.children:  # fast path: most extents and bindings are leaves
        return e if (new := leaf(e)) is None else new
    done: dict[Expr, Expr] = {}
    for node in postorder((e,)):
        children = node.children
        new = node
        if children:
            args = tuple(done[c] for c in children)
            if args != children:
                new = rebuild(node, args)
        replaced = leaf(new)
        done[node] = new if replaced is None else replaced
    return done[e]


def replaced(e: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """Replace the outermost nodes for which `change` gives an expression."""
    done: dict[Expr, Expr] = {}
    stack = [e]
    while stack:
        x = stack[-1]
        if x in done:
            stack.pop()
        elif (replacement := change(x)) is not None:
            done[x] = replacement
        # A stack instead of recursion, since sums of many terms are deeper than Python's limit.
        elif waiting := [c for c in x.children if c not in done]:
            stack.extend(waiting)
        else:
            done[x] = rebuild(x, tuple(done[c] for c in x.children)) if x.children else x
    return done[e]


def substitute(e: Expr, mapping: Mapping[Var, Expr]) -> Expr:
    """Replace variables simultaneously."""
    # The leaves are stored in the node, so an expression without these variables costs no walk.
    if mapping.keys().isdisjoint(leaves(e)):
        return e
    return transform(e, lambda n: mapping.get(n) if isinstance(n, Var) else None)


def leaves(*roots: Expr) -> tuple[Var | Load, ...]:
    """Return the distinct variables and buffer reads under `roots`, in the order of `postorder`."""
    distinct: dict[Var | Load, None] = {}
    for e in roots:
        if isinstance(e, (Op, Load)):
            distinct.update(dict.fromkeys(_inner(e) if e.inner is None else e.inner))
        if isinstance(e, (Var, Load)):
            distinct[e] = None
    return tuple(distinct)


def _inner(e: Op | Load) -> tuple[Var | Load, ...]:
    for n in postorder((e,)):
        if isinstance(n, (Op, Load)) and n.inner is None:
            n.inner = leaves(*n.children)
    return e.inner or ()


def free_vars(*roots: Expr) -> tuple[Var, ...]:
    """Return the distinct variables under `roots` in order of first appearance (tunables included)."""
    return tuple(n for n in leaves(*roots) if isinstance(n, Var))


def loads(*roots: Expr) -> tuple[Load, ...]:
    """Return the distinct buffer reads under `roots`, inner ones first."""
    return tuple(n for n in leaves(*roots) if isinstance(n, Load))
