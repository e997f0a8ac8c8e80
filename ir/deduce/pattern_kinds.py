"""Compute patterns of tensor functions, derived from their loops (paper section 4.2). They decide which functions may fuse.

Tests: `tests/ir/passes/fusion/test_fuse.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Const, Expr, Load, Var, const, free_vars, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.plain_loops import all_loads, block_loads, plain_blocks
from relax_tune.ir.core.scalar_ops import MATH
from relax_tune.ir.core.stmt import Block, IterVar


class PatternKind(IntEnum):
    """The dependence of output elements on input elements; a larger kind is harder to fuse."""

    ELEMENTWISE = 0
    """`y[i] = f(x[i])`"""
    BROADCAST = 1
    """... where some inputs lack some of the axes"""
    INJECTIVE = 2
    """each output element is computed from elements at any indices, gathers included"""
    REDUCTION = 3
    """sums and maxima over axes, and row functions that combine them"""
    OUT_FUSIBLE = 4
    """matmul-like: operands are reused, elementwise work may follow"""
    CHAIN = 5
    """several products with work on rows between them (attention); their operands may be moved, and the result"""
    OPAQUE = 8
    """anything else"""


class Access(IntEnum):
    """The indices of a read relative to the indices of the write."""

    IDENTITY = 0
    PERMUTATION = 1
    BROADCAST = 2
    OTHER = 3


def store_axes(block: Block) -> tuple[Var, ...] | None:
    """Return the indices of the store if they are all spatial iterators, each once, and cover the whole buffer."""
    spatial = {i.var: i.extent for i in block.iters if i.kind == "spatial"}
    axes = tuple(v for v in block.body.indices if isinstance(v, Var) and v in spatial)
    if len(axes) != len(block.body.indices) or len(set(axes)) != len(axes) or set(axes) != set(spatial):
        return None
    covers = all(
        spatial[v] is d or prove_equal(spatial[v], d) is Proof.YES
        for v, d in zip(axes, block.body.buffer.shape, strict=True)
    )
    return axes if covers else None


def access_of(block: Block, read: Load) -> Access:
    """Return the relation of `read` to the element that `block` writes."""
    axes = store_axes(block)
    # A read of a part of its buffer is no elementwise access, even at the same indices: the producer has more
    # elements than the reader.
    if axes is None or not _is_whole(block, read):
        return Access.OTHER
    if read.indices == axes:
        return Access.IDENTITY
    names = [i for i in read.indices if isinstance(i, Var) and i in axes]
    if len(names) == len(read.indices) and set(names) == set(axes) and len(names) == len(axes):
        return Access.PERMUTATION
    fixed = all(isinstance(i, Const) for i in read.indices if i not in names)
    order = [axes.index(v) for v in names]
    return Access.BROADCAST if fixed and order == sorted(set(order)) else Access.OTHER


def _is_whole(block: Block, read: Load) -> bool:
    """Return whether the iterators that each are one index of `read` cover its dims: a slice from 0 reads a part."""
    extents = {i.var: i.extent for i in block.iters}
    known = ((extents[i], d) for i, d in zip(read.indices, read.buffer.shape) if isinstance(i, Var) and i in extents)
    return all(e is d or prove_equal(e, d) is Proof.YES for e, d in known)


def block_kind(block: Block) -> PatternKind:
    """Return the pattern of one plain block."""
    if store_axes(block) is None:
        return PatternKind.OPAQUE
    if block.is_reduction:
        return _reduction_kind(block)
    accesses = [access_of(block, r) for r in block_loads(block)]
    if any(a in (Access.OTHER, Access.PERMUTATION) for a in accesses):
        return PatternKind.INJECTIVE
    if all(a is Access.IDENTITY for a in accesses):
        return PatternKind.ELEMENTWISE
    return PatternKind.BROADCAST


def accumulated(block: Block) -> Expr | None:
    """Return `v` of a reduction `T = T + v`, `T * v`, `max(T, v)` or `min(T, v)`; None for any other step."""
    value, target = block.body.value, (block.body.buffer, block.body.indices)
    if value.op not in ("add", "mul", "max", "min"):
        return None
    for partial, other in (value.args, value.args[::-1]):
        if isinstance(partial, Load) and (partial.buffer, partial.indices) == target:
            # A term that reads the accumulated buffer again is a recurrence, whose order must not change.
            return None if any(r.buffer is partial.buffer for r in all_loads((other,))) else other
    return None


NEUTRAL: Mapping[str, float] = {"add": 0.0, "mul": 1.0}


def starts_neutral(block: Block) -> bool:
    """Return whether a reduction's initial value may be combined more than once."""
    if accumulated(block) is None or block.init is None:
        return False
    operation, value = block.body.value.op, block.init.value
    return operation not in NEUTRAL or (isinstance(value, Const) and value.value == NEUTRAL[operation])


@dataclass(frozen=True, slots=True)
class ScanPattern:
    """A reduction whose term counts up to the position of the result: `Y[i] = op_k select(k <= i, x(k), neutral)`.

    Attributes:
        position: iterator of i.
        step: iterator of k.
        term: x(k).
        neutral: the value of terms that do not count.
        exclusive: k < i instead of k <= i.
        reverse: k counts from the end.
    """

    operation: str
    position: IterVar
    step: IterVar
    term: Expr
    neutral: Expr
    exclusive: bool
    reverse: bool


def prefix_scan(block: Block, resumed: bool = False) -> ScanPattern | None:
    """Return the pattern of a prefix scan; None for any other block.

    Args:
        resumed: also match a part of a scan, whose rows continue earlier sums and whose positions belong to a longer axis.
    """
    value, steps = accumulated(block), [i for i in block.iters if i.kind == "reduce"]
    if value is None or block.init is None or len(steps) != 1 or value.op != "select":
        return None
    if not resumed and not starts_neutral(block):
        return None
    (condition, term, neutral), (step,) = value.args, steps
    position = next((i for i in block.iters if i.kind == "spatial" and i.var in condition.args), None)
    directions: dict[tuple[Expr, ...], bool] = (
        {} if position is None else {(step.var, position.var): False, (position.var, step.var): True}
    )
    reverse = directions.get(condition.args) if condition.op in ("le", "lt") else None
    if position is None or reverse is None or position.var in free_vars(term):
        return None
    scanned = [e for e in block.body.indices if position.var in free_vars(e)]
    if resumed:
        parts = linear(scanned[0], (position.var,)) if len(scanned) == 1 else None
        if parts is None or parts[0].get(position.var) is not const(1) or position.var in free_vars(block.init.value):
            return None
        if not isinstance(neutral, Const) or neutral.value != NEUTRAL.get(block.body.value.op):
            return None
    elif neutral is not block.init.value or scanned != [position.var]:
        return None
    return ScanPattern(block.body.value.op, position, step, term, neutral, condition.op == "lt", reverse)


def operands(block: Block) -> tuple[Expr, Expr] | None:
    """Return the two factors of a matmul-like reduction, else None.

    It is a sum of products in which each factor lacks a spatial axis that the other has, so that both are reused.
    """
    v = accumulated(block)
    value = block.body.value
    if v is None or v.op != "mul" or value.op != "add":
        return None
    # Batch axes, which both factors have, say nothing: without an axis of their own on either side nothing is reused
    # (a dot product or a matrix-vector product).
    spatial = {i.var for i in block.iters if i.kind == "spatial"}
    left, right = (spatial & set(free_vars(f)) for f in v.args)
    loads = [all_loads((f,)) for f in v.args]
    if all(loads) and left - right and right - left:
        return v.args[0], v.args[1]
    return None


def windowed(block: Block) -> frozenset[Buffer]:
    """Return the buffer whose elements a sum of products with weights reads through windows, each for several results.

    Depthwise and grouped convolutions have one too, but their weights lack an axis. Weights are read as they are;
    places are sums of multiples, not rounded as in resampling."""
    v = accumulated(block)
    if v is None or v.op != "mul" or block.body.value.op != "add":
        return frozenset()
    # An axis of one iteration does not slide: a 1 x 1 convolution is a matrix product.
    kinds = {i.var: i.kind for i in block.iters if i.extent is not const(1)}

    def slides(e: Expr) -> bool:
        iterators = [x for x in free_vars(e) if x in kinds]
        return {kinds[x] for x in iterators} == {"spatial", "reduce"} and linear(e, iterators) is not None

    for source, other in (v.args, v.args[::-1]):
        weights = other.args[0] if other.op == "cast" else other
        if isinstance(weights, Load) and all(isinstance(e, Var) for e in weights.indices):
            buffers = {x.buffer for x in all_loads((source,)) if any(map(slides, x.indices))}
            if buffers and weights.buffer not in buffers:
                return frozenset(buffers)
    return frozenset()


def _reduction_kind(block: Block) -> PatternKind:
    if accumulated(block) is None or block.init is None:
        return PatternKind.OPAQUE
    reuses = operands(block) is not None or bool(windowed(block))
    return PatternKind.OUT_FUSIBLE if reuses else PatternKind.REDUCTION


def pattern_kind(func: PrimFunc) -> PatternKind:
    """Return the pattern of a whole tensor function, derived from its loops."""
    blocks = plain_blocks(func)
    if blocks is None:
        return PatternKind.OPAQUE
    kinds = [block_kind(b) for b in blocks]
    if PatternKind.OPAQUE in kinds:
        return PatternKind.OPAQUE
    products = kinds.count(PatternKind.OUT_FUSIBLE)
    if products == 0 or len(kinds) == 1:
        return max(kinds)
    # Attention is two products with a softmax between them. Two products without a reduction have no rule that
    # schedules them as one function.
    if products > 1 and PatternKind.REDUCTION in kinds:
        return PatternKind.CHAIN
    at = kinds.index(PatternKind.OUT_FUSIBLE)
    after = zip(blocks[at + 1 :], kinds[at + 1 :], strict=True)
    if products > 1 or PatternKind.REDUCTION in kinds or not all(_keeps_tile(b, k, blocks[at]) for b, k in after):
        return PatternKind.OPAQUE
    return PatternKind.OUT_FUSIBLE


def _keeps_tile(block: Block, kind: PatternKind, product: Block) -> bool:
    if kind <= PatternKind.BROADCAST:
        return True
    reads = [r for r in block_loads(block) if r.buffer is product.body.buffer]
    return all(access_of(block, r) in (Access.IDENTITY, Access.PERMUTATION) for r in reads)


def output_access(func: PrimFunc, position: int) -> Access:
    """Return the access to input `position` in a function of one spatial block; OTHER for any other function."""
    blocks = plain_blocks(func)
    if blocks is None or len(blocks) != 1 or blocks[0].is_reduction:
        return Access.OTHER
    buffer = func.input_buffers[position]
    return max((access_of(blocks[0], r) for r in block_loads(blocks[0]) if r.buffer is buffer), default=Access.OTHER)


def is_movement(block: Block) -> bool:
    """Return whether a spatial block only moves values: its value is one read."""
    return not block.is_reduction and isinstance(block.body.value, Load)


def is_trivial(block: Block) -> bool:
    """Return whether repeating a spatial block is free: it reads one element and at most casts it."""
    value = block.body.value
    if value.op == "cast":
        value = value.args[0]
    return not block.is_reduction and isinstance(value, Load) and not all_loads(value.indices)


def uses_math(func: PrimFunc) -> bool:
    """Return whether any element needs a transcendental function or a division."""
    blocks = plain_blocks(func) or ()
    nodes = postorder(b.body.value for b in blocks)
    return any(n.op in MATH or n.op == "div" for n in nodes)
