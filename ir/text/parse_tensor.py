"""Parse tensor functions: scalar expressions, buffers, loops and blocks, from the syntax tree of Python.

Nothing is executed or folded: parsing gives back the printed tree. A plain number takes the dtype of the other operand, as in
`x * 2` for a float `x`.

Tests: `tests/ir/text/test_text.py`.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar, cast, get_args

from relax_tune.errors import ParseError
from relax_tune.ir.core.buffer import Buffer, Scope
from relax_tune.ir.core.dtype import ALL, DType, bool_, i64, u64
from relax_tune.ir.core.expr import TRUE, Expr, Tunable, Var, as_int, const, load, op
from relax_tune.ir.core.function import Param, PrimFunc
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.core.scalar_ops import ATOM, PYTHON_ARITHMETIC, PYTHON_COMPARISONS, SCALAR_OPS
from relax_tune.ir.core.stmt import (
    Block,
    BufferStore,
    For,
    IfThenElse,
    IterKind,
    IterVar,
    LoopKind,
    LoopMarks,
    Stmt,
    Tail,
    seq,
)
from relax_tune.ir.text.printer import show_lines

Named = Var | Buffer | GVar
T = TypeVar("T")

_DTYPES = {d.short: d for d in ALL}
_COMPARE: dict[type[ast.cmpop], tuple[str, bool]] = {node: (name, False) for node, name in PYTHON_COMPARISONS.items()} | {
    ast.Gt: ("lt", True), ast.GtE: ("le", True),
}  # fmt: skip
_JUNCTIONS: dict[type[ast.boolop], str] = {ast.And: "and", ast.Or: "or"}
_ARITY = {o.name: o.arity for o in SCALAR_OPS.values() if o.precedence == ATOM and o.kind != "cast"}


class TensorReader:
    """Parser of the tensor level: the text and the names in scope."""

    def __init__(self, text: str) -> None:
        self.lines = re.split(r"\r\n|\r|\n", text)  # exactly the line breaks that the parser of Python counts
        self.names: dict[str, Named] = {}
        self.implicit = False

    def error(self, node: ast.AST, message: str) -> ParseError:
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        before = self.lines[line - 1].encode()[:offset] if line <= len(self.lines) else b""
        return self.error_at(line, len(before.decode(errors="replace")), message)  # `ast` counts bytes

    def error_at(self, line: int, column: int, message: str) -> ParseError:
        shown = show_lines(self.lines, max(0, line - 1), column) if any(self.lines) else "      | (empty text)"
        return ParseError(f"line {line}, column {column + 1}: {message}\n{shown}")

    @contextmanager
    def scope(self) -> Iterator[None]:
        saved = dict(self.names)
        yield
        self.names = saved

    @contextmanager
    def declaring(self) -> Iterator[None]:
        """Allow unknown names in dims to declare symbols inside the context."""
        before, self.implicit = self.implicit, True
        yield
        self.implicit = before

    # small parts

    def call(self, node: ast.AST, names: Sequence[str]) -> tuple[str, list[ast.expr], dict[str, ast.expr]]:
        """Parse `name(args, key=value)` with a name from `names`."""
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in names:
                return name, list(node.args), self.keywords(node)
        raise self.error(node, f"expected {' or '.join(f'{w}(...)' for w in names)}")

    def keywords(self, node: ast.Call) -> dict[str, ast.expr]:
        values: dict[str, ast.expr] = {}
        for k in node.keywords:
            if k.arg is None or k.arg in values:
                raise self.error(k.value, "expected each option once, as name=value")
            values[k.arg] = k.value
        return values

    def only(self, options: dict[str, ast.expr], known: Sequence[str]) -> None:
        for name in options:
            if name not in known:
                raise self.error(options[name], f"unknown option {name!r}; known: {', '.join(known) or 'none'}")

    def constant(self, node: ast.AST, kind: type[T], what: str) -> T:
        """Parse a plain literal of one Python type (a bool is not an int)."""
        value = node.value if isinstance(node, ast.Constant) else None
        if type(value) is not kind:
            raise self.error(node, f"expected {what}")
        return value

    def integer(self, node: ast.AST, what: str) -> int:
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self.constant(inner, int, what)
        return self.constant(node, int, what)

    def choice(self, node: ast.AST, options: Sequence[str], what: str) -> str:
        value = self.constant(node, str, f"{what}, one of {', '.join(options)}")
        if value not in options:
            raise self.error(node, f"expected {what}, one of {', '.join(options)}; got {value!r}")
        return value

    def dtype(self, node: ast.AST) -> DType:
        dtype = _DTYPES.get(name_of(node) or "")
        if dtype is None:
            raise self.error(node, f"expected an element type, one of {', '.join(_DTYPES)}")
        return dtype

    def items(self, node: ast.AST, what: str) -> list[ast.expr]:
        if isinstance(node, (ast.Tuple, ast.List)):
            return node.elts
        raise self.error(node, f"expected {what}")

    def one_name(self, node: ast.AST, what: str) -> str:
        name = name_of(node)
        if name is None:
            raise self.error(node, f"expected a plain name for {what}")
        return name

    def assignments(self, body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
        """Remove the leading lines `name = value` from a body."""
        while body:
            match body[0]:
                case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                    body.pop(0)
                    yield name, value
                case _:
                    return

    # scalar expressions

    def expr(self, node: ast.expr) -> Expr:
        """Parse one expression. A loop follows chains of operators, so their length has no limit."""
        spine: list[ast.BinOp] = []
        while isinstance(node, ast.BinOp):
            spine.append(node)
            node = node.left
        result = self._term(node)
        plain = plain_number(node) is not None
        for binary in reversed(spine):
            name = PYTHON_ARITHMETIC.get(type(binary.op))
            if name is None:
                raise self.error(binary.right, "expected one of + - * / // % between scalars")
            a, b = self._alike((result, plain), self._operand(binary.right))
            result, plain = op(name, (a, b), a.dtype), False
        return result

    def _operand(self, node: ast.expr) -> tuple[Expr, bool]:
        """Parse an operand; return it and whether it is a plain number."""
        return self.expr(node), plain_number(node) is not None

    def _alike(self, *operands: tuple[Expr, bool]) -> list[Expr]:
        """Give plain numbers the dtype of the first operand that is none; of an integer and a float, both become floats."""
        dtype = next((e.dtype for e, plain in operands if not plain), None)
        if dtype is None:
            dtype = next((e.dtype for e, _ in operands if e.dtype.is_float), None)
        exprs: list[Expr] = []
        for e, plain in operands:
            fits = dtype is not None and (dtype.is_float or (dtype.is_int and e.dtype.is_int))
            value = e.value if plain and fits and e.dtype is not bool_ else None
            exprs.append(e if value is None else const(value, dtype))
        return exprs

    def _term(self, node: ast.expr) -> Expr:
        number = plain_number(node)
        if number is not None:
            return self._number(node, number)
        match node:
            case ast.Constant(value=value):
                return self._number(node, value)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return op("not", (self.expr(operand),), bool_)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.expr(operand)
                return op("mul", (inner, const(-1, inner.dtype)), inner.dtype)
            case ast.Name():
                return self.variable(node)
            case ast.BoolOp(op=junction, values=[first, *others]):
                result = self.expr(first)
                for other in others:
                    result = op(_JUNCTIONS[type(junction)], (result, self.expr(other)), bool_)
                return result
            case ast.Compare():
                return self._comparison(node)
            case ast.Subscript(value=read, slice=where):
                return load(self.buffer(read), self.indices(where, self.buffer(read)))
            case ast.Call(func=ast.Name(id=name)):
                return self._function(node, name)
        raise self.error(node, "expected a scalar expression")

    def _number(self, node: ast.AST, value: object) -> Expr:
        match value:
            case int() if -(2**63) <= value < 2**63:
                return const(value)
            case float() if math.isfinite(value):
                return const(value)
        raise self.error(
            node, "expected a 64-bit integer, a finite float, True or False; infinities are const('inf', f32)"
        )

    def variable(self, node: ast.Name) -> Expr:
        value = self.names.get(node.id)
        if isinstance(value, Var):
            return value
        if value is None and self.implicit and node.id not in _DTYPES:
            symbol = self.names[node.id] = Var(node.id)
            return symbol
        if value is None:
            raise self.error(
                node, f"nothing is called {node.id!r} here; symbols come from parameter shapes or symbol(...)"
            )
        raise self.error(node, f"expected a scalar, got the {type(value).__name__.lower()} {node.id}")

    def _comparison(self, node: ast.Compare) -> Expr:
        if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARE:
            raise self.error(
                node, "expected one comparison of two scalars (<, <=, >, >=, ==, !=); join several with `and`"
            )
        name, swapped = _COMPARE[type(node.ops[0])]
        a, b = self._alike(self._operand(node.left), self._operand(node.comparators[0]))
        return op(name, (b, a) if swapped else (a, b), bool_)

    def _function(self, node: ast.Call, name: str) -> Expr:
        if node.keywords:
            raise self.error(node, f"{name}(...) takes no options")
        args = node.args
        if name in ("cast", "bitcast", "const") and len(args) == 2:
            dtype = self.dtype(args[1])
            return self.typed_literal(args[0], dtype) if name == "const" else op(name, (self.expr(args[0]),), dtype)
        if name not in _ARITY:
            known = ", ".join(sorted([*_ARITY, "cast", "bitcast", "const"]))
            raise self.error(node, f"unknown function {name!r} with {len(args)} arguments; known: {known}")
        if len(args) != _ARITY[name]:
            raise self.error(node, f"{name} takes {_ARITY[name]} arguments, got {len(args)}")
        pairs = [self._operand(a) for a in args]
        if name == "select":
            a, b = self._alike(*pairs[1:])
            return op(name, (pairs[0][0], a, b), a.dtype)
        operands = self._alike(*pairs)
        return op(name, tuple(operands), operands[0].dtype)

    def typed_literal(self, node: ast.expr, dtype: DType) -> Expr:
        """Parse `const(value, dtype)`; infinities and nan are strings."""
        if isinstance(node, ast.Constant) and node.value in ("inf", "-inf", "nan") and dtype.is_float:
            return const(float(node.value), dtype)
        number = plain_number(node)
        if dtype is u64 and isinstance(number, int) and 2**63 <= number < 2**64:
            return const(number, u64)
        plain = number is not None or isinstance(node, ast.Constant)
        value = self._term(node).value if plain else None
        if value is None or (isinstance(value, float) and not dtype.is_float):
            raise self.error(node, f"expected a literal of type {dtype}")
        return const(value, dtype)

    # buffers

    def buffer(self, node: ast.expr) -> Buffer:
        value = self.names.get(self.one_name(node, "a buffer"))
        if isinstance(value, Buffer):
            return value
        raise self.error(node, f"nothing is called {ast.unparse(node)!r} here, expected a buffer")

    def indices(self, node: ast.expr, buffer: Buffer) -> tuple[Expr, ...]:
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        if len(parts) != len(buffer.shape):
            raise self.error(node, f"buffer {buffer.name} has {len(buffer.shape)} dims, got {len(parts)} indices")
        return tuple(self.expr(p) for p in parts)

    def dims(self, node: ast.expr) -> tuple[Expr, ...]:
        return tuple(self.expr(d) for d in self.items(node, "a tuple of dims"))

    def new_buffer(self, name: str, node: ast.expr, kinds: Sequence[str]) -> tuple[str, Buffer]:
        """Parse `Buffer((n, 4), f32, scope="global")` or another kind; return the kind and the buffer."""
        kind, args, options = self.call(node, kinds)
        if len(args) != 2:
            raise self.error(node, f"expected {kind}(dims, dtype), got {len(args)} arguments")
        self.only(options, ("scope", "row_alignment", "swizzle"))
        scope = self.choice(options["scope"], get_args(Scope), "a scope") if "scope" in options else "global"
        row = self.row(options["row_alignment"]) if "row_alignment" in options else None
        turned = self.integer(options["swizzle"], "elements of a vector") if "swizzle" in options else 0
        return kind, Buffer(name, self.dims(args[0]), self.dtype(args[1]), cast(Scope, scope), row, turned)

    def row(self, node: ast.expr) -> tuple[Expr, int]:
        """Parse `(factor, offset)`."""
        parts = self.dims(node)
        offset = as_int(parts[1]) if len(parts) == 2 else None
        if offset is None:
            raise self.error(node, "expected a row as (factor, offset) with a number as offset, such as (32, 1)")
        return parts[0], offset

    # functions and statements

    def prim_func(self, node: ast.FunctionDef, name: str, outputs: int) -> PrimFunc:
        with self.scope():
            annotated = [(a, a.annotation) for a in node.args.args]
            for arg, annotation in annotated:
                if annotation is not None and name_of(annotation):
                    known = self.names.get(arg.arg)
                    dtype = self.dtype(annotation)
                    self.names[arg.arg] = known if isinstance(known, Var) else Var(arg.arg, dtype)
            params: list[Param] = []
            consts: list[Buffer] = []
            for arg, annotation in annotated:
                if annotation is None:
                    raise self.error(
                        arg, f"parameter {arg.arg}: expected an annotation such as Buffer((n, 4), f32) or i64"
                    )
                if name_of(annotation):
                    params.append(cast(Var, self.names[arg.arg]))
                    continue
                with self.declaring():
                    kind, buffer = self.new_buffer(arg.arg, annotation, ("Buffer", "Const"))
                self.names[arg.arg] = buffer
                params.append(buffer)
                if kind == "Const":
                    consts.append(buffer)
            if not 0 <= outputs <= sum(isinstance(p, Buffer) for p in params):
                raise self.error(node, f"outputs={outputs}, but there are {len(params)} parameters")
            allocs: list[Buffer] = []
            body = list(node.body)
            for target, value in self.assignments(body):
                allocs.append(self.new_buffer(target, value, ("alloc",))[1])
                self.names[target] = allocs[-1]
            return PrimFunc(name, tuple(params), outputs, self.body(body), tuple(allocs), tuple(consts))

    def body(self, nodes: Sequence[ast.stmt]) -> Stmt:
        return seq(*(self.stmt(n) for n in nodes if not isinstance(n, ast.Pass)))

    def stmt(self, node: ast.stmt) -> Stmt:
        match node:
            case ast.For(orelse=[]):
                return self._for(node)
            case ast.If(test=test, body=body, orelse=orelse):
                return IfThenElse(self.expr(test), self.body(body), self.body(orelse) if orelse else None)
            case ast.With(items=[ast.withitem(context_expr=header)]):
                return self._block(node, header)
            case ast.Assign():
                return self.store(node)
        raise self.error(node, "expected a loop, a block, an if or a store")

    def store(self, node: ast.stmt) -> BufferStore:
        match node:
            case ast.Assign(targets=[ast.Subscript(value=target, slice=where)], value=written):
                buffer = self.buffer(target)
                value, plain = self._operand(written)
                if plain:
                    value = self._alike((op("cast", (value,), buffer.dtype), False), (value, True))[1]
                return BufferStore(buffer, self.indices(where, buffer), value)
        raise self.error(node, "expected a store such as C[i, j] = value; alloc(...) goes to the top of the function")

    def _for(self, node: ast.For) -> Stmt:
        name = self.one_name(node.target, "a loop variable")
        kind, args, options = self.call(node.iter, get_args(LoopKind))
        marks = [f for f in fields(LoopMarks) if f.name in options]
        self.only(options, ("axis", "tail", "dtype", *(f.name for f in fields(LoopMarks))))
        if len(args) != 1:
            raise self.error(node.iter, f"expected {kind}(extent), got {len(args)} arguments")
        extent = self.expr(args[0])
        axis = self.integer(options["axis"], "an axis number") if "axis" in options else 0
        tail = self.choice(options["tail"], get_args(Tail), "a tail mode") if "tail" in options else "predicate"
        marks_given = {f.name: self.mark(options[f.name], f.default) for f in marks}
        var = Var(name, self.dtype(options["dtype"]) if "dtype" in options else i64)
        with self.scope():
            self.names[name] = var
            body = self.body(node.body)
            return For(var, extent, body, cast(LoopKind, kind), axis, cast(Tail, tail), LoopMarks(**marks_given))

    def mark(self, node: ast.expr, default: object) -> Any:
        """Parse a loop mark of the type of its default."""
        if isinstance(default, bool):
            return self.constant(node, bool, "True or False")
        return (
            self.integer(node, "a number") if isinstance(default, int) else self.constant(node, str, "a name in quotes")
        )

    def _block(self, node: ast.With, header: ast.expr) -> Block:
        _, args, options = self.call(header, ("block",))
        self.only(options, ("where", "role"))
        if len(args) != 1:
            raise self.error(header, 'expected block("name")')
        name = self.constant(args[0], str, "the block's name in quotes")
        predicate = self.expr(options["where"]) if "where" in options else TRUE
        prepack = "role" in options and self.choice(options["role"], ("compute", "prepack"), "a role") == "prepack"
        body = list(node.body)
        iters: list[IterVar] = []
        bindings: list[Expr] = []
        for iterator, value in self.assignments(body):
            kind, parts, more = self.call(value, get_args(IterKind))
            self.only(more, ("dtype",))
            if len(parts) != 2:
                raise self.error(value, f"expected {kind}(extent, value)")
            var = Var(iterator, self.dtype(more["dtype"]) if "dtype" in more else i64)
            iters.append(IterVar(var, self.expr(parts[0]), cast(IterKind, kind)))
            bindings.append(self.expr(parts[1]))
        with self.scope():
            self.names.update((i.var.name, i.var) for i in iters)
            init: BufferStore | None = None
            match body:
                case [ast.With(items=[ast.withitem(context_expr=start), *_], body=stores) as first, *body]:
                    self.call(start, ("init",))
                    if len(stores) != 1:
                        raise self.error(first, "expected one store inside init()")
                    init = self.store(stores[0])
            if len(body) != 1:
                raise self.error(node, f"expected one store in block {name!r}, got {len(body)} statements")
            update = self.store(body[0])
        return Block(name, tuple(iters), tuple(bindings), update, init, predicate, "prepack" if prepack else "compute")

    # declarations outside functions

    def declaration(self, node: ast.Assign) -> tuple[int, int | None] | None:
        """Parse `n = symbol("n", lower=1)`, `T = tunable([1, 2])` or `B = alloc(...)`; return the bounds of a symbol."""
        name = self.one_name(node.targets[0], "a symbol, tunable or buffer")
        kind, args, options = self.call(node.value, ("symbol", "tunable", "alloc"))
        if kind == "alloc":
            self.names[name] = self.new_buffer(name, node.value, ("alloc",))[1]
            return None
        if len(args) != 1:
            raise self.error(node.value, f"expected one argument for {kind}")
        if kind == "tunable":
            domain = [self.integer(i, "a positive integer") for i in self.items(args[0], "a list of positive integers")]
            self.names[name] = Tunable(name, domain)
            return None
        self.only(options, ("lower", "upper", "dtype"))
        dtype = self.dtype(options["dtype"]) if "dtype" in options else i64
        self.names[name] = Var(self.constant(args[0], str, "the symbol's name in quotes"), dtype)
        if "lower" not in options and "upper" not in options:
            return None
        lower = self.integer(options["lower"], "an integer bound") if "lower" in options else 0
        return lower, self.integer(options["upper"], "an integer bound") if "upper" in options else None


def name_of(node: ast.AST) -> str | None:
    """Return the text of a plain name, None for any other syntax."""
    return node.id if isinstance(node, ast.Name) else None


def plain_number(node: ast.expr) -> int | float | None:
    """Return a plain number (`3`, `0.5`, `-1`, but not True), None for any other syntax."""
    sign = 1
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            sign, node = -1, inner
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return sign * value
    return None
