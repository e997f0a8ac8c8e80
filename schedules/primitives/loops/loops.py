"""Primitives on loops: split, fuse, reorder, set_kind, set_tail, nontemporal_stores, prefetch, copy_async,
fuse_sibling_loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.injectivity import separates
from relax_tune.ir.arith.linear import extent_of, linear
from relax_tune.ir.arith.prove import Proof, prove, refuted
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import (
    Expr,
    ExprLike,
    Load,
    Var,
    and_,
    as_int,
    ceildiv,
    const,
    eq,
    floormod,
    free_vars,
    le,
    lt,
    mul,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import AXES, Block, For, LoopKind, Seq, Stmt, Tail, blocks, loops, map_blocks, seq, walk
from relax_tune.schedules.independence import carried_read, other_points
from relax_tune.schedules.loop_tree import (
    block_loads,
    block_value,
    enclosing,
    find_loop,
    fresh,
    loop_env,
    rebind,
    regroup_sums,
    replace_node,
    require_compute_block,
    require_rectangular,
    with_body,
)
from relax_tune.schedules.primitives.arguments import positive
from relax_tune.schedules.symbols import LIMIT, only_tunables

# Largest prefetch distance in iterations.
MAX_PREFETCH_DISTANCE = 4096


def require_serial(func: PrimFunc, loop: For, step: str) -> None:
    """Check that the loop is serial and belongs to no intrinsic. Raises ScheduleError."""
    if loop.marks.intrinsic:
        raise ScheduleError(
            f"{func.name}: {step} expects a loop outside of instructions, got {loop.var.name!r} inside {loop.marks.intrinsic}"
        )
    if loop.kind != "serial":
        raise ScheduleError(f"{func.name}: {step} expects a serial loop, got {loop.var.name!r} marked {loop.kind}")


def split(func: PrimFunc, loop: str, factors: Sequence[ExprLike | None], divides: bool = False) -> PrimFunc:
    """Split a loop into a nest; the one `None` factor is the extent ceil-divided by the others.

    Before: `for i in range(N): S(i)`
    After: `for i_0 in range(ceil(N / f)): for i_1 in range(f): if i_0 * f + i_1 < N: S(i_0 * f + i_1)`
    Checks: the loop is serial; exactly one factor is None, the others are positive. The guard is left out when provably
    true, or when `divides` promises that the product of the factors divides the extent. That promise is proved, unless
    it depends only on tunables; the caller then records it as a constraint.
    """
    node = find_loop(func, loop)
    require_serial(func, node, "split")
    if sum(f is None for f in factors) != 1:
        raise ScheduleError(
            f"{func.name}: split({loop!r}) expects exactly one None among its factors, got {list(factors)}"
        )
    sizes = [None if f is None else positive(func, f"split({loop!r})", f, *blocks(node)) for f in factors]
    inner: Expr = const(1)
    for e in sizes:
        inner = inner if e is None else mul(inner, e)
    inner = simplify(inner)
    # The rounded-up extent and the new index are computed in int64.
    if (as_int(inner) or 0) >= LIMIT:
        raise ScheduleError(f"{func.name}: split({loop!r}) expects a product of factors below {LIMIT}, got {inner!r}")
    if divides:
        _require_division(func, node, inner)
    whole = simplify(ceildiv(node.extent, inner))
    extents = [whole if e is None else e for e in sizes]
    names: list[str] = []
    for a in range(len(factors)):
        names.append(fresh(func, f"{loop}_{a}", names))
    parts = [Var(n) for n in names]
    index: Expr = const(0)
    for var, extent in zip(parts, extents):
        index = index * extent + var
    body = rebind(node.body, {node.var: index})
    guard = lt(index, node.extent)
    if not divides and not _always_holds(guard, node, inner, loop_env(enclosing(func, node)), zip(parts, extents)):
        body = map_blocks(body, lambda b: replace(b, predicate=and_(b.predicate, guard)))
    for var, extent in reversed(list(zip(parts, extents))):
        body = For(var, extent, body)
    return with_body(func, replace_node(func.body, node, body))


def _always_holds(guard: Expr, node: For, inner: Expr, env: Env, nest: Iterable[tuple[Var, Expr]]) -> bool:
    """Return whether the guard of a split loop is provable. nest: the new loops and their extents, which multiply to at least
    the extent.

    The guard holds exactly where `inner` divides the extent. A few sampled assignments contradict this at once, while
    the search for a proof of the guard would exhaust its effort.
    """
    if refuted(eq(floormod(node.extent, inner), 0), env.with_loop(node.var, node.extent)):
        return False
    for var, extent in nest:
        env = env.with_loop(var, extent)
    return prove(guard, env) is Proof.YES


def _require_division(func: PrimFunc, node: For, inner: Expr) -> None:
    """Check that `inner` divides the extent: proved if shapes matter, else not disproved."""
    rest = floormod(node.extent, inner)
    proof = prove(eq(rest, 0), loop_env(enclosing(func, node)))
    # A promise over shapes could be broken by a call; one over tunables is checked for each candidate before it is
    # compiled.
    if proof is Proof.NO or (proof is Proof.UNKNOWN and not only_tunables(rest)):
        may = "does not" if proof is Proof.NO else "may not"
        raise ScheduleError(f"{func.name}: split({node.var.name!r}): {inner!r} {may} divide the extent {node.extent!r}")


def fuse(func: PrimFunc, names: Sequence[str]) -> PrimFunc:
    """Fuse perfectly nested serial loops, outermost first, into one.

    Before: `for i in range(N): for j in range(M): S(i, j)`
    After: `for i_j in range(N * M): S(i_j // M, i_j % M)`
    Checks: serial, directly nested, extents independent of the fused loops. Loops over elements and over a reduction that may
    be empty are not fused, if the block has its initial value.
    """
    nest = [find_loop(func, n) for n in names]
    if len(nest) < 2:
        return func
    for outer, inner in zip(nest, nest[1:]):
        require_serial(func, outer, "fuse")
        require_serial(func, inner, "fuse")
        if outer.body is not inner:
            raise ScheduleError(
                f"{func.name}: fuse expects {inner.var.name!r} directly inside {outer.var.name!r} and no other statement there"
            )
    require_rectangular(func, nest, "fuse")
    _require_initial_values(func, nest)
    var = Var(fresh(func, "_".join(names) + "_fused"))
    total: Expr = const(1)
    for loop in nest:
        total = mul(total, loop.extent)
    mapping: dict[Var, Expr] = {}
    rest: Expr = var
    for loop in reversed(nest[1:]):
        mapping[loop.var] = floormod(rest, loop.extent)
        rest = rest // loop.extent
    # no remainder: the fused loop ends before the last quotient reaches the outermost extent
    mapping[nest[0].var] = rest
    fused = For(var, simplify(total), rebind(nest[-1].body, mapping))
    return with_body(func, replace_node(func.body, nest[0], fused))


def _require_initial_values(func: PrimFunc, nest: Sequence[For]) -> None:
    """Check that every initial value is still stored.

    A fused loop over elements and an empty reduction never runs, so it would store none.
    """
    fused = {f.var for f in nest}
    for block in blocks(nest[-1].body):
        kinds = {i.kind for i, b in zip(block.iters, block.bindings) if fused & set(free_vars(b))}
        steps = [i.extent for i in block.iters if i.kind == "reduce"]
        if block.init is not None and len(kinds) == 2 and any(prove(le(1, e)) is not Proof.YES for e in steps):
            raise ScheduleError(
                f"{func.name}: fuse expects separate loops for elements and for reduction points in block {block.name!r}, whose "
                "reduction may be empty; use decompose_reduction first"
            )


def reorder(func: PrimFunc, names: Sequence[str]) -> PrimFunc:
    """Put loops of one perfect nest into the given order, outermost first; other loops of the nest keep their places.

    Before: `for i in range(N): for j in range(M): S(i, j)`
    After, with names [j, i]: `for j in range(M): for i in range(N): S(i, j)`
    Checks: all loops are serial, on one path with a single block under it, with extents independent of each other. Iterations
    of a block commute: spatial points are independent, reductions are associative up to rounding. In a block with an initial
    value no loop feeds a spatial and a reduction iterator at once, so that its first point stays the first.
    """
    nodes = [find_loop(func, n) for n in names]
    if not nodes:
        return func
    if len(set(names)) != len(names):
        raise ScheduleError(f"{func.name}: reorder expects distinct loops, got {list(names)}")
    chain = max(((*enclosing(func, n), n) for n in nodes), key=len)
    top = min(chain.index(n) if n in chain else -1 for n in nodes)
    if top < 0:
        raise ScheduleError(f"{func.name}: reorder expects loops of one nest, got {list(names)}")
    nest = list(chain[top:])
    for a, b in zip(nest, nest[1:]):
        if a.body is not b:
            raise ScheduleError(
                f"{func.name}: reorder expects a perfect nest; {a.var.name!r} holds more than {b.var.name!r}"
            )
    inside = nest[-1].body
    # With several blocks in the nest, one iteration of the inner loops may use what another block stored, and the
    # order of iterations matters.
    if len(blocks(inside)) != 1:
        names_inside = ", ".join(b.name for b in blocks(inside))
        raise ScheduleError(f"{func.name}: reorder expects one block inside the nest, got {names_inside}")
    for n in nodes:
        require_serial(func, n, "reorder")
    require_rectangular(func, nest, "reorder")
    _require_first_point(func, blocks(inside)[0])
    _require_own_points(func, blocks(inside)[0])
    order = iter(nodes)
    arranged = [next(order) if loop in nodes else loop for loop in nest]
    body = inside
    for loop in reversed(arranged):
        body = replace(loop, body=body)
    return with_body(func, replace_node(func.body, nest[0], body))


def _require_own_points(func: PrimFunc, block: Block) -> None:
    others = other_points(block)
    if others:
        raise ScheduleError(
            f"{func.name}: reorder expects points that read no result of another point, but block {block.name!r} stores an element of "
            f"its buffer and reads {others[0]!r}"
        )


def _require_first_point(func: PrimFunc, block: Block) -> None:
    if block.init is None:
        return
    fed: dict[str, set[Var]] = {"spatial": set(), "reduce": set()}
    for it, bound in zip(block.iters, block.bindings):
        fed[it.kind].update(free_vars(bound))
    # A loop such as a fused one walks through elements and reduction points at once. In another order, the point that
    # stores the initial value may come after others.
    mixed = {loop.var for loop in enclosing(func, block)} & fed["spatial"] & fed["reduce"]
    if mixed:
        raise ScheduleError(
            f"{func.name}: reorder expects loops that feed either spatial or reduction iterators of {block.name!r}, got "
            f"{', '.join(sorted(v.name for v in mixed))}; use decompose_reduction first"
        )


def set_kind(func: PrimFunc, loop: str, kind: LoopKind, axis: int = 0) -> PrimFunc:
    """Mark a loop `parallel`, `vectorized`, `unrolled`, or bind it to a `group`/`item` grid axis.

    Before: `for i in serial(N): S(i)`
    After: `for i in parallel(N): S(i)`
    Checks: iterations are independent. The variable feeds no reduction iterator below, unless the loop is `unrolled`, or the
    initial value is stored earlier and iterations provably have disjoint elements. Iterations provably write different elements
    of every buffer that they share, and read no element of it that another iteration may write, except under `item`, where
    barriers order the accesses. They share all buffers except `local` ones, under `group` except `local` and `shared` ones, and
    under `vectorized` all. Nothing outside the loop uses a buffer that each iteration has for itself. Vectorized and unrolled
    extents hold no shape symbol. A grid axis is bound once on a path. Parallel loops do not nest.
    """
    node = find_loop(func, loop)
    if kind not in get_args(LoopKind):
        raise ScheduleError(
            f"{func.name}: expected a kind of loop, one of {', '.join(get_args(LoopKind))}, got {kind!r}"
        )
    require_serial(func, node, kind)
    if kind == "serial":
        return func
    if kind in ("vectorized", "unrolled") and not only_tunables(node.extent):
        raise ScheduleError(
            f"{func.name}: {kind} expects an extent without shape symbols, got {node.extent!r} of {loop!r}; split it first"
        )
    # unrolling keeps the order of the iterations
    if kind != "unrolled":
        require_independent(func, node, kind)
    if kind in ("group", "item"):
        if axis not in range(AXES[kind]):
            raise ScheduleError(f"{func.name}: {kind} expects an axis below {AXES[kind]}, got {axis!r}")
        for other in (*enclosing(func, node), *loops(node.body)):
            if other.kind == kind and other.axis == axis:
                raise ScheduleError(f"{func.name}: {kind} axis {axis} is already bound to {other.var.name!r}")
    if kind == "parallel":
        for other in (*enclosing(func, node), *loops(node.body)):
            if other.kind == "parallel":
                raise ScheduleError(f"{func.name}: {loop!r} and {other.var.name!r} would be nested parallel loops")
    return with_body(func, replace_node(func.body, node, replace(node, kind=kind, axis=axis if kind in AXES else 0)))


def require_independent(func: PrimFunc, node: For, kind: LoopKind) -> None:
    """Check that iterations of the loop write different elements, or buffers of their own. Raises ScheduleError."""
    for block in blocks(node.body):
        fed_iters = [i for i, b in zip(block.iters, block.bindings) if i.kind == "reduce" and _mentions(b, node.var)]
        target = block.body.buffer
        where = [regroup_sums(block_value(block, i), block.predicate) for i in block.body.indices]
        path = enclosing(func, block)
        inner = {p.var: p.extent for p in path[path.index(node) + 1 :]}
        # Vector lanes are iterations of one thread and share its local memory; hence the exception below.
        is_private = target.scope == "local" or (target.scope in ("shared", "warp") and kind == "group")
        shared = not is_private or kind == "vectorized"
        # points excluded by a guard write nothing
        meets = (fed_iters or shared) and not separates(where, node.var, inner, loop_env(path), block.predicate)
        if fed_iters and (block.init is not None or meets):
            raise ScheduleError(
                f"{func.name}: {kind} expects independent iterations, but {node.var.name!r} feeds the reduction iterator "
                f"{fed_iters[0].var.name!r} of block {block.name!r}; use rfactor first"
            )
        if meets:
            raise ScheduleError(
                f"{func.name}: {kind} expects iterations that write different elements, but iterations of {node.var.name!r} may "
                f"write the same element of {target.name!r} in block {block.name!r}"
            )
        # Between work-items, lowering puts barriers between stores and reads of shared memory.
        carried = carried_read(func, node, block) if shared and kind != "item" else None
        if carried is not None:
            raise ScheduleError(
                f"{func.name}: {kind} expects iterations that read no result of another iteration, but block {carried[0].name!r} reads "
                f"{carried[1]!r}, which another iteration of {node.var.name!r} may store in block {block.name!r}"
            )
        outside = [b for b in blocks(func.body) if b not in blocks(node.body) and _accesses_buffer(b, target)]
        if is_private and kind != "vectorized" and outside:
            raise ScheduleError(
                f"{func.name}: {kind} gives every iteration of {node.var.name!r} its own {target.name!r}, but block "
                f"{outside[0].name!r}, which is not below it, reads or writes that buffer; make its scope global first"
            )


def _accesses_buffer(block: Block, buffer: Buffer) -> bool:
    return block.body.buffer is buffer or any(x.buffer is buffer for x in block_loads(block))


def set_tail(func: PrimFunc, loop: str, tail: Tail) -> PrimFunc:
    """Choose the lowering of the last, incomplete tile of a split's outer loop; meaning does not change.

    Before: `for i_0 in serial(ceil(N / T)): for i_1 in serial(T): if i_0 * T + i_1 < N: S(i_0 * T + i_1)`
    After: `for i_0 in serial(ceil(N / T), tail="peel"): ...`
    Checks: the tail is one of `relax_tune.ir.core.stmt.Tail`.
    """
    node = find_loop(func, loop)
    if tail not in get_args(Tail):
        raise ScheduleError(f"{func.name}: expected a tail, one of {', '.join(get_args(Tail))}, got {tail!r}")
    return with_body(func, replace_node(func.body, node, replace(node, tail=tail)))


def nontemporal_stores(func: PrimFunc, loop: str) -> PrimFunc:
    """Store the vectors of a loop with non-temporal stores, which bypass the caches; meaning does not change.

    Before: `for i in vectorized(16): B[i] = A[i]`
    After: `for i in vectorized(16, nontemporal=True): B[i] = A[i]`
    Checks: the loop is vectorized; the stores below are to global buffers that are not read there.
    """
    node = find_loop(func, loop)
    if node.kind != "vectorized":
        raise ScheduleError(
            f"{func.name}: nontemporal_stores expects a vectorized loop, got {loop!r}, which is {node.kind}"
        )
    read = {x.buffer for b in blocks(node.body) for x in block_loads(b)}
    for block in blocks(node.body):
        target = block.body.buffer
        # A reduction reads what it has stored, which a non-temporal store has evicted.
        if target.scope != "global" or target in read or block.init is not None:
            raise ScheduleError(
                f"{func.name}: nontemporal_stores expects stores to global memory that nothing below {loop!r} reads, got "
                f"the stores of {block.name!r} to {target.name!r}"
            )
    return with_body(func, replace_node(func.body, node, node.marked(nontemporal=True)))


def prefetch(func: PrimFunc, loop: str, iterations: int) -> PrimFunc:
    """Prefetch the read-only vectors of a loop some iterations early, to hide the latency of memory; meaning does not change.

    Before: `for k in serial(512): for j in vectorized(16): C[j] = C[j] + A[k] * B[k, j]`
    After: `for k in serial(512, prefetch_distance=32): ...`, which prefetches `B[k + 32, ...]` while it computes with `B[k, ...]`
    Checks: the loop is serial. The number of iterations is 1 to 4096. Some block below reads global memory not written there.
    """
    node = find_loop(func, loop)
    if node.kind != "serial" or not 1 <= iterations <= MAX_PREFETCH_DISTANCE:
        raise ScheduleError(
            f"{func.name}: prefetch expects a serial loop and 1 to {MAX_PREFETCH_DISTANCE} iterations, got {loop!r}, which is {node.kind}, "
            f"and {iterations}"
        )
    _require_reads(func, "prefetch", node)
    return with_body(func, replace_node(func.body, node, node.marked(prefetch_distance=iterations)))


def hold_vectors(func: PrimFunc, loop: str) -> PrimFunc:
    """Load a vector that several statements of a loop read once, into a register; meaning does not change.

    Compilers read such a vector from memory in each multiplication, as long as the instruction can, even if loads are then the limit.

    Before: `for k in serial(64): for i in unrolled(4): for j in vectorized(8): C[i, j] = C[i, j] + A[i, k] * B[k, j]`
    After: `for k in serial(64, hold_vectors=True): ...`, which loads `B[k, :]` once for the four products
    Checks: the loop is serial. Some block below reads global memory not written there.
    """
    node = find_loop(func, loop)
    if node.kind != "serial":
        raise ScheduleError(f"{func.name}: hold_vectors expects a serial loop, got {loop!r}, which is {node.kind}")
    _require_reads(func, "hold_vectors", node)
    return with_body(func, replace_node(func.body, node, node.marked(hold_vectors=True)))


def _require_reads(func: PrimFunc, step: str, node: For) -> None:
    """Check that some block below a loop reads global memory that no block there writes. Raises ScheduleError."""
    written = {b.body.buffer for b in blocks(node.body)}
    if all(x.buffer in written or x.buffer.scope != "global" for b in blocks(node.body) for x in block_loads(b)):
        raise ScheduleError(f"{func.name}: {step} expects reads of global memory, got none below {node.var.name!r}")


def copy_async(func: PrimFunc, loop: str) -> PrimFunc:
    """Copy into shared memory asynchronously (`cp.async`, PTX ISA); meaning does not change.

    Before: `for i in vectorized(8): S[i] = A[i] if i < n else 0`
    After: `for i in vectorized(8, asynchronous=True): S[i] = ...`
    Checks: the loop is vectorized and around one block, which copies elements of a parameter, or zeros, to a shared buffer of
    the same type.
    """
    node = find_loop(func, loop)
    if node.kind != "vectorized":
        raise ScheduleError(f"{func.name}: copy_async expects a vectorized loop, got {loop!r}, which is {node.kind}")
    (block, *more) = blocks(node.body)
    value = block.body.value
    # `cp.async` fills with zeros what it does not copy, so a bounds check with 0 needs no branch.
    if value.op == "select" and value.args[2].value == 0:
        value = value.args[1]
    target = block.body.buffer
    copies = isinstance(value, Load) and value.buffer in func.input_buffers and value.dtype is target.dtype
    if more or not copies or target.scope != "shared" or block.init is not None:
        raise ScheduleError(
            f"{func.name}: copy_async expects a copy from a parameter to shared memory, got {block.name!r}, which stores "
            f"{block.body.value!r} to {target.scope} memory"
        )
    return with_body(func, replace_node(func.body, node, node.marked(async_copy=True)))


def fuse_sibling_loops(func: PrimFunc, first: str, second: str) -> PrimFunc:
    """Fuse two loops of equal extent in the same body (loop fusion); statements between them go before the fused loop.

    Before: `for a in range(N): P(a)` followed by `R`, then `for b in range(N): Q(b)`
    After: `R`, then `for a in range(N): P(a); Q(a)`
    Checks: the second loop follows the first in one body; both are serial; extents are provably equal; none holds a `prepack`
    block. R neither reads P's writes nor writes buffers that P touches. Accesses of Q that conflict with P are at the same
    iteration.
    """
    a, b = find_loop(func, first), find_loop(func, second)
    require_serial(func, a, "fuse_sibling_loops")
    require_serial(func, b, "fuse_sibling_loops")
    parent = next((n for n in walk(func.body) if isinstance(n, Seq) and a in n.stmts), None)
    if parent is None or b not in parent.stmts or parent.stmts.index(b) <= parent.stmts.index(a):
        raise ScheduleError(f"{func.name}: fuse_sibling_loops expects {second!r} to follow {first!r} in the same body")
    between = parent.stmts[parent.stmts.index(a) + 1 : parent.stmts.index(b)]
    env = loop_env(enclosing(func, a))
    if prove(eq(a.extent, b.extent), env) is not Proof.YES:
        raise ScheduleError(f"{func.name}: fuse_sibling_loops expects equal extents, got {a.extent!r} and {b.extent!r}")
    body_b = rebind(b.body, {b.var: a.var})
    require_compute_block(func, "fuse_sibling_loops", *blocks(a.body), *blocks(b.body))
    _require_movable_before(func, a, between)
    require_same_iteration(func, "fuse_sibling_loops", a, a.body, body_b)
    # Both loops must agree on the lowering of the tail. A predicate is right for any body.
    tail: Tail = a.tail if a.tail == b.tail else "predicate"
    merged = replace(a, body=seq(a.body, body_b), tail=tail)
    rest = [s for s in parent.stmts if s is not b and s not in between]
    stmts = [x for s in rest for x in ((*between, merged) if s is a else (s,))]
    return with_body(func, replace_node(func.body, parent, seq(*stmts)))


def _require_movable_before(func: PrimFunc, a: For, between: Sequence[Stmt]) -> None:
    """Check that the statements between may run before the loop. Raises ScheduleError."""
    written = {b.body.buffer for b in blocks(a.body)}
    touched = {t for b in blocks(a.body) for t, _ in accesses(b)}
    for block in (x for s in between for x in blocks(s)):
        if block.body.buffer in touched or any(t in written for t, _ in accesses(block)):
            raise ScheduleError(
                f"{func.name}: fuse_sibling_loops would move {block.name!r} before {a.var.name!r}, which it needs"
            )


def require_same_iteration(func: PrimFunc, step: str, a: For, *bodies: Stmt) -> None:
    """Check that two bodies of a loop conflict only within one iteration.

    Each shared and written buffer has a dimension in which all accesses have the same stride along the loop. The stride is at least the
    extent covered within one iteration. A loop of one iteration has no conflicts.
    """
    if prove(le(a.extent, const(1)), loop_env(enclosing(func, a))) is Proof.YES:
        return
    written = [{b.body.buffer for b in blocks(s)} for s in bodies]
    touched = [{x.buffer for b in blocks(s) for x in block_loads(b)} | w for s, w in zip(bodies, written)]
    shared = (written[0] & touched[1]) | (written[1] & touched[0])
    ranges = {loop.var: loop.extent for s in bodies for loop in loops(s)}
    env = inside = loop_env((*enclosing(func, a), a))
    for v, extent in ranges.items():
        inside = inside.with_loop(v, extent)
    # sorted, so that the refused buffer does not depend on hash order
    for buffer in sorted(shared, key=lambda x: x.name):
        touched_at = [
            tuple(simplify(block_value(block, i), inside) for i in where)
            for s in bodies
            for block in blocks(s)
            for target, where in accesses(block)
            if target is buffer
        ]
        if not any(
            same_disjoint_stride([where[d] for where in touched_at], a.var, ranges, env)
            for d in range(len(buffer.shape))
        ):
            raise ScheduleError(
                f"{func.name}: {step} would let an iteration of {a.var.name!r} see elements of {buffer.name!r} "
                "that another iteration writes"
            )


def accesses(block: Block) -> list[tuple[Buffer, tuple[Expr, ...]]]:
    """Return the (buffer, indices) of the block's store and loads."""
    return [(block.body.buffer, block.body.indices), *((x.buffer, x.indices) for x in block_loads(block))]


def same_disjoint_stride(indices: Sequence[Expr], var: Var, ranges: Mapping[Var, Expr], env: Env) -> bool:
    """Return whether all indices have the same stride along `var`, at least the extent that each covers over `ranges`."""
    steps: set[tuple[Expr, Expr]] = set()
    for e in indices:
        inner = [v for v in free_vars(e) if v in ranges]
        parts = linear(e, (var, *inner))
        if parts is None or var not in parts[0]:
            return False
        step = parts[0][var]
        covered = extent_of(e, {v: ranges[v] for v in inner})
        if prove(le(covered, step), env) is not Proof.YES:
            return False
        steps.add((step, parts[1]))
    return len(steps) == 1


def _mentions(e: Expr, var: Var) -> bool:
    return var in free_vars(e)
