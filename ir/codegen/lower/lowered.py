"""From blocks to plain statements, with quotients of loop variables bound once, and the ranges of bound variables."""

from __future__ import annotations

from dataclasses import replace

from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    Load,
    Var,
    as_int,
    free_vars,
    load,
    maximum,
    postorder,
    rebuild,
    transform,
)
from relax_tune.ir.core.intervals import Interval
from relax_tune.ir.core.stmt import (
    Block,
    BufferStore,
    For,
    IfThenElse,
    Let,
    LoopMarks,
    Stmt,
    bound_vars,
    lower_block,
    map_exprs,
    stores,
    walk,
    when,
)

COMBINING_KINDS = ("serial", "unrolled", "vectorized")
COMBINING_OPS = ("add", "mul", "max", "min")
DIVIDING = frozenset({"floordiv", "floormod"})


def lower_blocks(s: Stmt) -> Stmt:
    """Replace blocks by stores under their predicates and initialisations."""
    if isinstance(s, Block):
        return lower_blocks(lower_block(s))
    if isinstance(s, For) and isinstance(s.body, Block) and is_tree_reduction(s, s.body):
        one = lower_blocks(replace(s.body, predicate=TRUE))
        return when(s.body.predicate, For(s.var, s.extent, one, "unrolled", marks=LoopMarks(tree_reduce=True)))
    if isinstance(s, IfThenElse):
        return when(s.cond, lower_blocks(s.then), None if s.orelse is None else lower_blocks(s.orelse))
    return s.with_children(tuple(map(lower_blocks, s.children)))


def is_tree_reduction(s: For, b: Block) -> bool:
    """Return whether a loop is `place = op(place, local[..., loop variable])` over a reduction iterator.

    The order of such a loop is free.
    """
    if b.init is not None or s.var in free_vars(b.predicate) or s.kind not in COMBINING_KINDS:
        return False
    of_loop = [i for i, e in zip(b.iters, b.bindings, strict=True) if e is s.var and i.kind == "reduce"]
    source = combined_load(b.body)
    if len(of_loop) != 1 or source is None or source.buffer.scope != "local":
        return False
    var = of_loop[0].var
    others = (*b.body.indices, *source.indices[:-1], *(e for e in b.bindings if e is not s.var))
    return source.indices[-1] is var and not {var, s.var} & set(free_vars(*others))


def combined_load(s: BufferStore) -> Load | None:
    """Return the load of `place = op(place, load)` from another buffer; None for other stores."""
    if s.value.op not in COMBINING_OPS or s.value.args[0] is not load(s.buffer, s.indices):
        return None
    source = s.value.args[1]
    return source if isinstance(source, Load) and source.buffer is not s.buffer else None


def hoist_divmod(n: Stmt, algebra: Algebra) -> Stmt:
    """Bind quotients and remainders of parallel loop variables to variables at the loop's start, if no inner loop moves them.

    Those are indices: values of other types wrap, and elements that the loop writes are not there yet. Where the divisor may be 0,
    an inner loop that runs no iteration or a condition kept the division from being computed: there it is by 1."""
    if not isinstance(n, For) or n.kind != "parallel":
        return n.with_children(tuple(hoist_divmod(c, algebra) for c in n.children))
    inner = bound_vars(n.body)
    written = {s.buffer for s in stores(n.body)}
    found: dict[Expr, Var] = {}

    def replace_found(e: Expr) -> Expr:
        return transform(e, lambda x: found.get(x))

    def moved(e: Expr) -> bool:
        return any(isinstance(x, Load) and x.buffer in written for x in postorder((e,)))

    bound: list[tuple[Var, Expr]] = []
    for m in walk(n.body):
        for e in postorder(m.own_exprs):
            if e.op in DIVIDING and e.dtype is i64 and n.var in (used := set(free_vars(e))):
                short, least = replace_found(e), algebra.interval(algebra.static(e.args[1]))[0]
                if inner.isdisjoint(used) and short.op and not moved(e) and least is not None and least >= 0:
                    found[short] = Var(f"{n.var.name}_{'q' if e.op == 'floordiv' else 'r'}")
                    over, under = short.children
                    bound.append((found[short], short if least else rebuild(short, (over, maximum(under, 1)))))
    body = map_exprs(n.body, replace_found) if found else n.body
    for v, e in reversed(bound):
        body = Let(v, e, body)
    return replace(n, body=body)


def note_ranges(algebra: Algebra, s: Stmt) -> None:
    """Record for every bound variable the hull of its values."""

    def note(var: Var, found: Interval) -> None:
        old = algebra.ranges.get(var)
        if old is not None:
            low = None if old[0] is None or found[0] is None else min(old[0], found[0])
            high = None if old[1] is None or found[1] is None else max(old[1], found[1])
            found = low, high
        algebra.ranges[var] = found

    for m in walk(s):
        if isinstance(m, For):
            extent = as_int(m.extent)
            high = extent if extent is not None else algebra.interval(algebra.static(m.extent))[1]
            note(m.var, (0, None if high is None else max(high - 1, 0)))
        elif isinstance(m, Let) and m.var not in algebra.ranges:  # a split loop takes no other values
            note(m.var, algebra.interval(algebra.static(m.value)))
