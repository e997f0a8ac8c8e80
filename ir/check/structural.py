"""Structural (alpha) equality and hashing of programs, and the key of a workload.

A program is encoded as a flat stream of tokens. Binders and identities (variables, buffers, graph variables) are numbered by order
of appearance. Two programs are equal if their streams are equal; the hash is the hash of the stream. Names of variables, blocks and
functions are hints and ignored. Names that refer to something else (a callee, a weight, a library routine, the key of a function
in its module) are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Union

import numpy as np

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, is_floating
from relax_tune.ir.core.expr import Const, Expr, Load, Tunable, Var, postorder
from relax_tune.ir.core.function import AnyFunction, ExternFunc, IRModule, PrimFunc
from relax_tune.ir.core.graph import AnyBlock, Body, Function, FunctionRef, GVar, MatchCast
from relax_tune.ir.core.graph_walk import regions
from relax_tune.ir.core.stmt import NO_MARKS, Block, BufferStore, For, IfThenElse, Seq, Stmt, unknown
from relax_tune.ir.core.struct_info import CallableInfo
from relax_tune.ir.text.printer import FORMAT_VERSION, flattened, print_text

Node = Union[IRModule, PrimFunc, Function, ExternFunc, Stmt, Expr]
Token = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class ProgramDifference:
    """The first place where two programs differ.

    Attributes:
        path: place, such as `body.stmts[1].body.value`.
        left, right: text of the place in each program.
    """

    path: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"at {self.path or 'the root'}: {self.left} on the left, {self.right} on the right"


def structural_equal(a: Node, b: Node) -> bool:
    """Return True if `a` and `b` are the same program up to consistent renaming of identities.

    Modules are compared with the values of their weights; the order of their functions does not matter.
    """
    if a is b:
        return True
    if _tokens(a) != _tokens(b):
        return False
    return not (isinstance(a, IRModule) and isinstance(b, IRModule)) or _other_weight(a, b) is None


def first_difference(a: Node, b: Node) -> ProgramDifference | None:
    """Return the first difference of `a` and `b`, or None when `structural_equal(a, b)`."""
    left, right = _Encoder(), _Encoder()
    left.root(a)
    right.root(b)
    for i, (x, y) in enumerate(zip(left.tokens, right.tokens)):
        if x != y:
            return ProgramDifference(left.paths[i], _show(x), _show(y))
    if len(left.tokens) != len(right.tokens):
        longer = left if len(left.tokens) > len(right.tokens) else right
        at = min(len(left.tokens), len(right.tokens))
        texts = (_show(longer.tokens[at]), "nothing")
        return ProgramDifference(longer.paths[at], *(texts if longer is left else texts[::-1]))
    if isinstance(a, IRModule) and isinstance(b, IRModule):
        name = _other_weight(a, b)
        if name is not None:
            return ProgramDifference(f"constants[{name!r}]", "one array", "another array")
    return None


def structural_hash(a: Node) -> int:
    """Return a 64-bit hash that is equal for structurally equal programs, in every process."""
    # Not Python's `hash`, which differs between processes.
    digest = hashlib.blake2b(repr(_tokens(a)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def workload_key(func: PrimFunc) -> str:
    """Return the key of a workload: BLAKE2 (32 hex digits) of its normalised text and the format version.

    It does not depend on names, ids or PYTHONHASHSEED.
    """
    text = f"relax-tune text {FORMAT_VERSION}\n{print_text(func, normalise=True)}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _tokens(node: Node) -> list[Token]:
    encoder = _Encoder()
    encoder.root(node)
    return encoder.tokens


def _show(token: Token) -> str:
    return " ".join(str(t) for t in token)


def _other_weight(a: IRModule, b: IRModule) -> str | None:
    for name, value in a.constants.items():
        if value is not b.constants[name] and not np.array_equal(
            value, b.constants[name], equal_nan=is_floating(value.dtype)
        ):
            return name
    return None


class _Encoder:
    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.paths: list[str] = []
        self.numbers: dict[object, int] = {}
        self.next = 0

    def emit(self, path: str, *token: object) -> None:
        self.tokens.append(token)
        self.paths.append(path)

    def bind(self, identity: object) -> int:
        self.numbers[identity] = self.next
        self.next += 1
        return self.numbers[identity]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """On exit drop the identities bound inside, except tunables, which belong to the whole program."""
        saved = dict(self.numbers)
        yield
        saved.update((k, v) for k, v in self.numbers.items() if isinstance(k, Tunable))
        self.numbers = saved

    def root(self, node: Node) -> None:
        match node:
            case IRModule():
                self.module(node)
            case PrimFunc() | Function() | ExternFunc():
                self.named(node, "")
            case Expr():
                self.expr(node, "")
            case _:
                self.stmt(node, "")

    def named(self, f: AnyFunction, at: str) -> None:
        """Encode a function; the name of a tensor or graph function does not count."""
        match f:
            case PrimFunc():
                self.prim(f, at)
            case Function():
                self.function(f, at)
            case ExternFunc():
                self.generic(f.signature, at + "signature")

    # modules and functions

    def module(self, m: IRModule) -> None:
        for i, bound in enumerate(m.bounds):
            self.emit(
                f"bounds[{i}]", "bound", self.variable(bound.var), bound.var.dtype.short, bound.lower, bound.upper
            )
        for name in sorted(m.constants):
            value = m.constants[name]
            self.emit(f"constants[{name!r}]", "weight", name, str(value.dtype), tuple(value.shape))
        for name in sorted(m.functions):
            f = m.functions[name]
            path = f"functions[{name!r}]"
            self.emit(path, "named", name)
            with self.scope():
                if isinstance(f, ExternFunc):
                    self.emit(path, "extern", f.name)
                self.named(f, path + ".")

    def prim(self, f: PrimFunc, at: str) -> None:
        self.emit(at + "params", "prim_func", len(f.params), f.outputs, len(f.allocs))
        with self.scope():
            for i, p in enumerate(f.params):
                path = f"{at}params[{i}]"
                if isinstance(p, Buffer):
                    self.buffer(p, path)
                    self.emit(path, "const" if p in f.consts else "varying")
                else:
                    self.emit(path, "scalar", self.variable(p), p.dtype.short)
            for i, b in enumerate(f.allocs):
                self.buffer(b, f"{at}allocs[{i}]")
            self.stmt(f.body, at + "body")

    def function(self, f: Function, at: str) -> None:
        self.emit(at + "params", "function", len(f.params), f.pure)
        with self.scope():
            for i, p in enumerate(f.params):
                self.emit(f"{at}params[{i}]", "param", self.bind(p))
                self.generic(p.info, f"{at}params[{i}].info")
            self.blocks(f.blocks, at)
            self.generic(f.ret, at + "ret")
            self.generic(f.ret_info, at + "ret_info")

    def blocks(self, blocks: Sequence[AnyBlock], at: str) -> None:
        regions_of = regions(blocks)
        self.emit(at + "blocks", "blocks", len(regions_of))
        for i, (dataflow, bindings) in enumerate(regions_of):
            self.emit(f"{at}blocks[{i}]", "dataflow" if dataflow else "bindings", len(bindings))
            for j, binding in enumerate(bindings):
                path = f"{at}blocks[{i}].bindings[{j}]"
                self.generic(binding.value, path + ".value")
                if isinstance(binding, MatchCast):
                    self.emit(path, "match_cast")
                    self.generic(binding.info, path + ".info")
                self.emit(path, "binds", self.bind(binding.var))
                self.generic(binding.var.info, path + ".var.info")

    def generic(self, x: object, path: str) -> None:
        """Encode a value, annotation or operator field by field: dataclasses of plain fields."""
        match x:
            case Expr():
                self.expr(x, path)
            case GVar(info=info):
                known = x in self.numbers
                self.emit(path, "gvar", self.numbers[x] if known else self.bind(x))
                if not known:
                    self.generic(info, path + ".info")
            case FunctionRef(name):
                self.emit(path, "fn", name)
            case Body(blocks, ret):
                self.emit(path, "side")
                with self.scope():
                    self.blocks(blocks, path + ".")
                    self.generic(ret, path + ".ret")
            case CallableInfo(params, ret, pure):
                self.emit(path, "callable", pure)
                with self.scope():
                    self.generic(params, path + ".params")
                    self.generic(ret, path + ".ret")
            case DType():
                self.emit(path, "dtype", x.short)
            case tuple() | list():
                self.emit(path, "tuple", len(x))
                for i, item in enumerate(x):
                    self.generic(item, f"{path}[{i}]")
            case _ if is_dataclass(x):
                self.emit(path, type(x).__name__)
                for f in fields(x):
                    self.generic(getattr(x, f.name), f"{path}.{f.name}")
            case _:
                self.emit(path, type(x).__name__, repr(x))

    # statements and expressions

    def stmt(self, s: Stmt, path: str) -> None:
        match s:
            case For(var, extent, body, marks=marks):
                self.emit(path, "for", s.kind, s.axis, s.tail, var.dtype.short)
                if marks != NO_MARKS:
                    self.emit(path + ".marks", *(x for mark in marks.settings() for x in mark))
                self.expr(extent, path + ".extent")
                with self.scope():
                    self.bind(var)
                    self.stmt(body, path + ".body")
            case Seq():
                # How a sequence is nested has no meaning, and passes differ in it.
                parts = flattened(s)
                if len(parts) == 1:
                    self.stmt(parts[0], path)
                    return
                self.emit(path, "seq", len(parts))
                for i, child in enumerate(parts):
                    self.stmt(child, f"{path}.stmts[{i}]")
            case IfThenElse(cond, then, orelse):
                self.emit(path, "if", orelse is not None)
                self.expr(cond, path + ".cond")
                self.stmt(then, path + ".then")
                if orelse is not None:
                    self.stmt(orelse, path + ".orelse")
            case BufferStore(buffer, indices, value):
                self.emit(path, "store", len(indices))
                self.buffer(buffer, path + ".buffer")
                for i, index in enumerate(indices):
                    self.expr(index, f"{path}.indices[{i}]")
                self.expr(value, path + ".value")
            case Block():
                self.block(s, path)
            case _:
                raise unknown(s, "structural equality")

    def block(self, b: Block, path: str) -> None:
        self.emit(path, "block", b.role, len(b.iters), len(b.bindings), b.init is not None)
        self.expr(b.predicate, path + ".predicate")
        for i, (it, binding) in enumerate(zip(b.iters, b.bindings)):
            self.emit(f"{path}.iters[{i}]", it.kind, it.var.dtype.short)
            self.expr(it.extent, f"{path}.iters[{i}].extent")
            self.expr(binding, f"{path}.bindings[{i}]")
        with self.scope():
            for it in b.iters:
                self.bind(it.var)
            if b.init is not None:
                self.stmt(b.init, path + ".init")
            self.stmt(b.body, path + ".body")

    def variable(self, v: Var) -> int:
        return self.numbers[v] if v in self.numbers else self.bind(v)

    def buffer(self, b: Buffer, path: str) -> None:
        if b in self.numbers:
            self.emit(path, "buffer", self.numbers[b])
            return
        self.emit(path, "new buffer", self.bind(b), b.dtype.short, b.scope, len(b.shape))
        for i, d in enumerate(b.shape):
            self.expr(d, f"{path}.shape[{i}]")
        if b.row_alignment is not None:
            self.emit(path, "row_alignment", b.row_alignment[1])
            self.expr(b.row_alignment[0], f"{path}.row_alignment")
        if b.swizzle:
            self.emit(path, "swizzle", b.swizzle)

    def expr(self, e: Expr, path: str) -> None:
        """Encode nodes in post-order with local numbers, so that shared nodes are written once."""
        # Written as a tree, an expression with shared parts could need exponentially many tokens.
        local: dict[Expr, int] = {}
        for node in postorder((e,)):
            below = tuple(local[c] for c in node.children)
            local[node] = len(local)
            match node:
                case Const(value=value):
                    self.emit(path, "literal", node.dtype.short, repr(value))
                case Tunable(domain=domain):
                    self.emit(path, "tunable", self.variable(node), domain)
                case Var():
                    self.emit(path, "variable", self.variable(node), node.dtype.short)
                case Load(buffer=buffer):
                    self.buffer(buffer, path)
                    self.emit(path, "load", below)
                case _:
                    self.emit(path, node.op, node.dtype.short, below)
