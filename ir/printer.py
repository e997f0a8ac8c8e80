"""The text form of programs: Python syntax, deterministic, and read back by `relax_tune.ir.parser`.

Names are hints, so the printer makes them identifiers that are unique in their scope (`i`, `i_1`, ...). With `normalise`
every identity is renamed by order of appearance instead and names of blocks and of the function are dropped: that text is
what a workload is known by. A change of this form must raise `FORMAT_VERSION`.
"""

from __future__ import annotations

import json
import keyword
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Union

from relax_tune.ir.buffer import Buffer
from relax_tune.ir.dtype import ALL, DType, bool_, f32, i64
from relax_tune.ir.expr import INFIX, PRECEDENCE, TRUE, Const, Expr, Load, Op, Tunable, Var, postorder
from relax_tune.ir.function import Bound, ExternFunc, IRModule, PrimFunc
from relax_tune.ir.graph import (
    AnyBinding,
    Call,
    CallDPSLibrary,
    CallTIR,
    Constant,
    Function,
    GVar,
    MatchCast,
    Operator,
    ShapeValue,
    TupleItem,
    TupleValue,
    Value,
)  # fmt: skip
from relax_tune.ir.stmt import Block, For, If, Seq, Stmt, Store
from relax_tune.ir.struct_info import CallableInfo, ObjectInfo, PrimInfo, ShapeInfo, StructInfo, TensorInfo, TupleInfo

FORMAT_VERSION = 1

Printable = Union[IRModule, PrimFunc, Function, ExternFunc, Stmt, Expr, StructInfo]
_Identity = Union[Var, Buffer, GVar]

LOOP_KINDS = ("serial", "parallel", "vectorized", "unrolled", "group", "item")
RESERVED = frozenset(
    {*LOOP_KINDS, *(d.short for d in ALL), *keyword.kwlist, *keyword.softkwlist}
    | {"alloc", "tunable", "symbol", "module", "extern", "block", "init", "spatial", "reduce", "const", "shape", "op"}
    | {"Buffer", "Const", "Tensor", "Shape", "Prim", "Tuple", "Callable", "Object", "prim_func", "function", "dataflow"}
    | {"call_tir", "call_dps_library", "match_cast", "inf", "nan"}
)


def print_text(x: Printable, *, normalise: bool = False) -> str:
    """`x` as text that ends without a newline. `normalise`: rename every identity by order of appearance."""
    return Printer(normalise).run(x)


def excerpt(x: Printable, node: object, context: int = 1) -> str:
    """The printed lines around `node` (a statement, binding, buffer or parameter of `x`) with a caret under its line; the
    first line when `node` is not part of `x`."""
    printer = Printer(False)
    lines = printer.run(x).splitlines()
    at = printer.line_of.get(id(node), -len(printer.header)) + len(printer.header)
    return show_lines(lines, at, context=context)


def show_lines(lines: Sequence[str], at: int, column: int | None = None, context: int = 1) -> str:
    """Lines `at - context ..= at` (from 0) numbered from 1, a caret under `column` or under the whole text of line `at`."""
    shown = [f"{i + 1:5} | {lines[i]}" for i in range(max(0, at - context), min(at + 1, len(lines)))]
    text = lines[at] if at < len(lines) else ""
    start = len(text) - len(text.lstrip()) if column is None else column
    carets = "^" * max(1, len(text.rstrip()) - start) if column is None else "^"
    return "\n".join([*shown, f"      | {' ' * start}{carets}"])


class Printer:
    """One printing of one thing. `line_of` maps `id(node)` to the line (from 0, after the header) where it starts."""

    def __init__(self, normalise: bool) -> None:
        self.normalise = normalise
        self.header: list[str] = []
        self.lines: list[str] = []
        self.line_of: dict[int, int] = {}
        self.depth = 0
        self.names: dict[_Identity, str] = {}
        self.taken: set[str] = set(RESERVED)
        self.counts: dict[str, int] = {}
        self.implicit = False
        self.in_module = False

    def run(self, x: Printable) -> str:
        if isinstance(x, IRModule):
            self.module(x)
        elif isinstance(x, PrimFunc):
            self.prim(x, x.name)
        elif isinstance(x, Function):
            self.function(x, x.name)
        elif isinstance(x, ExternFunc):
            self.extern(x, x.name)
        elif isinstance(x, Expr):
            self.emit(self.expr(x))
        elif isinstance(x, (For, Seq, If, Store, Block)):
            self.stmt(x)
        else:
            self.emit(self.info(x))
        if self.header and self.lines[:1] != [""]:
            self.header.append("")
        return "\n".join(self.header + self.lines)

    def emit(self, text: str, node: object = None) -> None:
        if node is not None:
            self.line_of.setdefault(id(node), len(self.lines))
        self.lines.append("    " * self.depth + text if text else "")

    # names

    def unique(self, hint: str, prefix: str) -> str:
        if self.normalise:
            self.counts[prefix] = self.counts.get(prefix, -1) + 1
            return f"{prefix}{self.counts[prefix]}"
        base = re.sub(r"\W", "_", hint, flags=re.ASCII) or prefix
        base = base if not base[0].isdigit() else f"_{base}"
        name, i = base, 0
        while name in self.taken:
            i += 1
            name = f"{base}_{i}"
        return name

    def declare(self, x: _Identity, prefix: str) -> str:
        name = self.unique(x.name, prefix)
        self.taken.add(name)
        self.names[x] = name
        return name

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Names declared inside are free again afterwards, except those that went into the header."""
        names, taken, headers = dict(self.names), set(self.taken), len(self.header)
        yield
        new = {x: n for x, n in self.names.items() if x not in names and n in self._header_names(headers)}
        self.names = {**names, **new}
        self.taken = taken | set(new.values())

    def _header_names(self, since: int) -> set[str]:
        return {line.split(" = ", 1)[0] for line in self.header[since:]}

    def name(self, x: _Identity) -> str:
        """The name of `x`; what nothing in the text binds is declared in the header (or by its first annotation)."""
        if x in self.names:
            return self.names[x]
        if isinstance(x, Tunable):
            name = self.declare(x, "t")
            self.header.append(f"{name} = tunable([{', '.join(map(str, x.domain))}])")
        elif isinstance(x, Var):
            name = self.declare(x, "s")
            if not self.implicit or x.dtype is not i64:
                self.header.append(self.symbol(name, x.dtype))
        elif isinstance(x, Buffer):
            name = self.declare(x, "b")
            self.header.append(f"{name} = {self.buffer_call('alloc', x)}")
        else:
            name = self.declare(x, "g")
        return name

    def symbol(self, name: str, dtype: DType, bound: Bound | None = None) -> str:
        parts = [quote(name)]
        if bound is not None:
            parts += [f"lower={bound.lower}", *([] if bound.upper is None else [f"upper={bound.upper}"])]
        if dtype is not i64:
            parts.append(f"dtype={dtype}")
        return f"{name} = symbol({', '.join(parts)})"

    # modules

    def module(self, m: IRModule) -> None:
        self.in_module = True
        self.header.append(f"module(version={FORMAT_VERSION})")
        for bound in m.bounds:
            known = bound.var in self.names
            name = self.names[bound.var] if known else self.declare(bound.var, "s")
            self.header.append(self.symbol(name, bound.var.dtype, bound))
        for key, f in m.functions.items():
            self.emit("")
            with self.scope():
                if isinstance(f, PrimFunc):
                    self.prim(f, key)
                elif isinstance(f, Function):
                    self.function(f, key)
                else:
                    self.extern(f, key)

    def extern(self, f: ExternFunc, key: str) -> None:
        signature = "" if f.signature is None else f", {self.annotation(f.signature)}"
        alias = "" if key == f.name else f", key={quote(key)}"
        self.emit(f"extern({quote(f.name)}{signature}{alias})", f)

    def _def(self, decorator: str, options: list[str], key: str, params: list[str], ret: str) -> None:
        plain = "main" if self.normalise and not self.in_module else re.sub(r"\W", "_", key, flags=re.ASCII)
        if not plain.isidentifier() or keyword.iskeyword(plain):
            plain = f"_{plain}"
        if plain != key and (self.in_module or not self.normalise):
            options = [*options, f"name={quote(key)}"]
        arguments = f"({', '.join(options)})" if options else ""
        self.emit(f"@{decorator}{arguments}")
        self.emit(f"def {plain}({', '.join(params)}){ret}:")

    # tensor functions

    def prim(self, f: PrimFunc, key: str) -> None:
        with self.scope():
            self.implicit = True
            params: list[str] = []
            for p in f.params:
                if isinstance(p, Buffer):
                    name = self.declare(p, "b")
                    params.append(f"{name}: {self.buffer_call('Const' if p in f.consts else 'Buffer', p)}")
                else:
                    name = self.names[p] if p in self.names else self.declare(p, "s")
                    params.append(f"{name}: {p.dtype}")
                self.line_of[id(p)] = len(self.lines) + 1
            self.implicit = False
            self._def("prim_func", [f"outputs={f.outputs}"], key, params, "")
            self.depth += 1
            for b in f.allocs:
                shape = self.buffer_call("alloc", b)
                self.emit(f"{self.declare(b, 'b')} = {shape}", b)
            self.stmt(f.body)
            self.depth -= 1

    def buffer_call(self, kind: str, b: Buffer) -> str:
        scope = f", scope={quote(b.scope)}" if kind == "alloc" or b.scope != "global" else ""
        return f"{kind}({self.dims(b.shape)}, {b.dtype}{scope})"

    def dims(self, dims: Sequence[Expr]) -> str:
        return f"({', '.join(map(self.expr, dims))}{',' if len(dims) == 1 else ''})"

    def stmt(self, s: Stmt) -> None:
        if isinstance(s, For):
            extent = self.expr(s.extent)
            with self.scope():
                name = self.declare(s.var, "l")
                axis = f", axis={s.axis}" if s.axis or s.kind in ("group", "item") else ""
                tail = f", tail={quote(s.tail)}" if s.tail != "predicate" else ""
                kind = "" if s.var.dtype is i64 else f", dtype={s.var.dtype}"
                self.emit(f"for {name} in {s.kind}({extent}{axis}{tail}{kind}):", s)
                self.nested(s.body)
        elif isinstance(s, Seq):
            parts = flattened(s)
            for child in parts:
                self.stmt(child)
            if not parts:
                self.emit("pass", s)
        elif isinstance(s, If):
            self.emit(f"if {self.expr(s.cond)}:", s)
            self.nested(s.then)
            if s.orelse is not None:
                self.emit("else:")
                self.nested(s.orelse)
        elif isinstance(s, Store):
            self.emit(f"{self.element(s.buffer, s.indices)} = {self.expr(s.value)}", s)
        else:
            self.block(s)

    def nested(self, s: Stmt) -> None:
        self.depth += 1
        self.stmt(s)
        self.depth -= 1

    def block(self, b: Block) -> None:
        name = self.unique(b.name, "B") if self.normalise else b.name
        where = "" if b.predicate is TRUE else f", where={self.expr(b.predicate)}"
        role = "" if b.role == "compute" else f", role={quote(b.role)}"
        self.emit(f"with block({quote(name)}{where}{role}):", b)
        self.depth += 1
        # a missing binding shows as `...`, so that the verifier can point at it
        values = [*map(self.expr, b.bindings), *["..."] * (len(b.iters) - len(b.bindings))]
        bound = [(i.kind, self.expr(i.extent), value) for i, value in zip(b.iters, values)]
        with self.scope():
            parts: list[str] = []
            for it, (kind, extent, value) in zip(b.iters, bound, strict=True):
                dtype = "" if it.var.dtype is i64 else f", dtype={it.var.dtype}"
                parts.append(f"{self.declare(it.var, 'v')} = {kind}({extent}, {value}{dtype})")
            if parts:
                self.emit("; ".join(parts))
            if b.init is not None:
                self.emit("with init():", b.init)
                self.nested(b.init)
            self.stmt(b.body)
        self.depth -= 1

    # scalar expressions

    def element(self, b: Buffer, indices: Sequence[Expr]) -> str:
        return f"{self.name(b)}[{', '.join(map(self.expr, indices)) or '()'}]"

    def expr(self, e: Expr) -> str:
        done: dict[Expr, tuple[str, int]] = {}
        for n in postorder((e,)):
            done[n] = self._node(n, done)
        return done[e][0]

    def _node(self, n: Expr, done: dict[Expr, tuple[str, int]]) -> tuple[str, int]:
        """The text of a node and how tightly it binds (9: an atom)."""
        if isinstance(n, Const):
            return literal(n)
        if isinstance(n, Var):
            return self.name(n), 9
        if isinstance(n, Load):
            return f"{self.name(n.buffer)}[{', '.join(done[i][0] for i in n.indices) or '()'}]", 9
        assert isinstance(n, Op)
        if n.op in INFIX:
            level = PRECEDENCE[n.op]
            (left, tight), (right, tight_right) = (done[a] for a in n.args)
            lhs = left if tight >= level + (level == 4) else f"({left})"
            rhs = right if tight_right > level else f"({right})"
            return f"{lhs} {INFIX[n.op]} {rhs}", level
        if n.op == "not":
            text, tight = done[n.args[0]]
            return f"not {text if tight > 3 else f'({text})'}", 3
        args = ", ".join(done[a][0] for a in n.args)
        return (f"cast({args}, {n.dtype})" if n.op == "cast" else f"{n.op}({args})"), 9

    # graph functions

    def function(self, f: Function, key: str) -> None:
        with self.scope():
            params: list[str] = []
            for p in f.params:
                info = self.annotation(p.info)
                params.append(f"{self.declare(p, 'g')}: {info}")
                self.line_of[id(p)] = len(self.lines) + 1
            # the result may speak of symbols that only a match_cast in the body binds: printed last, put where it belongs
            at = len(self.lines)
            self.depth += 1
            for block in f.blocks:
                self.emit("with dataflow():", block)
                self.depth += 1
                for binding in block.bindings:
                    self.binding(binding)
                if not block.bindings:
                    self.emit("pass")
                self.depth -= 1
            self.emit(f"return {self.value(f.ret)}", f.ret)
            self.depth -= 1
            body, self.lines = self.lines[at:], self.lines[:at]
            self._def("function", [], key, params, f" -> {self.annotation(f.ret_info)}")
            shift = len(self.lines) - at
            self.line_of = {k: v + shift if at <= v and self._in_body(f, k) else v for k, v in self.line_of.items()}
            self.lines += body

    @staticmethod
    def _in_body(f: Function, key: int) -> bool:
        return key not in {id(p) for p in f.params}

    def binding(self, b: AnyBinding) -> None:
        info = self.annotation(b.var.info)
        value = self.value(b.value)
        if isinstance(b, MatchCast):
            value = f"match_cast({value}, {self.annotation(b.info)})"
        self.emit(f"{self.declare(b.var, 'g')}: {info} = {value}", b)

    def value(self, v: Value) -> str:
        if isinstance(v, GVar):
            return self.name(v)
        if isinstance(v, Constant):
            return f"const({quote(v.name)}, {self.info(v.info)})"
        if isinstance(v, ShapeValue):
            return f"shape({', '.join(map(self.expr, v.values))})"
        if isinstance(v, TupleValue):
            return self.tuple([self.value(x) for x in v.fields])
        if isinstance(v, TupleItem):
            return f"{self.value(v.value)}[{v.index}]"
        if isinstance(v, Call):
            attributes = [f"{f.name}={self.attribute(getattr(v.op, f.name))}" for f in fields(v.op)]
            return f"op.{operator_name(v.op)}({', '.join([*map(self.value, v.args), *attributes])})"
        return self.call(v)

    def call(self, v: CallTIR | CallDPSLibrary) -> str:
        kind, callee = ("call_tir", v.callee) if isinstance(v, CallTIR) else ("call_dps_library", v.routine)
        infos = [self.annotation(o) for o in v.out]
        out = infos[0] if len(infos) == 1 else self.tuple(infos)
        scalars = f", scalars=[{', '.join(map(self.expr, v.scalars))}]" if v.scalars else ""
        return f"{kind}({quote(callee)}, {self.tuple([self.value(a) for a in v.args])}, out={out}{scalars})"

    @staticmethod
    def tuple(parts: Sequence[str]) -> str:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"

    def attribute(self, x: object) -> str:
        """An operator's attribute. A non-empty tuple of expressions prints as a list, a literal expression in full, so that
        expressions are never taken for plain numbers."""
        if isinstance(x, Const):
            return f"const({x.value!r}, {x.dtype})"
        if isinstance(x, Expr):
            return self.expr(x)
        if isinstance(x, DType):
            return x.short
        if isinstance(x, tuple) and x and all(isinstance(i, Expr) for i in x):
            return f"[{', '.join(map(self.expr, x))}]"
        if isinstance(x, tuple):
            return self.tuple([self.attribute(i) for i in x])
        if isinstance(x, float) and not math.isfinite(x):
            return {math.inf: "inf", -math.inf: "-inf"}.get(x, "nan")
        if isinstance(x, str):
            return quote(x)
        if x is None or isinstance(x, (bool, int, float)):
            return repr(x)
        raise TypeError(f"wanted an operator attribute of plain values, expressions or tuples of them; found {x!r}")

    def annotation(self, info: StructInfo) -> str:
        """An annotation whose unknown symbols it declares by naming them."""
        before, self.implicit = self.implicit, True
        text = self.info(info)
        self.implicit = before
        return text

    def info(self, info: StructInfo) -> str:
        if isinstance(info, TensorInfo):
            if info.shape is not None:
                return f"Tensor({self.dims(info.shape)}, {info.dtype})"
            return f"Tensor(None, {info.dtype}{'' if info.ndim is None else f', ndim={info.ndim}'})"
        if isinstance(info, ShapeInfo):
            if info.values is not None:
                return f"Shape([{', '.join(map(self.expr, info.values))}])"
            return f"Shape(None{'' if info.ndim is None else f', ndim={info.ndim}'})"
        if isinstance(info, PrimInfo):
            return f"Prim({info.dtype}{'' if info.value is None else f', {self.expr(info.value)}'})"
        if isinstance(info, TupleInfo):
            return f"Tuple({', '.join(map(self.info, info.fields))})"
        if isinstance(info, CallableInfo):
            params = "None" if info.params is None else self.tuple([self.info(p) for p in info.params])
            return f"Callable({params}, {self.info(info.ret)})"
        assert isinstance(info, ObjectInfo)
        return "Object()"


def flattened(s: Seq) -> tuple[Stmt, ...]:
    """The statements of `s` and of the sequences in it, in order; how they nest means nothing."""
    parts: list[Stmt] = []
    stack: list[Stmt] = [s]
    while stack:
        top = stack.pop()
        if isinstance(top, Seq):
            stack.extend(reversed(top.stmts))
        else:
            parts.append(top)
    return tuple(parts)


def operator_name(op: Operator) -> str:
    """The name an operator's class sets."""
    name: str = getattr(op, "name")  # noqa: B009 - the base class declares no attributes
    return name


def quote(text: str) -> str:
    """A string literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def literal(n: Const) -> tuple[str, int]:
    """A literal's text and how tightly it binds; the plain forms are int64, float32 and bool."""
    if not math.isfinite(n.value):
        return f'const("{n.value}", {n.dtype})', 9
    if n.dtype in (i64, bool_, f32):
        text = repr(n.value)
        return text, 8 if text.startswith("-") else 9
    return f"const({n.value!r}, {n.dtype})", 9
