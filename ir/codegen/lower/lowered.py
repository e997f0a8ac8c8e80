"""The lowered tree: the statements of `relax_tune.ir.core.stmt` without blocks, plus bound values and declarations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Union

from relax_tune.ir.codegen.lower.affine import Algebra, Range
from relax_tune.ir.core.buffer import Buffer, Scope
from relax_tune.ir.core.expr import (
    FALSE,
    TRUE,
    Expr,
    Load,
    Op,
    Var,
    as_int,
    free_vars,
    load,
    postorder,
    substitute,
    transform,
)
from relax_tune.ir.core.stmt import Block, For, If, LoopKind, Seq, Stmt, Store, Tail, lower_block


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """`for var in range(extent)`, as `relax_tune.ir.core.stmt.For`. fold: the iterations combine the elements of a local buffer into
    one place and may do so in any order. across: an operation; the loop stands for what all items of a warp do at once: each stores
    what the operation makes of the values that as many neighbours offer. exchange: it copies a square whose rows become columns.
    intrinsic, stream, ahead, asynchronous: as there."""

    var: Var
    extent: Expr
    body: Node
    kind: LoopKind = "serial"
    axis: int = 0
    tail: Tail = "predicate"
    fold: bool = False
    intrinsic: str = ""
    stream: bool = False
    ahead: int = 0
    exchange: bool = False
    asynchronous: bool = False
    across: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Nodes in order."""

    stmts: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Cond:
    """`then` where `cond` holds."""

    cond: Expr
    then: Node
    orelse: Node | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Let:
    """`body` with `var` standing for `value`."""

    var: Var
    value: Expr
    body: Node


@dataclass(frozen=True, slots=True, eq=False)
class Declare:
    """`body` with storage for local or shared buffers of constant shape."""

    buffers: tuple[Buffer, ...]
    body: Node


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """The work-items of a group wait for each other, and then see what each wrote to memory of these scopes."""

    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True, eq=False)
class Arrive:
    """What a work-item copies asynchronously, up to here since the last of these, is one lot. pending: wait until at most so many lots
    are on their way (0: until everything has arrived); None: go on."""

    pending: int | None = None


Node = Union[Loop, Steps, Cond, Store, Let, Declare, Barrier, Arrive]
NOTHING = Steps(())
FOLDABLE = ("serial", "unrolled", "vectorized")


def lower_blocks(s: Stmt) -> Node:
    """Blocks become stores under their predicates and initialisations."""
    if isinstance(s, Block):
        return lower_blocks(lower_block(s))
    if isinstance(s, For):
        if is_fold(s):
            assert isinstance(s.body, Block)
            one = lower_blocks(replace(s.body, predicate=TRUE))
            return when(s.body.predicate, Loop(s.var, s.extent, one, "unrolled", fold=True))
        body = lower_blocks(s.body)
        made = Loop(s.var, s.extent, body, s.kind, s.axis, s.tail)
        return replace(made, intrinsic=s.intrinsic, stream=s.stream, ahead=s.ahead, asynchronous=s.asynchronous)
    if isinstance(s, Seq):
        return block(*(lower_blocks(c) for c in s.stmts))
    if isinstance(s, If):
        return when(s.cond, lower_blocks(s.then), None if s.orelse is None else lower_blocks(s.orelse))
    return s


def is_fold(s: For) -> bool:
    """Whether a loop is `place = op(place, local[..., loop variable])` over a reduction iterator: any order will do."""
    b = s.body
    if not isinstance(b, Block) or b.init is not None or s.var in free_vars(b.predicate) or s.kind not in FOLDABLE:
        return False
    of_loop = [i for i, e in zip(b.iters, b.bindings, strict=True) if e is s.var and i.kind == "reduce"]
    value = b.body.value
    if len(of_loop) != 1 or not isinstance(value, Op) or value.op not in ("add", "mul", "max", "min"):
        return False
    var = of_loop[0].var
    mine, source = value.args
    if not isinstance(mine, Load) or not isinstance(source, Load) or source.buffer.scope != "local":
        return False
    same_place = mine.buffer is b.body.buffer and mine.indices == b.body.indices and source.buffer is not mine.buffer
    others = (*mine.indices, *source.indices[:-1], *(e for e in b.bindings if e is not s.var))
    return same_place and source.indices[-1] is var and not {var, s.var} & set(free_vars(*others))


def block(*parts: Node) -> Node:
    """Parts in order, nested sequences flattened and empty ones dropped."""
    flat: list[Node] = []
    for p in parts:
        flat.extend(p.stmts if isinstance(p, Steps) else (p,))
    return flat[0] if len(flat) == 1 else Steps(tuple(flat))


def is_nothing(n: Node) -> bool:
    return isinstance(n, Steps) and not n.stmts


def when(cond: Expr, then: Node, orelse: Node | None = None) -> Node:
    """A condition with the decided and the empty cases folded."""
    if cond is TRUE or (is_nothing(then) and (orelse is None or is_nothing(orelse))):
        return then
    if cond is FALSE:
        return NOTHING if orelse is None else orelse
    return Cond(cond, then, orelse)


def children(n: Node) -> tuple[Node, ...]:
    if isinstance(n, Steps):
        return n.stmts
    if isinstance(n, Cond):
        return (n.then,) if n.orelse is None else (n.then, n.orelse)
    return () if isinstance(n, (Store, Barrier, Arrive)) else (n.body,)


def with_children(n: Node, new: tuple[Node, ...]) -> Node:
    """`n` with other children; the same object when nothing changed."""
    old = children(n)
    if len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True)):
        return n
    if isinstance(n, Steps):
        return block(*new)
    if isinstance(n, Cond):
        return when(n.cond, new[0], new[1] if len(new) > 1 else None)
    assert not isinstance(n, (Store, Barrier, Arrive))
    return NOTHING if is_nothing(new[0]) else replace(n, body=new[0])


def walk(n: Node) -> Iterator[Node]:
    """Every node, outer first, in program order."""
    stack = [n]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(children(node)))


def rewrite(n: Node, fn: Callable[[Node], Node]) -> Node:
    """Bottom-up rewriting."""
    return fn(with_children(n, tuple(rewrite(c, fn) for c in children(n))))


def expressions(n: Node) -> tuple[Expr, ...]:
    """The expressions a node holds itself."""
    if isinstance(n, Loop):
        return (n.extent,)
    if isinstance(n, Cond):
        return (n.cond,)
    if isinstance(n, Store):
        return (*n.indices, n.value)
    return (n.value,) if isinstance(n, Let) else ()


def map_expressions(n: Node, fn: Callable[[Expr], Expr]) -> Node:
    """Apply `fn` to every expression of the tree."""

    def visit(m: Node) -> Node:
        if isinstance(m, Loop):
            return replace(m, extent=fn(m.extent))
        if isinstance(m, Cond):
            return when(fn(m.cond), m.then, m.orelse)
        if isinstance(m, Store):
            return replace(m, indices=tuple(fn(i) for i in m.indices), value=fn(m.value))
        return replace(m, value=fn(m.value)) if isinstance(m, Let) else m

    return rewrite(n, visit)


def substitute_node(n: Node, mapping: Mapping[Var, Expr]) -> Node:
    return map_expressions(n, lambda e: substitute(e, mapping)) if mapping else n


def swap_buffers(n: Node, access: Callable[[Buffer, tuple[Expr, ...]], tuple[Buffer, tuple[Expr, ...]] | None]) -> Node:
    """Redirect loads and stores: `access(buffer, indices)` gives the new place, None keeps it."""

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load):
            new = access(e.buffer, e.indices)
            return None if new is None else load(*new)
        return None

    def visit(m: Node) -> Node:
        if isinstance(m, Store):
            new = access(m.buffer, m.indices)
            return m if new is None else Store(new[0], new[1], m.value)
        return m

    return rewrite(map_expressions(n, lambda e: transform(e, leaf)), visit)


def own_accesses(m: Node) -> Iterator[tuple[Buffer, tuple[Expr, ...], bool]]:
    """(buffer, indices, written) of the accesses a node makes itself, loads first."""
    for e in postorder(expressions(m)):
        if isinstance(e, Load):
            yield e.buffer, e.indices, False
    if isinstance(m, Store):
        yield m.buffer, m.indices, True


def accesses(n: Node) -> Iterator[tuple[Buffer, tuple[Expr, ...], bool]]:
    """(buffer, indices, written) of every access in program order."""
    for m in walk(n):
        yield from own_accesses(m)


def note_ranges(algebra: Algebra, n: Node) -> None:
    """Record the hull of every bound variable's values."""

    def note(var: Var, found: Range) -> None:
        old = algebra.ranges.get(var)
        if old is not None:
            low = None if old[0] is None or found[0] is None else min(old[0], found[0])
            high = None if old[1] is None or found[1] is None else max(old[1], found[1])
            found = low, high
        algebra.ranges[var] = found

    for m in walk(n):
        if isinstance(m, Loop):
            extent = as_int(m.extent)
            high = extent if extent is not None else algebra.bounds(algebra.static(m.extent))[1]
            note(m.var, (0, None if high is None else max(high - 1, 0)))
        elif isinstance(m, Let) and m.var not in algebra.ranges:  # a loop that was cut up takes no other values
            note(m.var, algebra.bounds(algebra.static(m.value)))
