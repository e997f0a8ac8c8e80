"""Statements of tensor functions: loops, blocks, stores (TensorIR's terms, paper section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Union

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import TRUE, Expr, Load, Var, and_, eq, load, postorder, substitute, transform

LoopKind = Literal["serial", "parallel", "vectorized", "unrolled", "group", "item"]
IterKind = Literal["spatial", "reduce"]

# Axes of a grid. A launch has three: items that are apart along the fourth of theirs lie behind one another along the third.
AXES = {"group": 3, "item": 4}
# How the last, incomplete tile of a loop is handled when the function is lowered (see ir/codegen/lower/tails.py); meaning is the
# same for all of them: the block's predicate decides which points run.
Tail = Literal["predicate", "peel", "pow2", "exact", "narrow"]


@dataclass(frozen=True, slots=True, eq=False)
class For:
    """`for var in range(extent)`. kind: `parallel` CPU threads, `group`/`item` work-group and work-item axes (OpenCL, CUDA),
    `vectorized`, `unrolled`, `serial`. `axis` numbers the grid axis of a group/item loop (`AXES`). `intrinsic` names the operation of
    `relax_tune.ir.hardware.intrinsics` that the nest this loop is in computes; code generation calls it where the nest still matches.
    `stream`: vectors stored below go to memory past the caches, where the target can do that. `ahead`: vectors that are only read
    below are asked of memory so many iterations before they are, where the target can do that. `asynchronous`: what is copied below
    into shared memory may arrive later, where the target can do that; code generation waits for it before anybody looks."""

    var: Var
    extent: Expr
    body: Stmt
    kind: LoopKind = "serial"
    axis: int = 0
    tail: Tail = "predicate"
    intrinsic: str = ""
    stream: bool = False
    ahead: int = 0
    asynchronous: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Seq:
    """Statements in order."""

    stmts: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True, eq=False)
class If:
    """`then` where `cond` holds. Appears in lowered functions; schedules use block predicates."""

    cond: Expr
    then: Stmt
    orelse: Stmt | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """`buffer[indices] = value`."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class IterVar:
    """A block iterator over [0, extent): `spatial` points are independent, `reduce` points accumulate in any order."""

    var: Var
    extent: Expr
    kind: IterKind = "spatial"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A unit of computation: one store over iterators whose values are bound to loop expressions.

    For a reduction `init` is stored at the first reduction point (all reduce iterators zero), or alone where there is none
    (`relax_tune.ir.interp.empty_reductions`), and `body` reads what it writes. `predicate` is over the loop variables: points where
    it is false do not run. `role` `prepack` marks a block over constants that runs once, before any call.
    """

    name: str
    iters: tuple[IterVar, ...]
    bindings: tuple[Expr, ...]
    body: Store
    init: Store | None = None
    predicate: Expr = TRUE
    role: Literal["compute", "prepack"] = "compute"

    @property
    def is_reduction(self) -> bool:
        return any(i.kind == "reduce" for i in self.iters)


Stmt = Union[For, Seq, If, Store, Block]


def seq(*stmts: Stmt) -> Stmt:
    """Statements in order, nested sequences flattened, a single one unwrapped."""
    flat: list[Stmt] = []
    for s in stmts:
        flat.extend(s.stmts if isinstance(s, Seq) else (s,))
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def children(s: Stmt) -> tuple[Stmt, ...]:
    """Direct sub-statements (a block is a leaf)."""
    if isinstance(s, For):
        return (s.body,)
    if isinstance(s, Seq):
        return s.stmts
    if isinstance(s, If):
        return (s.then,) if s.orelse is None else (s.then, s.orelse)
    return ()


def walk(s: Stmt) -> Iterator[Stmt]:
    """Every statement, outer first, in program order."""
    stack = [s]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(children(node)))


def blocks(s: Stmt) -> tuple[Block, ...]:
    return tuple(n for n in walk(s) if isinstance(n, Block))


def loops(s: Stmt) -> tuple[For, ...]:
    return tuple(n for n in walk(s) if isinstance(n, For))


def rewrite(s: Stmt, fn: Callable[[Stmt], Stmt | None]) -> Stmt:
    """Bottom-up: `fn(node)` after its children were rewritten; None keeps the node. Unchanged in, same object out."""
    new = s
    if isinstance(s, For):
        body = rewrite(s.body, fn)
        new = s if body is s.body else replace(s, body=body)
    elif isinstance(s, Seq):
        stmts = tuple(rewrite(c, fn) for c in s.stmts)
        if any(a is not b for a, b in zip(stmts, s.stmts, strict=True)):
            new = seq(*stmts)
    elif isinstance(s, If):
        then = rewrite(s.then, fn)
        orelse = None if s.orelse is None else rewrite(s.orelse, fn)
        new = s if then is s.then and orelse is s.orelse else replace(s, then=then, orelse=orelse)
    out = fn(new)
    return new if out is None else out


def map_exprs(s: Stmt, fn: Callable[[Expr], Expr]) -> Stmt:
    """Apply `fn` to every expression: extents, bindings, predicates, indices, values, conditions."""

    def store(n: Store) -> Store:
        indices, value = tuple(fn(i) for i in n.indices), fn(n.value)
        return n if value is n.value and indices == n.indices else replace(n, indices=indices, value=value)

    def visit(n: Stmt) -> Stmt | None:
        if isinstance(n, For):
            extent = fn(n.extent)
            return n if extent is n.extent else replace(n, extent=extent)
        if isinstance(n, If):
            return replace(n, cond=fn(n.cond))
        if isinstance(n, Store):
            return store(n)
        if isinstance(n, Block):
            return replace(
                n,
                iters=tuple(i if fn(i.extent) is i.extent else replace(i, extent=fn(i.extent)) for i in n.iters),
                bindings=tuple(fn(b) for b in n.bindings),
                body=store(n.body),
                init=None if n.init is None else store(n.init),
                predicate=fn(n.predicate),
            )
        return None

    return rewrite(s, visit)


def substitute_stmt(s: Stmt, mapping: Mapping[Var, Expr]) -> Stmt:
    """Replace variables in every expression; binders are the caller's business."""
    return map_exprs(s, lambda e: substitute(e, mapping)) if mapping else s


def replace_buffers(s: Stmt, mapping: Mapping[Buffer, Buffer]) -> Stmt:
    """Point loads and stores at other buffers of the same rank."""
    if not mapping:
        return s

    def swap(e: Expr) -> Expr:
        if not any(isinstance(n, Load) and n.buffer in mapping for n in postorder((e,))):
            return e
        return transform(
            e, lambda n: load(mapping[n.buffer], n.indices) if isinstance(n, Load) and n.buffer in mapping else None
        )

    def visit(n: Stmt) -> Stmt | None:
        if isinstance(n, Store) and n.buffer in mapping:
            return replace(n, buffer=mapping[n.buffer])
        if isinstance(n, Block):
            body = replace(n.body, buffer=mapping.get(n.body.buffer, n.body.buffer))
            init = n.init and replace(n.init, buffer=mapping.get(n.init.buffer, n.init.buffer))
            return replace(n, body=body, init=init)
        return None

    return rewrite(map_exprs(s, swap), visit)


def lower_block(b: Block) -> Stmt:
    """The block as plain statements: iterators replaced by their bindings, the predicate as `If`."""
    mapping = {i.var: e for i, e in zip(b.iters, b.bindings, strict=True)}
    body: Stmt = substitute_stmt(b.body, mapping)
    if b.init is not None:
        from_zero = [e for i, e in zip(b.iters, b.bindings, strict=True) if i.kind == "reduce"]
        first = and_(*(eq(e, 0) for e in from_zero))
        body = seq(If(first, substitute_stmt(b.init, mapping)), body)
    return body if b.predicate is TRUE else If(b.predicate, body)
