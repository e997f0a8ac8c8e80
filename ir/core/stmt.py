"""Statements of tensor functions (TensorIR's terms, paper section 3.3), scheduled and lowered.

A scheduled function holds blocks. A lowered one holds none, but bound values, declarations and synchronisation instead:

    scheduled: For Seq If Store Block
    lowered:   For Seq If Store Let Declare Barrier AsyncFence

Traversal belongs to the node classes (`Stmt`). The functions below are written in terms of its methods, so that they apply to a new class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, cast

from relax_tune.ir.core.buffer import Buffer, Scope
from relax_tune.ir.core.expr import FALSE, TRUE, Expr, Load, Var, and_, eq, load, loads, substitute, transform

LoopKind = Literal["serial", "parallel", "vectorized", "unrolled", "group", "item"]
IterKind = Literal["spatial", "reduce"]

# Axes of a grid. A launch has three: the fourth axis of work-items is the outer part of the third.
AXES = {"group": 3, "item": 4}
# How lowering handles the last, incomplete tile of a loop (see ir/codegen/lower/tails.py). All give the same results: the block's
# predicate decides which points run.
Tail = Literal["predicate", "peel", "pow2", "exact", "narrow"]


class Stmt:
    """A statement. A node class overrides the methods for what it holds; a leaf without expressions overrides none."""

    __slots__ = ()

    @property
    def children(self) -> tuple[Stmt, ...]:
        """Direct sub-statements in program order. A block is a leaf."""
        return ()

    def with_children(self, new: tuple[Stmt, ...]) -> Stmt:
        """Return the statement with other children. Unchanged children give the same object, children without effect
        `EMPTY`.
        """
        assert not new, f"{type(self).__name__} has no children"
        return self

    @property
    def own_exprs(self) -> tuple[Expr, ...]:
        """Expressions that the node holds itself, in order of evaluation."""
        return ()

    def map_own_exprs(self, fn: Callable[[Expr], Expr]) -> Stmt:
        """Return the statement with `fn` applied to its own expressions: the same object if none changed."""
        return self

    @property
    def bound_vars(self) -> tuple[Var, ...]:
        """Variables that the node binds in its children."""
        return ()

    @property
    def own_stores(self) -> tuple[BufferStore, ...]:
        """Stores that the node is or holds, in order of execution."""
        return ()

    def map_own_stores(self, fn: Callable[[BufferStore], BufferStore]) -> Stmt:
        """Return the statement with `fn` applied to the stores that it is or holds: the same object if none changed."""
        return self


@dataclass(frozen=True, slots=True)
class LoopMarks:
    """Hints to code generation on a loop. None changes what the loop computes; a target without the feature ignores the mark
    (`GeneratedKernel.ignored`).

    Attributes:
        intrinsic: name of the operation in `relax_tune.ir.hardware.intrinsics` that the loop nest computes.
        nontemporal: vector stores below bypass the caches.
        prefetch_distance: iterations between the prefetch of a vector that is only read below and its use; 0 for no prefetch.
        hold_vectors: vectors of memory that is only read are loaded once for all statements below, into registers.
        async_copy: copies into shared memory below are asynchronous (`cp.async`); code generation places the waits.
        tree_reduce: the iterations combine elements of a local buffer in any order. Set by lowering.
        warp_reduce: operation by which all items of a warp combine the values that they offer. Set by lowering.
        transpose: the loop and the one below it transpose square tiles in registers. Set by lowering.
    """

    intrinsic: str = ""
    nontemporal: bool = False
    prefetch_distance: int = 0
    hold_vectors: bool = False
    async_copy: bool = False
    tree_reduce: bool = False
    warp_reduce: str = ""
    transpose: bool = False

    def settings(self) -> Iterator[tuple[str, str | int | bool]]:
        """Yield (name, value) of the marks that are set, in the order of the fields."""
        return ((f.name, value) for f in fields(self) if (value := getattr(self, f.name)))


NO_MARKS = LoopMarks()


class BodyStmt(Stmt):
    """A statement around one other, which has no effect where `body` has none."""

    __slots__ = ()
    body: Stmt

    @property
    def children(self) -> tuple[Stmt, ...]:
        return (self.body,)

    def with_children(self, new: tuple[Stmt, ...]) -> Stmt:
        (body,) = new
        if body is self.body:
            return self
        return EMPTY if is_empty(body) else replace(self, body=body)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, eq=False)
class For(BodyStmt):
    """`for var in range(extent)`.

    Attributes:
        kind: `parallel` CPU threads or, on a grid, work-groups of a free axis, `group` and `item` work-group and work-item axes
            (OpenCL, CUDA), `vectorized`, `unrolled`, `serial`.
        axis: grid axis of a `group` or `item` loop (`AXES`).
    """

    var: Var
    extent: Expr
    body: Stmt
    kind: LoopKind = "serial"
    axis: int = 0
    tail: Tail = "predicate"
    marks: LoopMarks = NO_MARKS

    @property
    def own_exprs(self) -> tuple[Expr, ...]:
        return (self.extent,)

    def map_own_exprs(self, fn: Callable[[Expr], Expr]) -> For:
        extent = fn(self.extent)
        return self if extent is self.extent else replace(self, extent=extent)

    @property
    def bound_vars(self) -> tuple[Var, ...]:
        return (self.var,)

    def marked(self, **changes: Any) -> For:
        """Return the loop with other values of the named marks."""
        return replace(self, marks=replace(self.marks, **changes))


@dataclass(frozen=True, slots=True, eq=False)
class Seq(Stmt):
    """Statements in order."""

    stmts: tuple[Stmt, ...]

    @property
    def children(self) -> tuple[Stmt, ...]:
        return self.stmts

    def with_children(self, new: tuple[Stmt, ...]) -> Stmt:
        return self if same(new, self.stmts) else seq(*new)


@dataclass(frozen=True, slots=True, eq=False)
class IfThenElse(Stmt):
    """`then` where `cond` holds, else `orelse`. Primitives use block predicates instead."""

    cond: Expr
    then: Stmt
    orelse: Stmt | None = None

    @property
    def children(self) -> tuple[Stmt, ...]:
        return (self.then,) if self.orelse is None else (self.then, self.orelse)

    def with_children(self, new: tuple[Stmt, ...]) -> Stmt:
        if same(new, self.children):
            return self
        return when(self.cond, new[0], new[1] if len(new) > 1 else None)

    @property
    def own_exprs(self) -> tuple[Expr, ...]:
        return (self.cond,)

    def map_own_exprs(self, fn: Callable[[Expr], Expr]) -> Stmt:
        cond = fn(self.cond)
        return self if cond is self.cond else when(cond, self.then, self.orelse)


@dataclass(frozen=True, slots=True, eq=False)
class BufferStore(Stmt):
    """`buffer[indices] = value`."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr

    @property
    def own_exprs(self) -> tuple[Expr, ...]:
        return (*self.indices, self.value)

    def map_own_exprs(self, fn: Callable[[Expr], Expr]) -> BufferStore:
        indices, value = tuple(map(fn, self.indices)), fn(self.value)
        unchanged = value is self.value and same(indices, self.indices)
        return self if unchanged else BufferStore(self.buffer, indices, value)

    @property
    def own_stores(self) -> tuple[BufferStore, ...]:
        return (self,)

    def map_own_stores(self, fn: Callable[[BufferStore], BufferStore]) -> BufferStore:
        return fn(self)


@dataclass(frozen=True, slots=True, eq=False)
class IterVar:
    """A block iterator over [0, extent): `spatial` points are independent, `reduce` points accumulate in any order."""

    var: Var
    extent: Expr
    kind: IterKind = "spatial"


@dataclass(frozen=True, slots=True, eq=False)
class Block(Stmt):
    """A unit of computation: one store over iterators whose values are bound to loop expressions.

    Attributes:
        iters, bindings: iterators, and for each the expression over loop variables that is its value.
        body: the store. A reduction without `init` reads the element that it writes.
        init: store at the first reduction point (all reduce iterators zero), or without an update if there is no such point
            (`relax_tune.ir.interp.empty_reductions`).
        predicate: condition over the loop variables; points where it is false do not run.
        role: `prepack` for a block over constants that runs once, before any call.
    """

    name: str
    iters: tuple[IterVar, ...]
    bindings: tuple[Expr, ...]
    body: BufferStore
    init: BufferStore | None = None
    predicate: Expr = TRUE
    role: Literal["compute", "prepack"] = "compute"

    @property
    def is_reduction(self) -> bool:
        return any(i.kind == "reduce" for i in self.iters)

    @property
    def own_exprs(self) -> tuple[Expr, ...]:
        stored = (e for s in self.own_stores for e in s.own_exprs)
        return (*(i.extent for i in self.iters), *self.bindings, self.predicate, *stored)

    def map_own_exprs(self, fn: Callable[[Expr], Expr]) -> Block:
        extents, bindings = tuple(fn(i.extent) for i in self.iters), tuple(map(fn, self.bindings))
        predicate, new = fn(self.predicate), self.map_own_stores(lambda s: s.map_own_exprs(fn))
        if same(extents, tuple(i.extent for i in self.iters)):
            if new is self and predicate is self.predicate and same(bindings, self.bindings):
                return self
            return replace(new, bindings=bindings, predicate=predicate)
        iters = tuple(replace(i, extent=e) for i, e in zip(self.iters, extents, strict=True))
        return replace(new, iters=iters, bindings=bindings, predicate=predicate)

    @property
    def own_stores(self) -> tuple[BufferStore, ...]:
        return (self.body,) if self.init is None else (self.init, self.body)

    def map_own_stores(self, fn: Callable[[BufferStore], BufferStore]) -> Block:
        body, init = fn(self.body), None if self.init is None else fn(self.init)
        return self if body is self.body and init is self.init else replace(self, body=body, init=init)


@dataclass(frozen=True, slots=True, eq=False)
class Let(BodyStmt):
    """`body` with `var` bound to `value`."""

    var: Var
    value: Expr
    body: Stmt

    @property
    def own_exprs(self) -> tuple[Expr, ...]:
        return (self.value,)

    def map_own_exprs(self, fn: Callable[[Expr], Expr]) -> Let:
        value = fn(self.value)
        return self if value is self.value else Let(self.var, value, self.body)

    @property
    def bound_vars(self) -> tuple[Var, ...]:
        return (self.var,)


@dataclass(frozen=True, slots=True, eq=False)
class Declare(BodyStmt):
    """`body` with storage for local or shared buffers of constant shape."""

    buffers: tuple[Buffer, ...]
    body: Stmt


@dataclass(frozen=True, slots=True, eq=False)
class Barrier(Stmt):
    """Wait for all work-items of the work-group. Their writes to memory of `scopes` are visible afterwards."""

    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True, eq=False)
class AsyncFence(Stmt):
    """Close a commit group of asynchronous copies, or wait for groups (PTX ISA, "cp.async.commit_group" and "cp.async.wait_group").

    Attributes:
        pending: wait until at most this many commit groups are in flight (0: none). None: commit without waiting.
    """

    pending: int | None = None


S = TypeVar("S", bound=Stmt)
EMPTY = Seq(())


def is_empty(s: Stmt) -> bool:
    return isinstance(s, Seq) and not s.stmts


def same(a: tuple[object, ...], b: tuple[object, ...]) -> bool:
    """Return whether two tuples hold the same objects."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def unknown(s: object, where: str) -> TypeError:
    """Return the error of a consumer that does not know a class of statement."""
    return TypeError(f"{where} has no case for the statement {type(s).__name__}")


def statements(s: Stmt) -> tuple[Stmt, ...]:
    """Return the statements of a sequence; any other statement as a sequence of one."""
    return s.stmts if isinstance(s, Seq) else (s,)


def seq(*stmts: Stmt) -> Stmt:
    """Return statements in order, nested sequences flattened, a single statement unwrapped."""
    flat: list[Stmt] = []
    for s in stmts:
        flat.extend(statements(s))
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def when(cond: Expr, then: Stmt, orelse: Stmt | None = None) -> Stmt:
    """Return `If(cond, then, orelse)` with decided conditions and empty statements folded."""
    if cond is TRUE or (is_empty(then) and (orelse is None or is_empty(orelse))):
        return then
    if cond is FALSE:
        return EMPTY if orelse is None else orelse
    return IfThenElse(cond, then, orelse)


def walk(s: Stmt) -> Iterator[Stmt]:
    """Yield every statement, outer first, in program order."""
    stack = [s]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children))


def blocks(s: Stmt) -> tuple[Block, ...]:
    return tuple(n for n in walk(s) if isinstance(n, Block))


def loops(s: Stmt, *kinds: LoopKind) -> tuple[For, ...]:
    """Return the loops of the tree, of any kind unless kinds are given."""
    return tuple(n for n in walk(s) if isinstance(n, For) and (not kinds or n.kind in kinds))


def stores(s: Stmt) -> tuple[BufferStore, ...]:
    """Return the stores of the tree in program order, also inside blocks."""
    return tuple(x for n in walk(s) for x in n.own_stores)


def bound_vars(s: Stmt) -> frozenset[Var]:
    """Return the variables that loops and bindings of the tree bind."""
    return frozenset(v for n in walk(s) for v in n.bound_vars)


def rewrite(s: Stmt, fn: Callable[[Stmt], Stmt]) -> Stmt:
    """Rewrite bottom-up: `fn(node)` after its children. Unchanged in, same object out."""
    old = s.children
    return fn(s.with_children(tuple([rewrite(c, fn) for c in old])) if old else s)


def map_blocks(s: Stmt, fn: Callable[[Block], Stmt]) -> Stmt:
    return rewrite(s, lambda n: fn(n) if isinstance(n, Block) else n)


def map_exprs(s: Stmt, fn: Callable[[Expr], Expr]) -> Stmt:
    """Apply `fn` to every expression of the tree: extents, bindings, predicates, indices, values, conditions."""
    return rewrite(s, lambda n: n.map_own_exprs(fn))


def substitute_stmt(s: Stmt, mapping: Mapping[Var, Expr]) -> Stmt:
    """Replace variables in every expression; the caller replaces the binders."""
    return map_exprs(s, lambda e: substitute(e, mapping)) if mapping else s


def redirect(s: S, access: Callable[[Buffer, tuple[Expr, ...]], tuple[Buffer, tuple[Expr, ...]] | None]) -> S:
    """Redirect loads and stores: `access(buffer, indices)` returns the new buffer and indices, or None to leave the access."""

    def leaf(e: Expr) -> Expr | None:
        new = access(e.buffer, e.indices) if isinstance(e, Load) else None
        return None if new is None else load(*new)

    def moved(n: BufferStore) -> BufferStore:
        new = access(n.buffer, n.indices)
        return n if new is None else BufferStore(*new, n.value)

    def expression(e: Expr) -> Expr:
        return transform(e, leaf)

    return cast(S, rewrite(s, lambda n: n.map_own_exprs(expression).map_own_stores(moved)))


def replace_buffers(s: S, mapping: Mapping[Buffer, Buffer]) -> S:
    """Redirect loads and stores to other buffers of the same rank."""
    return redirect(s, lambda b, i: (mapping[b], i) if b in mapping else None) if mapping else s


def own_accesses(s: Stmt) -> Iterator[tuple[Buffer, tuple[Expr, ...], bool]]:
    """Yield (buffer, indices, written) of the accesses that a node makes itself, loads first."""
    for e in loads(*s.own_exprs):
        yield e.buffer, e.indices, False
    for n in s.own_stores:
        yield n.buffer, n.indices, True


def accesses(s: Stmt) -> Iterator[tuple[Buffer, tuple[Expr, ...], bool]]:
    """Yield (buffer, indices, written) of every access in program order."""
    for n in walk(s):
        yield from own_accesses(n)


def lower_block(b: Block) -> Stmt:
    """Return the block as plain statements: iterators replaced by their bindings, the predicate as `If`."""
    mapping = {i.var: e for i, e in zip(b.iters, b.bindings, strict=True)}
    body: Stmt = substitute_stmt(b.body, mapping)
    # The initial value is stored at the first point of the reduction, where all its iterators are 0.
    if b.init is not None:
        from_zero = [e for i, e in zip(b.iters, b.bindings, strict=True) if i.kind == "reduce"]
        first = and_(*(eq(e, 0) for e in from_zero))
        body = seq(IfThenElse(first, substitute_stmt(b.init, mapping)), body)
    return body if b.predicate is TRUE else IfThenElse(b.predicate, body)
