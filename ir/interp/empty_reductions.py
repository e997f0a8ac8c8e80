"""Initial values of empty reductions.

A block stores its initial value at the first reduction point, so an empty reduction would store nothing. Interpreter and code
generation therefore complete reductions first. Two kinds need no completion: extents known to be at least 1, and initial
values in a separate block (`decompose_reduction`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.expr import Expr, Var, and_, conjuncts, free_vars, le, or_, substitute
from relax_tune.ir.core.stmt import Block, For, IfThenElse, Stmt, seq


def complete_empty_reductions(s: Stmt) -> Stmt:
    """Store initial values of empty reductions, in front of the outermost loop of each reduction.

    Before: `for i: for k in range(K): (if k == 0: C[i] = 0); C[i] = C[i] + A[i, k]`
    After:  `for i: (if K <= 0: C[i] = 0); for k in range(K): ...`

    A loop that runs through elements and reduction points together has no place for it, nor has a condition on
    both: such a block is not changed. Returns the same object if nothing changes.
    """
    return _complete(s, ())


def _complete(s: Stmt, around: tuple[For, ...]) -> Stmt:
    inside = (*around, s) if isinstance(s, For) else around
    new = s.with_children(tuple(_complete(c, inside) for c in s.children))
    first = _initial_values(s, s.body, (s,), around) if isinstance(s, For) else []
    return seq(*first, new) if first else new


def _initial_values(top: For, s: Stmt, inner: tuple[For, ...], around: tuple[For, ...]) -> list[Stmt]:
    """Return stores of initial values for blocks whose reduction begins with the loop `top`, for an empty `top`."""
    if not isinstance(s, Block):
        inner = (*inner, s) if isinstance(s, For) else inner
        return [x for c in s.children for x in _initial_values(top, c, inner, around)]
    if s.init is None:
        return []
    pairs = list(zip(s.iters, s.bindings, strict=True))
    path = {f.var for f in (*around, *inner)}
    steps = path & {v for i, b in pairs if i.kind == "reduce" for v in free_vars(b)}
    places = path & {v for i, b in pairs if i.kind == "spatial" for v in free_vars(b)}
    # Once for each reduction: at its outermost loop over steps.
    if top.var not in steps or any(f.var in steps for f in around):
        return []
    empty = [le(i.extent, 0) for i, _ in pairs if i.kind == "reduce" and prove(le(1, i.extent)) is not Proof.YES]
    # a loop of at most one iteration selects no element, but may run zero times
    loops = [f for f in inner if f.var not in steps and (f.var in places or prove(le(1, f.extent)) is not Proof.YES)]
    spatial = [c for c in conjuncts(s.predicate) if not steps & set(free_vars(c))]
    tied = [c for c in conjuncts(s.predicate) if c not in spatial and {f.var for f in loops} & set(free_vars(c))]
    if not empty or steps & places or tied:
        return []
    return [IfThenElse(reduce(or_, empty), _initialised(s, loops, spatial))]


def _initialised(block: Block, loops: list[For], conditions: list[Expr]) -> Stmt:
    """Return stores of the initial values of all elements that the loops run through."""
    assert block.init is not None
    # fresh loop variables and iterators: the block itself still runs with the old ones
    copies = {f.var: Var(f"{f.var.name}_none") for f in loops}
    spatial = [(i, b) for i, b in zip(block.iters, block.bindings, strict=True) if i.kind == "spatial"]
    fresh_iters = {i.var: Var(i.var.name) for i, _ in spatial}
    init = block.init.map_own_exprs(lambda e: substitute(e, fresh_iters))
    s: Stmt = replace(
        block,
        name=f"{block.name}_none",
        iters=tuple(replace(i, var=fresh_iters[i.var]) for i, _ in spatial),
        bindings=tuple(substitute(b, copies) for _, b in spatial),
        body=init,
        init=None,
        predicate=and_(*(substitute(c, copies) for c in conditions)),
    )
    for f in reversed(loops):
        kind = f.kind if f.kind in ("group", "item") else "serial"
        s = replace(f, var=copies[f.var], extent=substitute(f.extent, copies), body=s, kind=kind, tail="predicate")
    return s
