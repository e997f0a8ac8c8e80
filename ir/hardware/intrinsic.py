"""Operations of machines that replace loop nests: their semantics and their text.

An intrinsic is a tensor function over tiles of constant size (its semantics), with the body of an equivalent C function
on tiles inside larger buffers. The primitive `tensorize` marks a matching nest with the intrinsic
(`LoopMarks.intrinsic`). The nest keeps its meaning; code generation puts a call in its place. `intrinsics` is the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from types import MappingProxyType

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import TRUE, Const, Expr, Load, Op, Var, as_int, const, free_vars, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, Stmt, lower_block
from relax_tune.ir.text.parser import parse_prim_func

# An access to a tile: the buffer and the indices, in which the loops of the nest move.
Access = tuple[Buffer, tuple[Expr, ...]]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """An operation of a machine that replaces a loop nest on tiles of constant size.

    source: text of the tensor function that says what the operation computes (`semantics`). Its parameters are the operands, the
        written one last. A loop whose extent is a symbol may have any constant extent.
    dense: operands whose elements are contiguous along their last index.
    body: C twin of the semantics, in the subset that OpenCL shares. It sees a pointer `a` to the first element of operand A, the
        stride `a_i` of loop variable i in A (except in the last index of a dense operand), and each symbol as a constant. `@A` is
        the address space of A.
    fast: language -> (preprocessor condition, body to use where it holds).
    language: the only language that has the operation; empty for all. Other languages keep the loops.
    prelude_helpers: names of prelude functions that the bodies call.
    helpers: extents of the open loops -> other text that the bodies call, by name.
    max_extent: symbol -> largest extent.
    warp_operands: operand in registers of the warp (scope `warp`) -> loop over the work-items that hold a part each.
    fixed_strides: (operand, loop variable, factor, other variable). The variable's stride must be `factor` times the other's, or
        `factor` elements if the other is empty. Rows are not swizzled.
    proxy_fence: (call, helper) before the barrier that follows writes to shared memory which the async proxy reads (PTX ISA,
        "Proxies" and `fence.proxy.async`).

    Loops over work-items in the semantics make it an operation of a warp, or of several warps. Such an operation reads operands in
    shared memory, where rows of eight elements are aligned; the written operand belongs to the work-item. For each operand A in
    shared memory its body also sees `a_row`, the row length if rows are swizzled, else 0. `a_at` is the offset to add before the
    swizzle (`relax_tune.ir.hardware.mma.PLACES`).
    """

    source: str
    dense: frozenset[str]
    body: str
    fast: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    language: str = ""
    prelude_helpers: tuple[str, ...] = ()
    helpers: Callable[[Mapping[str, int]], Mapping[str, str]] = lambda sizes: {}
    max_extent: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    warp_operands: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    fixed_strides: tuple[tuple[str, str, int, str], ...] = ()
    proxy_fence: tuple[str, str] | None = None

    @property
    def of_warp(self) -> bool:
        return any(f.kind == "item" for f in self.loops)

    @property
    def semantics(self) -> PrimFunc:
        return _read(self.source)

    @property
    def name(self) -> str:
        return self.semantics.name

    @property
    def loops(self) -> tuple[For, ...]:
        """Loops of the semantics, outermost first."""
        meant = nest_of(self.semantics.body)
        assert meant is not None
        return meant[0]

    def nests(self) -> Iterator[Sequence[For]]:
        """Yield the loops of every nest that may stand for the operation: those of symbolic extent may be missing."""
        symbolic = [f for f in self.loops if as_int(f.extent) is None]
        for left in range(len(symbolic) + 1):
            for missing in combinations(symbolic, left):
                yield [f for f in self.loops if f not in missing]

    def strides(self) -> Iterator[tuple[str, str]]:
        """Yield (operand, loop variable) of every stride that the body takes, in order."""
        meant = nest_of(self.semantics.body)
        assert meant is not None
        found = {b.name: where for b, where in accesses_of(meant[1])}
        for b in self.semantics.buffers:
            where = found[b.name]
            yield from ((b.name, v.name) for v in free_vars(*(where[:-1] if b.name in self.dense else where)))


@cache
def _read(text: str) -> PrimFunc:
    return parse_prim_func(text)


def nest_of(s: Stmt) -> tuple[tuple[For, ...], BufferStore] | None:
    """Return the loops of a perfect nest and its store over their variables; None for other statements."""
    found: list[For] = []
    while isinstance(s, For):
        found.append(s)
        s = s.body
    if isinstance(s, Block) and s.init is None and s.predicate is TRUE:
        lowered = lower_block(s)
        return (tuple(found), lowered) if isinstance(lowered, BufferStore) else None
    return None


def accesses_of(store: BufferStore) -> list[Access]:
    """Return the reads of a store in order of appearance, then its write."""
    found: list[Access] = []

    def visit(e: Expr) -> None:
        if isinstance(e, Load):
            found.append((e.buffer, e.indices))
        elif isinstance(e, Op):
            for a in e.args:
                visit(a)

    visit(store.value)
    return [*dict.fromkeys(found), (store.buffer, store.indices)]


@dataclass(frozen=True, slots=True)
class Matched:
    """A loop nest as an intrinsic's.

    accesses: operand -> access.
    loops: loop variable of the semantics -> of the nest. Loops of one iteration may be missing.
    sizes: symbol of the semantics -> extent.
    """

    accesses: Mapping[str, Access]
    loops: Mapping[Var, Var]
    sizes: Mapping[str, Expr]


def match(intrinsic: Intrinsic, loops: Sequence[For], store: BufferStore) -> Matched | None:
    """Match a loop nest to an intrinsic; None if it computes something else.

    Of `loops` only variables, extents, kinds and axes count. They are the loops of the semantics in order.
    The values agree up to the order of sums and products. Each operand moves with the loops that its indices in the semantics name.
    A dense operand moves along adjacent elements with the loops of its last index.
    """
    env = Env()
    for f in loops:
        env = env.with_loop(f.var, f.extent)
    # a condition on a step may be written with the loops around, which do not matter to it
    value = transform(store.value, lambda e: simplify(e, env) if e.dtype is bool_ else None)
    store = BufferStore(store.buffer, store.indices, value)
    for meant in intrinsic.nests():
        found = _match(meant, intrinsic, loops, store)
        if found is not None:
            return found
    return None


def _match(meant: Sequence[For], intrinsic: Intrinsic, loops: Sequence[For], store: BufferStore) -> Matched | None:
    if len(meant) != len(loops):
        return None
    missing = [f for f in intrinsic.loops if f not in meant]
    sizes: dict[str, Expr] = {f.extent.name: const(1) for f in missing if isinstance(f.extent, Var)}
    for f, g in zip(meant, loops):
        if isinstance(f.extent, Var):
            sizes[f.extent.name] = g.extent
        if (f.kind, f.axis) != (g.kind, g.axis) or as_int(f.extent) not in (None, as_int(g.extent)):
            return None
    grown = nest_of(intrinsic.semantics.body)
    assert grown is not None
    variables = {f.var: g.var for f, g in zip(meant, loops)}
    found: dict[str, Access] = {}
    if not (
        _bind(found, grown[1], (store.buffer, store.indices)) and _same(grown[1].value, store.value, variables, found)
    ):
        return None
    items = {g.var for g in loops if g.kind == "item"}
    for b, where in accesses_of(grown[1]):
        parts = {g.var for f, g in zip(meant, loops) if intrinsic.warp_operands.get(b.name) == f.var.name}
        if not _moves(found[b.name], where, variables, loops, items | parts, b.name in intrinsic.dense):
            return None
    others = [buffer for name, (buffer, _) in found.items() if name != grown[1].buffer.name]
    return None if store.buffer in others else Matched(found, variables, sizes)


def _bind(found: dict[str, Access], meant: BufferStore | Load, access: Access) -> bool:
    if meant.buffer.dtype is not access[0].dtype:
        return False
    return found.setdefault(meant.buffer.name, access) == access


def _same(meant: Expr, e: Expr, variables: Mapping[Var, Var], found: dict[str, Access]) -> bool:
    if isinstance(meant, Load):
        return isinstance(e, Load) and _bind(found, meant, (e.buffer, e.indices))
    if isinstance(meant, Var):
        return variables.get(meant) is e
    if isinstance(meant, Const) or not isinstance(meant, Op):
        return meant is e
    if not isinstance(e, Op) or (e.op, e.dtype, len(e.args)) != (meant.op, meant.dtype, len(meant.args)):
        return False
    orders = [e.args, e.args[::-1]] if meant.op in ("add", "mul") else [e.args]
    for args in orders:
        tried = dict(found)
        if all(_same(a, b, variables, tried) for a, b in zip(meant.args, args)):
            found.update(tried)
            return True
    return False


def _moves(
    access: Access,
    meant: Sequence[Expr],
    variables: Mapping[Var, Var],
    loops: Sequence[For],
    items: set[Var],
    dense: bool,
) -> bool:
    """Return whether an access moves linearly with the loops of its indices in the semantics, and with no others.

    A dense operand has the same strides along its last dimension. A work-item's own operand need not move with the items.
    """
    env = Env()
    for f in loops:
        env = env.with_loop(f.var, f.extent)
    still = {f.var for f in loops if as_int(f.extent) == 1}
    wanted = {variables[v] for v in free_vars(*meant) if v in variables} - still
    beside = linear(meant[-1], tuple(variables)) if dense else None
    steps = {} if beside is None else {variables[v]: as_int(k) for v, k in beside[0].items()}
    moved = set[Var]()
    for d, e in enumerate(access[1]):
        parts = linear(e, tuple(f.var for f in loops), env)
        if parts is None:
            return False
        moved |= parts[0].keys() - still
        last = d == len(access[1]) - 1
        if any((as_int(k) if last else None) != steps[v] for v, k in parts[0].items() if v in steps):
            return False
    return moved == wanted or (access[0].scope == "local" and moved | items == wanted | items and moved <= wanted)
