"""Choose the vectorised loops that become vectors, and their widths.

A loop becomes vectors if its extent is constant, it contains no other vectorised loop and few gathers, operations printed lane by lane
repeat little, and every condition on the loop's variable has the form `x + variable < bound` (a prefix of the lanes). Other vectorised
loops become serial or unrolled.

Tests: `tests/ir/codegen/test_lane_conditions.py`, `tests/ir/codegen/test_repeated_operands.py`.
"""

from __future__ import annotations

from dataclasses import replace

from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.codegen.lower.guards import slack_below
from relax_tune.ir.codegen.lower.narrow_ints import power_of_two
from relax_tune.ir.codegen.print.prelude import FUNCTIONS, computed
from relax_tune.ir.codegen.print.transpose_registers import mark_transpose
from relax_tune.ir.core.dtype import bool_, f32, f64, i8, i32, u8
from relax_tune.ir.core.expr import Expr, Load, Var, as_int, conjuncts, free_vars, loads, postorder
from relax_tune.ir.core.scalar_ops import BITS, DIVISIONS, MATH
from relax_tune.ir.core.stmt import BufferStore, For, IfThenElse, Stmt, accesses, loops, rewrite, walk

VECTORS = (f32, f64, i32)
UNROLL_LIMIT = 64
FOLD_LIMIT = 256
CHUNK_LIMIT = 16
REPEATED_LIMIT = 24
"""Most operations that printing lane by lane may repeat in every lane."""
GATHER_LIMIT = 32
"""Most gathers of a vector: each is printed once per lane, with its index."""


def choose_vectors(n: Stmt, algebra: Algebra, lanes: int, reasons: dict[Var, str] | None = None) -> Stmt:
    """Make vectorised loops that cannot be vectors serial or unrolled. The two loops of a transposing copy both stay vectorised.

    Args:
        reasons: Receives the reason of each loop that is no vector.
    """
    reasons = {} if reasons is None else reasons

    def visit(m: Stmt) -> Stmt:
        if not isinstance(m, For) or m.kind != "vectorized":
            return m
        extent = as_int(m.extent)
        if extent is None:
            reasons[m.var] = f"its extent {m.extent!r} is not constant"
            return replace(m, kind="serial")
        if loops(m.body, "vectorized"):
            marked = mark_transpose(m, algebra, lanes)
            if marked.marks.transpose:
                return marked
            reasons[m.var] = f"the loop {loops(m.body, 'vectorized')[0].var.name!r} below it is one"
            return replace(m, kind="unrolled" if extent <= 8 else "serial")
        reason = _why_no_vector(m, algebra)
        if reason:
            reasons[m.var] = reason
        return replace(m, kind="serial") if reason else m

    return rewrite(n, visit)


def _why_no_vector(f: For, algebra: Algebra) -> str:
    """Return why a loop cannot be vectors; empty if it can."""
    v = f.var
    reads = {x for m in walk(f.body) for x in loads(*m.own_exprs)}
    if sum(_is_gather(x, v, algebra) for x in reads) > GATHER_LIMIT:
        return f"it has more than {GATHER_LIMIT} reads at irregular distances"
    if any(_repeats(m.value, v) for m in walk(f.body) if isinstance(m, BufferStore)):
        return "most of its operations have no vector form"
    for m in walk(f.body):
        if m.bound_vars:
            # an inner loop or a Let would have another extent or value in every lane
            if any(v in algebra.free(e) for e in m.own_exprs):
                return "the extent of a loop below differs between its iterations"
        elif isinstance(m, IfThenElse):
            if any(v in algebra.free(c) and not is_prefix(c, v, algebra) for c in conjuncts(m.cond)):
                return f"the condition {m.cond!r} does not select its first iterations"
            # masked regions have no else branch
            if m.orelse is not None and v in algebra.free(m.cond):
                return f"the condition {m.cond!r} has another branch"
        elif isinstance(m, BufferStore) and not any(v in algebra.free(i) for i in m.indices):
            # all lanes store to one element, which is correct only if they store the same value
            carried = any(x.buffer is m.buffer for x in loads(m.value))
            if carried or v in algebra.free(m.value):
                return f"all its iterations store to one element of {m.buffer.name!r}"
    return ""


def _repeats(value: Expr, v: Var) -> bool:
    """Return whether printing `value` lane by lane would repeat many operations.

    Operations without a vector form are printed so, and their operands then cannot be temporaries.
    """
    sizes: dict[Expr, int] = {}
    by_lane: Expr | None = None
    for n in postorder((value,)):
        sizes[n] = 1 + sum(sizes[a] for a in n.children)
        gathers = isinstance(n, Load) and any(v in free_vars(i) and loads(i) for i in n.indices)
        if gathers or (has_no_vector(n) and v in free_vars(n)):
            by_lane = n
    return by_lane is not None and sizes[by_lane] - sum(1 for _ in postorder((by_lane,))) > REPEATED_LIMIT


def has_no_vector(e: Expr) -> bool:
    """Return whether the printers have no vector form of an operation. Casts of indices to numbers have a vector form."""
    kinds = [computed(a.dtype) for a in e.args]
    if e.op in ("", "and", "or", "not"):
        return False
    if e.op in DIVISIONS:
        # No vector extension before SVE divides integers; a power of two is a shift or a mask.
        return e.dtype is not i32 or power_of_two(e.args[1]) is None
    if e.op in BITS:
        return e.dtype is not i32 or e.op not in ("bitwise_and", "bitwise_or", "bitwise_xor")
    if e.op in MATH:
        return e.op not in FUNCTIONS or computed(e.dtype) not in VECTORS
    if e.op == "cast":
        return kinds[0] not in (*VECTORS, i8, u8, bool_) or computed(e.dtype) not in (*VECTORS, i8, u8, bool_)
    return computed(e.dtype) not in (*VECTORS, bool_) or any(k not in (*VECTORS, bool_) for k in kinds)


def _is_gather(x: Load, v: Var, algebra: Algebra) -> bool:
    """Return whether successive iterations of `v` read addresses at varying distances."""
    return any(v in algebra.free(a) for i in x.indices for m in algebra.static(i) for a in m if m != (v,))


def is_prefix(c: Expr, v: Var, algebra: Algebra) -> bool:
    """Return whether `c` is `x + v < bound` (or <=) with neither x nor bound depending on v."""
    slack = slack_below(c, algebra.static)
    if slack is None or slack.get((v,)) != -1:
        return False
    return not any(v in algebra.free(a) for m in slack if m != (v,) for a in m)


def loop_lanes(f: For, lanes: int) -> int:
    """Return the vector width of a loop, which is smaller if it computes with elements wider than f32."""
    wide = max((b.dtype.bytes for b, _i, _w in accesses(f.body) if b.dtype.is_float), default=4)
    return max(lanes * 4 // max(wide, 4), 1)


def chunks(extent: int, lanes: int) -> tuple[tuple[int, int], ...]:
    """Return (start, width) of the chunks of a vectorised loop: full vectors, then descending powers of two."""
    pieces: list[tuple[int, int]] = []
    at, width = 0, lanes
    while at < extent:
        # A constant rest is covered by narrower vectors, which need no mask.
        while width > extent - at:
            width //= 2
        pieces.append((at, width))
        at += width
    return tuple(pieces)


def is_expanded(f: For, lanes: int) -> bool:
    """Return whether the printer unrolls every iteration (or vector) of a loop."""
    extent = as_int(f.extent)
    if extent is None:
        return False
    if f.kind == "unrolled":
        return extent <= (FOLD_LIMIT if f.marks.tree_reduce else UNROLL_LIMIT)
    return f.kind == "vectorized" and len(chunks(extent, loop_lanes(f, lanes))) <= CHUNK_LIMIT
