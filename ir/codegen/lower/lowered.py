"""Lower blocks to plain statements, bind quotients of loop variables, and note the ranges of bound variables.

Tests: `tests/ir/codegen/test_fused_loops.py`, `tests/ir/codegen/test_text.py`.
"""

from __future__ import annotations

from dataclasses import replace

from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    Load,
    Var,
    add,
    as_int,
    ceildiv,
    const,
    floordiv,
    free_vars,
    load,
    loads,
    maximum,
    minimum,
    mul,
    postorder,
    rebuild,
    replaced,
    sub,
    substitute,
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
ONE = const(1)


def lower_blocks(s: Stmt) -> Stmt:
    """Replace blocks by stores under their predicates and initialisations."""
    if isinstance(s, Block):
        return lower_blocks(lower_block(s))
    if isinstance(s, For) and isinstance(s.body, Block) and is_tree_reduction(s, s.body):
        guarded = lower_blocks(replace(s.body, predicate=TRUE))
        return when(s.body.predicate, For(s.var, s.extent, guarded, "unrolled", marks=LoopMarks(tree_reduce=True)))
    if isinstance(s, IfThenElse):
        return when(s.cond, lower_blocks(s.then), None if s.orelse is None else lower_blocks(s.orelse))
    return s.with_children(tuple(map(lower_blocks, s.children)))


def is_tree_reduction(s: For, b: Block) -> bool:
    """Return whether a loop is `x = op(x, local[..., loop variable])` over a reduction iterator.

    Its iterations may be reordered, so that the printers can reduce vector registers as a tree.
    """
    if b.init is not None or s.var in free_vars(b.predicate) or s.kind not in COMBINING_KINDS:
        return False
    iters = [i for i, e in zip(b.iters, b.bindings, strict=True) if e is s.var and i.kind == "reduce"]
    source = combined_load(b.body)
    if len(iters) != 1 or source is None or source.buffer.scope != "local":
        return False
    var = iters[0].var
    # Only the last index may move: the terms are then the lanes of one vector.
    others = (*b.body.indices, *source.indices[:-1], *(e for e in b.bindings if e is not s.var))
    return source.indices[-1] is var and not {var, s.var} & set(free_vars(*others))


def combined_load(s: BufferStore) -> Load | None:
    """Return the load of `x = op(x, load)` from another buffer; None for other stores."""
    if s.value.op not in COMBINING_OPS or s.value.args[0] is not load(s.buffer, s.indices):
        return None
    source = s.value.args[1]
    return source if isinstance(source, Load) and source.buffer is not s.buffer else None


def hoist_divmod(n: Stmt, algebra: Algebra) -> Stmt:
    """Bind quotients and remainders of a parallel loop's variable at the start of the loop's body, if they do not change in inner loops.

    Only int64 indices are hoisted, and none that depend on elements that the loop writes. A divisor that may be 0 is replaced by
    max(divisor, 1): the hoisted division is evaluated even if the condition or inner loop around the original is not entered.
    """
    if not isinstance(n, For) or n.kind != "parallel":
        return n.with_children(tuple(hoist_divmod(c, algebra) for c in n.children))
    inner = bound_vars(n.body)
    written = {s.buffer for s in stores(n.body)}
    hoisted: dict[Expr, Var] = {}
    variables: dict[object, Var] = {}  # by normal form: the same quotient may be written in several ways

    def with_hoisted(e: Expr) -> Expr:
        return transform(e, lambda x: hoisted.get(x))

    def reads_written(e: Expr) -> bool:
        return any(isinstance(x, Load) and x.buffer in written for x in postorder((e,)))

    bound: list[tuple[Var, Expr]] = []
    for m in walk(n.body):
        for e in postorder(m.own_exprs):
            if e.op in DIVIDING and e.dtype is i64 and n.var in (used := set(free_vars(e))):
                short, least = with_hoisted(e), algebra.interval(algebra.static(e.args[1]))[0]
                # A negative divisor cannot be guarded by max(divisor, 1), which a divisor of 0 needs: the statement
                # may be under a condition that excludes it.
                if inner.isdisjoint(used) and short.op and not reads_written(e) and least is not None and least >= 0:
                    dividend, divisor = short.children
                    key = short.op, _key(algebra, dividend), _key(algebra, divisor)
                    if key not in variables:
                        variables[key] = Var(f"{n.var.name}_{'q' if e.op == 'floordiv' else 'r'}")
                        safe = short if least else rebuild(short, (dividend, maximum(divisor, 1)))
                        bound.append((variables[key], safe))
                    hoisted[short] = variables[key]
    body = map_exprs(n.body, with_hoisted) if hoisted else n.body
    # The first one becomes outermost, because later values may use it.
    for v, e in reversed(bound):
        body = Let(v, e, body)
    return replace(n, body=body)


def nest_fused_loops(s: Stmt, algebra: Algebra) -> Stmt:
    """Run a chunk of a fused loop as a nest with one loop per dim, so that no iteration divides.

    Before: `for t in range(n): ... (a + t) // d ... (a + t) % d`, where d is symbolic
    After: `for q in range(a // d, ceil((a + n) / d)): for r in range(max(a - q * d, 0), min(a + n - q * d, d)): ... q ... r`
    """
    while isinstance(s, For) and s.kind == "serial" and s.marks == LoopMarks():
        divisions = _divisions(s, algebra)
        if divisions is None:
            break
        s = _nest(s, *divisions, algebra)
        note_ranges(algebra, s)
    return s.with_children(tuple([nest_fused_loops(c, algebra) for c in s.children]))


def _divisions(f: For, algebra: Algebra) -> tuple[Expr, Expr, dict[object, Expr]] | None:
    """Return the index `a + t` of a fused loop over t, its innermost divisor, and `_strides`; None if all divisors are constants."""
    inner = bound_vars(f.body) | {f.var}
    for m in walk(f.body):
        for e in postorder(m.own_exprs):
            if e.op != "floormod" or e.dtype is not i64:
                continue
            index, divisor = e.args
            base = dict(algebra.poly(index))
            if base.pop((f.var,), 0) != 1 or loads(index, divisor) or algebra.depends(base, inner):
                continue
            least = algebra.interval(algebra.static(divisor))[0]
            if not inner.isdisjoint(free_vars(divisor)) or least is None or least < 0:
                continue
            strides = _strides(f, index, divisor, algebra)
            # Compilers replace divisions by constants with multiplications, so such loops gain nothing.
            if as_int(divisor) is None or any(as_int(stride) is None for stride in strides.values()):
                return index, divisor, strides
    return None


def _nest(f: For, index: Expr, divisor: Expr, strides: dict[object, Expr], algebra: Algebra) -> Stmt:
    """Return the loop over `index` as one over its quotients around one over its remainders."""
    dividend = algebra.poly(index)
    first = substitute(index, {f.var: const(0)})
    size = divisor if (algebra.interval(algebra.static(divisor))[0] or 0) >= 1 else maximum(divisor, 1)
    start, row, left, r = (Var(f"{f.var.name}_{part}") for part in ("row", "rows", "left", "r"))
    q, end = add(start, row), add(first, f.extent)
    # the loops of a nest are one loop for the lifetime of buffers (`shrink_buffers`), also if one of them is nested again
    nest = (algebra.nests.get(f.var, frozenset()) - {f.var}) | {row, r}
    algebra.nests |= dict.fromkeys(nest, nest)

    def change(e: Expr) -> Expr | None:
        if e is f.var:
            return sub(add(add(mul(q, size), left), r), first)
        if e.op not in DIVIDING or e.dtype is not i64 or algebra.poly(e.args[0]) != dividend:
            return None
        # index = q * size + left + r with left + r < size, so quotients by multiples of `size` are quotients of q
        stride = strides.get(_key(algebra, e.args[1]))
        if stride is None or (e.op == "floormod" and stride is not ONE):
            return None
        return floordiv(q, stride) if e.op == "floordiv" else add(left, r)

    width = maximum(sub(minimum(sub(end, mul(q, size)), size), left), 0)
    columns = For(r, width, map_exprs(f.body, lambda e: replaced(e, change)))
    rows = For(row, sub(ceildiv(end, size), start), Let(left, maximum(sub(first, mul(q, size)), 0), columns))
    return Let(start, floordiv(first, size), rows)


def _strides(f: For, index: Expr, divisor: Expr, algebra: Algebra) -> dict[object, Expr]:
    """Return, for every divisor of a fused index that is `divisor` times sizes of outer dims, the product of those sizes.

    The result is keyed by `_key` of the divisors.
    """
    dividend = algebra.poly(index)
    strides: dict[object, Expr] = {_key(algebra, divisor): ONE}
    rests = [
        e for m in walk(f.body) for e in postorder(m.own_exprs) if e.op == "floormod" and e.args[0].op == "floordiv"
    ]
    rests = [e for e in dict.fromkeys(rests) if e.dtype is i64 and algebra.poly(e.args[0].args[0]) == dividend]
    while rests:
        known = [e for e in rests if _key(algebra, e.args[0].args[1]) in strides]
        if not known:
            break
        for e in known:
            by, size = e.args[0].args[1], e.args[1]
            strides.setdefault(_key(algebra, mul(by, size)), mul(strides[_key(algebra, by)], size))
        rests = [e for e in rests if e not in known]
    return strides


def _key(algebra: Algebra, e: Expr) -> object:
    return frozenset(algebra.poly(e).items())


def note_ranges(algebra: Algebra, s: Stmt) -> None:
    """Record for every bound variable an interval that contains its values in all statements that bind it."""

    def note(var: Var, values: Interval) -> None:
        old = algebra.ranges.get(var)
        if old is not None:
            low = None if old[0] is None or values[0] is None else min(old[0], values[0])
            high = None if old[1] is None or values[1] is None else max(old[1], values[1])
            values = low, high
        algebra.ranges[var] = values

    for m in walk(s):
        if isinstance(m, For):
            extent = as_int(m.extent)
            high = extent if extent is not None else algebra.interval(algebra.static(m.extent))[1]
            note(m.var, (0, None if high is None else max(high - 1, 0)))
        elif isinstance(m, Let) and m.var not in algebra.ranges:
            # A tail's Let keeps the range of the loop that was split.
            note(m.var, algebra.interval(algebra.static(m.value)))
