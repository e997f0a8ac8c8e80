"""Finding and replacing loops and blocks of a tensor function: the vocabulary of every primitive.

Loops and blocks are known by their unique names, so that a trace replays on another copy of the function.

Tests: `tests/schedules/primitives/loops/test_loops.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.core import names
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import TRUE, Const, Expr, Load, Var, conjuncts, free_vars, loads, op, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, IterVar, Seq, Stmt, blocks, loops, replace_buffers, rewrite


def find_loop(func: PrimFunc, name: str) -> For:
    """Return the loop whose variable is called `name`. Raises ScheduleError that lists the function's loops."""
    for loop in loops(func.body):
        if loop.var.name == name:
            return loop
    known = ", ".join(loop.var.name for loop in loops(func.body))
    raise ScheduleError(f"{func.name}: expected a loop called {name!r}; the function has {known or 'none'}")


def find_block(func: PrimFunc, name: str) -> Block:
    """Return the block called `name`. Raises ScheduleError that lists the function's blocks."""
    for block in blocks(func.body):
        if block.name == name:
            return block
    known = ", ".join(b.name for b in blocks(func.body))
    raise ScheduleError(f"{func.name}: expected a block called {name!r}; the function has {known or 'none'}")


def find_alloc(func: PrimFunc, name: str) -> Buffer:
    """Return the intermediate buffer called `name`. Raises ScheduleError that lists the intermediates."""
    for buffer in func.allocs:
        if buffer.name == name:
            return buffer
    known = ", ".join(b.name for b in func.allocs)
    raise ScheduleError(f"{func.name}: expected an intermediate buffer called {name!r}; there are {known or 'none'}")


def swap_alloc(func: PrimFunc, old: Buffer, new: Buffer) -> PrimFunc:
    """Replace the intermediate `old` by `new`, at the same indices."""
    return replace(
        func,
        body=replace_buffers(func.body, {old: new}),
        allocs=tuple(new if a is old else a for a in func.allocs),
    )


def enclosing(func: PrimFunc, target: Stmt) -> tuple[For, ...]:
    """Return the loops around `target`, outermost first, without `target` itself. `target` is an object of this function."""
    stack: list[tuple[Stmt, tuple[For, ...]]] = [(func.body, ())]
    while stack:
        node, path = stack.pop()
        if node is target:
            return path
        inner = (*path, node) if isinstance(node, For) else path
        stack.extend((c, inner) for c in node.children)
    raise ScheduleError(f"{func.name}: the statement is not part of this function")


def replace_node(body: Stmt, old: Stmt, new: Stmt) -> Stmt:
    """Replace one node of `body`, compared by identity; loops left without a body disappear."""
    if body is old:
        return new
    return body.with_children(tuple([replace_node(c, old, new) for c in body.children])) if body.children else body


def with_body(func: PrimFunc, body: Stmt) -> PrimFunc:
    return func if body is func.body else replace(func, body=body)


def used_names(func: PrimFunc) -> set[str]:
    """Return the names of the function's loops, blocks and buffers."""
    names = {loop.var.name for loop in loops(func.body)} | {b.name for b in blocks(func.body)}
    return names | {b.name for b in (*func.buffers, *func.allocs)}


def fresh(func: PrimFunc, name: str, reserved: Iterable[str] = ()) -> str:
    """Return `name`, or the first `name_N` that neither the function nor `reserved` has."""
    return names.fresh(name, used_names(func) | set(reserved))


def loop_env(path: Iterable[For], env: Env | None = None) -> Env:
    """Return `env` with the bounds of the loops' variables."""
    out = env or Env()
    around: set[Var] = set()
    for loop in path:
        out = out.with_loop(loop.var, _largest_extent(loop.extent, around), surely_runs(loop))
        around.add(loop.var)
    return out


def surely_runs(loop: For) -> bool:
    """Return whether an element of a block below implies an iteration: not where the loop is a reduction's with an initial value."""
    if isinstance(loop.extent, Const):
        return True
    return not any(
        i.kind == "reduce" and loop.var in free_vars(b)
        for block in blocks(loop.body)
        if block.init is not None
        for i, b in zip(block.iters, block.bindings)
    )


def _largest_extent(extent: Expr, around: Collection[Var]) -> Expr:
    """Bound an extent that depends on outer loops from above.

    Of `min(a, b) - c` the bound is the part that depends on fewer outer loops, since each `min` doubles the cases of a proof.
    """
    more = extent.op in ("add", "sub") and extent.args
    whole = more[0] if more else extent
    if whole.op != "min" or not any(v in around for v in free_vars(whole)):
        return extent
    # A minimum is bounded by each of its arguments, so the one with the fewest outer variables is taken.
    part = min(whole.args, key=lambda e: sum(v in around for v in free_vars(e)))
    return op(extent.op, (part, more[1]), extent.dtype) if more else part


def clone_stmt(func: PrimFunc, s: Stmt, suffix: str) -> Stmt:
    """Copy `s`, a part of `func`, with fresh loops, blocks and iterators named after the old ones with `suffix`."""
    reserved: list[str] = []

    def renamed(name: str) -> str:
        reserved.append(fresh(func, f"{name}{suffix}", reserved))
        return reserved[-1]

    def visit(n: Stmt) -> Stmt:
        if isinstance(n, For):
            var = Var(renamed(n.var.name))
            return replace(n, var=var, body=rebind(n.body, {n.var: var}))
        if isinstance(n, Block):
            iters = {i.var: Var(i.var.name) for i in n.iters}
            copy = _with_iters(n, iters)
            return replace(copy, name=renamed(n.name), iters=tuple(replace(i, var=iters[i.var]) for i in n.iters))
        return n

    return rewrite(s, visit)


def _with_iters(block: Block, values: Mapping[Var, Expr]) -> Block:
    """Return the block's stores over other iterators."""
    return block.map_own_stores(lambda s: s.map_own_exprs(lambda e: substitute(e, values)))


def with_iters(block: Block, iters: Iterable[tuple[IterVar, Expr]], values: Mapping[Var, Expr]) -> Block:
    """Replace the block's iterators and bindings by `iters`; `values` gives each old iterator over the new ones."""
    pairs = list(iters)
    copy = _with_iters(block, values)
    return replace(copy, iters=tuple(i for i, _ in pairs), bindings=tuple(b for _, b in pairs))


def block_value(block: Block, e: Expr) -> Expr:
    """Express `e`, over block iterators, over loop variables."""
    return substitute(e, {i.var: b for i, b in zip(block.iters, block.bindings, strict=True)})


def block_loads(block: Block) -> tuple[Load, ...]:
    """Return the loads of a block in order of appearance, its own accumulator excluded."""
    accesses = loads(block.body.value, *block.body.indices)
    if block.init is None:
        return accesses
    return tuple(x for x in accesses if x.buffer is not block.body.buffer)


def readers(func: PrimFunc, buffer: Buffer) -> tuple[Block, ...]:
    return tuple(b for b in blocks(func.body) if any(x.buffer is buffer for x in block_loads(b)))


def writer(func: PrimFunc, buffer: Buffer) -> Block | None:
    """Return the first block that writes `buffer`, None for inputs."""
    return next((b for b in blocks(func.body) if b.body.buffer is buffer), None)


def trivial_loops(func: PrimFunc, block: Block, conditional: bool = False, any_order: bool = False) -> tuple[For, ...]:
    """Return the block's own nest, with one loop for each iterator and nothing else in it.

    Args:
        conditional: Accept a block with a predicate.
        any_order: Accept iterators in another order than their loops.

    Raises:
        ScheduleError: For any other nest.
    """
    path = enclosing(func, block)
    bound, loops = tuple(block.bindings), tuple(loop.var for loop in path)
    if bound != loops and not (any_order and len(bound) == len(loops) and set(bound) == set(loops)):
        shown = ", ".join(f"{i.var.name}={b!r}" for i, b in zip(block.iters, block.bindings))
        raise ScheduleError(
            f"{func.name}: block {block.name!r} must still have one loop per iterator; got {shown} "
            f"under loops {', '.join(loop.var.name for loop in path)}. Move the block before splitting its loops."
        )
    if block.predicate is not TRUE and not conditional:
        raise ScheduleError(f"{func.name}: block {block.name!r} must run without a condition, got {block.predicate!r}")
    for loop in path:
        if isinstance(loop.body, Seq):
            raise ScheduleError(f"{func.name}: the nest of block {block.name!r} has other statements")
    return path


def rebind(s: Stmt, mapping: Mapping[Var, Expr]) -> Stmt:
    """Replace loop variables in the extents of loops, and in the bindings and predicates of blocks, under `s`."""

    def fix(n: Stmt) -> Stmt:
        if isinstance(n, For):
            return n.map_own_exprs(lambda e: substitute(e, mapping))
        if isinstance(n, Block):
            bindings = tuple(left_associated(substitute(e, mapping)) for e in n.bindings)
            return replace(n, bindings=bindings, predicate=substitute(n.predicate, mapping))
        return n

    return rewrite(s, fix)


def left_associated(e: Expr) -> Expr:
    """Rewrite `a + (b + c)` as `a + b + c`: one form of a sum for all ways of splitting its parts."""
    while e.op == "add" and e.args[1].op == "add":
        left, (first, last) = e.args[0], e.args[1].args
        e = op("add", (left_associated(op("add", (left, first), e.dtype)), last), e.dtype)
    return e


def regroup_sums(e: Expr, guard: Expr) -> Expr:
    """Regroup the terms of `e` so that each sum bounded by `guard` is one term again.

    `rebind` flattens sums; proofs about a guarded index need the guarded sum as a whole.
    """
    bounded = [f.args[0] for f in conjuncts(guard) if f.op == "lt"]
    terms = _terms(e)
    runs = [(_terms(whole), whole) for whole in bounded]
    # Short sums first: a longer bounded sum may contain a shorter one as a term.
    for place, (run, whole) in sorted(enumerate(runs), key=lambda item: len(item[1][0])):
        if len(run) > 1:
            terms = _replace_run(terms, run, whole)
            runs = [(_replace_run(r, run, whole), w) if a != place else (r, w) for a, (r, w) in enumerate(runs)]
    total = terms[0]
    for term in terms[1:]:
        total = op("add", (total, term), e.dtype)
    return total


def _terms(e: Expr) -> list[Expr]:
    """Return the terms of a sum, in order."""
    if e.op == "add":
        return [*_terms(e.args[0]), *_terms(e.args[1])]
    return [e]


def _replace_run(terms: list[Expr], run: list[Expr], whole: Expr) -> list[Expr]:
    """Replace the first occurrence of `run` among the terms by `whole`."""
    for at in range(len(terms) - len(run) + 1):
        if terms[at : at + len(run)] == run:
            return [*terms[:at], whole, *terms[at + len(run) :]]
    return terms


def require_rectangular(func: PrimFunc, nest: Iterable[For], step: str) -> None:
    """Check that no loop's extent mentions a variable of these loops."""
    loops_ = tuple(nest)
    variables = {loop.var for loop in loops_}
    for loop in loops_:
        if variables & set(free_vars(loop.extent)):
            raise ScheduleError(
                f"{func.name}: {step} expects extents that are independent of each other, got {loop.extent!r} "
                f"for {loop.var.name!r}"
            )


def require_compute_block(func: PrimFunc, step: str, *nodes: Block) -> None:
    """Check that no block is a `prepack` block, which runs once before any call."""
    for block in nodes:
        if block.role != "compute":
            raise ScheduleError(
                f"{func.name}: {step} expects blocks that every call runs; {block.name!r} runs once, before all calls"
            )
