"""Print tensor functions, statements and scalar expressions, and choose unique names.

Tests: `tests/ir/text/test_text.py`.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Union

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import ALL, DType, i64
from relax_tune.ir.core.expr import TRUE, Expr, Tunable, Var
from relax_tune.ir.core.expr_text import format_expr
from relax_tune.ir.core.function import Bound, PrimFunc
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.stmt import Block, BufferStore, For, IfThenElse, Seq, Stmt, unknown

_Identity = Union[Var, Buffer, GVar]

FORMAT_VERSION = 1

LOOP_KINDS = ("serial", "parallel", "vectorized", "unrolled", "group", "item")
RESERVED = frozenset(
    {*LOOP_KINDS, *(d.short for d in ALL), *keyword.kwlist, *keyword.softkwlist}
    | {"alloc", "tunable", "symbol", "module", "extern", "block", "init", "spatial", "reduce", "const", "shape", "op"}
    | {"Buffer", "Const", "Tensor", "Shape", "Prim", "Tuple", "Callable", "Object", "prim_func", "function", "dataflow"}
    | {"call_tir", "call_dps_library", "call", "call_host", "fn", "prim", "match_cast", "inf", "nan"}
)


class TensorPrinter:
    """Printer of the tensor level, for one text.

    Attributes:
        line_of: `id(node)` -> first line of the node (from 0, after the header).
    """

    def __init__(self, normalise: bool) -> None:
        self.normalise = normalise
        self.header: list[str] = []
        self.lines: list[str] = []
        self.line_of: dict[int, int] = {}
        self.depth = 0
        self.names: dict[_Identity, str] = {}
        self.used_names: set[str] = set(RESERVED)
        self.counts: dict[str, int] = {}
        self.implicit = False
        self.in_module = False

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
        return fresh(f"_{base}" if base[0].isdigit() else base, self.used_names)

    def declare(self, x: _Identity, prefix: str) -> str:
        name = self.unique(x.name, prefix)
        self.used_names.add(name)
        self.names[x] = name
        return name

    @contextmanager
    def scope(self) -> Iterator[None]:
        """On exit free the names declared inside, except names in the header."""
        names, used_names, headers = dict(self.names), set(self.used_names), len(self.header)
        yield
        new = {x: n for x, n in self.names.items() if x not in names and n in self._header_names(headers)}
        self.names = {**names, **new}
        self.used_names = used_names | set(new.values())

    def _header_names(self, since: int) -> set[str]:
        return {line.split(" = ", 1)[0] for line in self.header[since:]}

    def name(self, x: _Identity) -> str:
        """Return the name of `x`. An unbound `x` is declared in the header, or by its first annotation."""
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
        row = (
            ""
            if b.row_alignment is None
            else f", row_alignment=({self.expr(b.row_alignment[0])}, {b.row_alignment[1]})"
        )
        turned = f", swizzle={b.swizzle}" if b.swizzle else ""
        return f"{kind}({self.dims(b.shape)}, {b.dtype}{scope}{row}{turned})"

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
                marks = "".join(f", {key}={option(value)}" for key, value in s.marks.settings())
                self.emit(f"for {name} in {s.kind}({extent}{axis}{tail}{kind}{marks}):", s)
                self.nested(s.body)
        elif isinstance(s, Seq):
            parts = flattened(s)
            for child in parts:
                self.stmt(child)
            if not parts:
                self.emit("pass", s)
        elif isinstance(s, IfThenElse):
            self.emit(f"if {self.expr(s.cond)}:", s)
            self.nested(s.then)
            if s.orelse is not None:
                self.emit("else:")
                self.nested(s.orelse)
        elif isinstance(s, BufferStore):
            self.emit(f"{self.element(s.buffer, s.indices)} = {self.expr(s.value)}", s)
        elif isinstance(s, Block):
            self.block(s)
        else:
            raise unknown(s, "the printer")

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
        return format_expr(e, self.name)


def flattened(s: Seq) -> tuple[Stmt, ...]:
    """Return the statements of `s` and of its nested sequences, in order."""
    parts: list[Stmt] = []
    stack: list[Stmt] = [s]
    while stack:
        top = stack.pop()
        if isinstance(top, Seq):
            stack.extend(reversed(top.stmts))
        else:
            parts.append(top)
    return tuple(parts)


def is_identifier(name: str) -> bool:
    """Return whether the text form can print a name as it is."""
    return re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is not None


def quote(text: str) -> str:
    """Return a string literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def option(value: str | int | bool) -> str:
    """Return the text of a keyword argument's value."""
    return quote(value) if isinstance(value, str) else repr(value)
