"""Machine instructions that replace loop nests: their semantics and their text.

An intrinsic is a tensor function over tiles of constant size (its semantics), with the body of an equivalent C function on tiles inside
larger buffers. The primitive `tensorize` marks a matching nest with the intrinsic (`LoopMarks.intrinsic`). The nest keeps its meaning, and
code generation prints a call instead of it. `intrinsics` is the table.

Tests: `tests/schedules/primitives/blocks/test_tensorize.py`.
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

# An access to a tile: the buffer, and the indices in terms of the nest's loop variables.
Access = tuple[Buffer, tuple[Expr, ...]]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """A machine instruction that replaces a loop nest on tiles of constant size.

    Loops over work-items in the semantics make it an operation of a warp, or of several warps. Such an operation reads operands in
    shared memory, where rows of eight elements are aligned; the written operand is in the work-item's registers. For each operand A in
    shared memory its body may use `a_row`, the row length if rows are swizzled, else 0, and `a_at`, the offset to add before the swizzle
    (`relax_tune.ir.hardware.mma.PLACES`).

    Attributes:
        source: Text of the tensor function that defines what the operation computes (`semantics`). Its parameters are the operands,
            the written one last. A loop whose extent is a symbol may have any constant extent.
        dense: Operands whose elements are contiguous along their last index.
        body: C text equivalent to the semantics, in the subset that OpenCL shares. It may use a pointer `a` to the first element of
            operand A, the stride `a_i` of loop variable i in A (except in the last index of a dense operand), and each symbol as a
            constant. `@A` is the address space of A.
        fast: For a language, (preprocessor condition, body to use if it holds).
        language: The only language that has the operation; "" for all. Other languages print the loops.
        prelude_helpers: Names of prelude functions that the bodies call.
        helpers: Returns other text that the bodies call, by name, for the extents of loops of symbolic extent.
        max_extent: Largest extent of each symbol.
        warp_operands: For each operand in registers of the warp (scope `warp`), the loop over the work-items that have a part each.
        fixed_strides: (operand, loop variable, factor, other variable). The variable's stride must be `factor` times the other's, or
            `factor` elements if the other is "". Rows are not swizzled.
        proxy_fence: (call, helper) before the barrier that follows writes to shared memory which the async proxy reads (PTX ISA,
            "Proxies" and `fence.proxy.async`).
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
        """Whether the work-items of a warp execute the operation together."""
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
        nest = nest_of(self.semantics.body)
        assert nest is not None
        return nest[0]

    def nests(self) -> Iterator[Sequence[For]]:
        """Yield the loops of every nest that may be replaced: loops of symbolic extent are absent if their extent is one."""
        symbolic = [f for f in self.loops if as_int(f.extent) is None]
        for left in range(len(symbolic) + 1):
            for missing in combinations(symbolic, left):
                yield [f for f in self.loops if f not in missing]

    def strides(self) -> Iterator[tuple[str, str]]:
        """Yield (operand, loop variable) of every stride parameter of the body, in order."""
        nest = nest_of(self.semantics.body)
        assert nest is not None
        indices_of = {b.name: indices for b, indices in accesses_of(nest[1])}
        for b in self.semantics.buffers:
            indices = indices_of[b.name]
            yield from ((b.name, v.name) for v in free_vars(*(indices[:-1] if b.name in self.dense else indices)))


@cache
def _read(text: str) -> PrimFunc:
    return parse_prim_func(text)


def nest_of(s: Stmt) -> tuple[tuple[For, ...], BufferStore] | None:
    """Return the loops of a perfect nest and its store over their variables; None for other statements."""
    loops: list[For] = []
    while isinstance(s, For):
        loops.append(s)
        s = s.body
    if isinstance(s, Block) and s.init is None and s.predicate is TRUE:
        lowered = lower_block(s)
        return (tuple(loops), lowered) if isinstance(lowered, BufferStore) else None
    return None


def accesses_of(store: BufferStore) -> list[Access]:
    """Return the reads of a store in order of appearance, followed by its write."""
    reads: list[Access] = []

    def visit(e: Expr) -> None:
        if isinstance(e, Load):
            reads.append((e.buffer, e.indices))
        elif isinstance(e, Op):
            for a in e.args:
                visit(a)

    visit(store.value)
    return [*dict.fromkeys(reads), (store.buffer, store.indices)]


@dataclass(frozen=True, slots=True)
class Matched:
    """A loop nest matched to an intrinsic.

    Attributes:
        accesses: Access of each operand.
        loops: For each loop variable of the semantics, the variable of the nest. Loops of one iteration may be absent.
        sizes: Extent of each symbol of the semantics.
    """

    accesses: Mapping[str, Access]
    loops: Mapping[Var, Var]
    sizes: Mapping[str, Expr]


def match(intrinsic: Intrinsic, loops: Sequence[For], store: BufferStore) -> Matched | None:
    """Match a loop nest to an intrinsic; None if it computes something else.

    The values must agree up to the order of sums and products. The index of each operand must be linear in the loops that its indices in
    the semantics name, and independent of others. The loops of the last index of a dense operand must have the strides of the semantics.

    Args:
        loops: The loops of the nest, outermost first. Only their variables, extents, kinds and axes are compared.
    """
    env = Env()
    for f in loops:
        env = env.with_loop(f.var, f.extent)
    # simplified, since a condition on a step may mention outer loops that do not affect it
    value = transform(store.value, lambda e: simplify(e, env) if e.dtype is bool_ else None)
    store = BufferStore(store.buffer, store.indices, value)
    for pattern in intrinsic.nests():
        matched = _match(pattern, intrinsic, loops, store)
        if matched is not None:
            return matched
    return None


def _match(pattern: Sequence[For], intrinsic: Intrinsic, loops: Sequence[For], store: BufferStore) -> Matched | None:
    if len(pattern) != len(loops):
        return None
    missing = [f for f in intrinsic.loops if f not in pattern]
    sizes: dict[str, Expr] = {f.extent.name: const(1) for f in missing if isinstance(f.extent, Var)}
    for f, g in zip(pattern, loops):
        if isinstance(f.extent, Var):
            sizes[f.extent.name] = g.extent
        if (f.kind, f.axis) != (g.kind, g.axis) or as_int(f.extent) not in (None, as_int(g.extent)):
            return None
    semantic = nest_of(intrinsic.semantics.body)
    assert semantic is not None
    semantic_store = semantic[1]
    variables = {f.var: g.var for f, g in zip(pattern, loops)}
    accesses: dict[str, Access] = {}
    if not _bind(accesses, semantic_store, (store.buffer, store.indices)):
        return None
    if not _same(semantic_store.value, store.value, variables, accesses):
        return None
    items = {g.var for g in loops if g.kind == "item"}
    for b, indices in accesses_of(semantic_store):
        parts = {g.var for f, g in zip(pattern, loops) if intrinsic.warp_operands.get(b.name) == f.var.name}
        if not _is_linear(accesses[b.name], indices, variables, loops, items | parts, b.name in intrinsic.dense):
            return None
    # the bodies assume that the written tile overlaps no operand
    others = [buffer for name, (buffer, _) in accesses.items() if name != semantic_store.buffer.name]
    return None if store.buffer in others else Matched(accesses, variables, sizes)


def _bind(accesses: dict[str, Access], pattern: BufferStore | Load, access: Access) -> bool:
    """Bind an operand of the semantics to an access. Return False if it is bound to another one."""
    if pattern.buffer.dtype is not access[0].dtype:
        return False
    return accesses.setdefault(pattern.buffer.name, access) == access


def _same(pattern: Expr, e: Expr, variables: Mapping[Var, Var], accesses: dict[str, Access]) -> bool:
    """Return whether `e` computes the same as an expression of the semantics; bind its operands."""
    if isinstance(pattern, Load):
        return isinstance(e, Load) and _bind(accesses, pattern, (e.buffer, e.indices))
    if isinstance(pattern, Var):
        return variables.get(pattern) is e
    if isinstance(pattern, Const) or not isinstance(pattern, Op):
        return pattern is e
    if not isinstance(e, Op) or (e.op, e.dtype, len(e.args)) != (pattern.op, pattern.dtype, len(pattern.args)):
        return False
    # sums and products commute; a failed attempt must not leave bindings
    orders = [e.args, e.args[::-1]] if pattern.op in ("add", "mul") else [e.args]
    for args in orders:
        trial = dict(accesses)
        if all(_same(a, b, variables, trial) for a, b in zip(pattern.args, args)):
            accesses.update(trial)
            return True
    return False


def _is_linear(
    access: Access,
    indices: Sequence[Expr],
    variables: Mapping[Var, Var],
    loops: Sequence[For],
    items: set[Var],
    dense: bool,
) -> bool:
    """Return whether an access is linear in the loops of its indices in the semantics, and independent of others.

    A dense operand must have the strides of the semantics along its last dimension. An operand that is private to a work-item need not
    depend on the items.

    Args:
        indices: Indices of the operand in the semantics.
        items: Variables of the nest that number work-items.
    """
    env = Env()
    for f in loops:
        env = env.with_loop(f.var, f.extent)
    single = {f.var for f in loops if as_int(f.extent) == 1}
    expected = {variables[v] for v in free_vars(*indices) if v in variables} - single
    last_index = linear(indices[-1], tuple(variables)) if dense else None
    steps = {} if last_index is None else {variables[v]: as_int(k) for v, k in last_index[0].items()}
    actual = set[Var]()
    for d, e in enumerate(access[1]):
        parts = linear(e, tuple(f.var for f in loops), env)
        if parts is None:
            return False
        actual |= parts[0].keys() - single
        last = d == len(access[1]) - 1
        if any((as_int(k) if last else None) != steps[v] for v, k in parts[0].items() if v in steps):
            return False
    if actual == expected:
        return True
    return access[0].scope == "local" and actual | items == expected | items and actual <= expected
