"""Confinement of untrusted tensor functions to their buffers.

Each index is proved to be inside its dim, under the loops around it. A read whose index is not proved takes the nearest element, as
computed indices of operators do. A store whose index depends only on sizes is skipped if it would be outside; other unproved
stores are refused. Proved accesses are unchanged.

Tests: `tests/ir/frontend/test_text.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from relax_tune.errors import VerifyError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import (
    TRUE,
    Const,
    Expr,
    Load,
    Var,
    and_,
    const,
    le,
    load,
    loads,
    lt,
    postorder,
    select,
    substitute,
    transform,
)
from relax_tune.ir.core.function import ExternFunc, IRModule, PrimFunc
from relax_tune.ir.core.stmt import NO_MARKS, Block, BufferStore, For, IfThenElse, Seq, Stmt, loops, seq
from relax_tune.ir.op.indexing.indices import inside
from relax_tune.ir.text.printer import excerpt

# Larger steps of an index may leave 64 bits, where the proofs, which assume unbounded integers, do not hold.
_LARGE = 1 << 31
_FAR = 1 << 62


def keep_in_bounds(module: IRModule) -> IRModule:
    """Return the module with each tensor function confined to its buffers; the same object if every access is proved.

    Raises:
        VerifyError: a store at a computed index, a call of a library, or a function with marks of a schedule.
    """
    changed: dict[str, PrimFunc] = {}
    for name, f in module.functions.items():
        if isinstance(f, ExternFunc):
            raise VerifyError(
                f"{name}: expected tensor functions and operators, got a library's routine; a build chooses those"
            )
        if isinstance(f, PrimFunc) and (bounded := _in_bounds(f)) is not f:
            changed[name] = bounded
    return replace(module, functions={**module.functions, **changed}) if changed else module


def least_sizes(func: PrimFunc) -> int:
    """Return from which size of all symbols on each access of a function is proved to be inside its buffer: 0 or 1.

    Raises:
        VerifyError: An access is not proved; the message names it.
    """
    for least in (0, 1):
        bounded = _Bounded(func)
        bounded.stmt(func.body, Env({v: (const(least), None) for v in func.symbols}))
        if not bounded.unproved:
            return least
    buffer, at = bounded.unproved[0]
    bounded.fail(
        f"expected each index proved to be inside its buffer at all sizes, got an access of {buffer.name} that may be outside of "
        f"({', '.join(map(str, buffer.shape))}); put it below a condition, or limit its index by min and max",
        at,
    )


def _in_bounds(func: PrimFunc) -> PrimFunc:
    for loop in loops(func.body):
        if loop.marks != NO_MARKS:
            raise VerifyError(
                f"{func.name}: expected loops without marks, got some on {loop.var.name}; a build schedules them"
            )
    # A scalar parameter is an argument like any other: nothing in the text may promise that it is a size, hence >= 0.
    far = {v: (const(-_FAR), const(_FAR)) for v in func.scalar_params}
    body = _Bounded(func).stmt(func.body, Env(far))
    return func if body is func.body else replace(func, body=body)


class _Bounded:
    def __init__(self, func: PrimFunc) -> None:
        self.func = func
        self.unproved: list[tuple[Buffer, Stmt]] = []

    def stmt(self, s: Stmt, env: Env) -> Stmt:
        match s:
            case For():
                # a reduction without iterations still stores its initial value, so the loop need not run
                body = self.stmt(s.body, env.with_loop(s.var, s.extent, runs=False))
                return s if body is s.body else replace(s, body=body)
            case Seq():
                parts = [self.stmt(c, env) for c in s.stmts]
                return s if all(a is b for a, b in zip(parts, s.stmts, strict=True)) else seq(*parts)
            case IfThenElse():
                cond = self.reads(s.cond, env, {}, s)
                # The negation is no fact for the other side: there, accesses are proved without it or clamped, which
                # is always safe.
                then = self.stmt(s.then, env.with_fact(s.cond))
                orelse = None if s.orelse is None else self.stmt(s.orelse, env)
                return replace(s, cond=cond, then=then, orelse=orelse)
            case BufferStore():
                new, needed = self.store(s, env, {}, s)
                return new if needed is TRUE else IfThenElse(needed, new)
            case Block():
                return self.block(s, env)
        raise VerifyError(f"{self.func.name}: expected a function before lowering, got a {type(s).__name__}")

    def block(self, b: Block, env: Env) -> Block:
        # iterators stand for their bindings, since the text may declare any domain
        known = dict(zip((i.var for i in b.iters), b.bindings, strict=True))
        predicate = self.reads(b.predicate, env, {}, b)
        # The initial value is stored wherever the loops run, also where the predicate is false. Only the body may
        # rely on the predicate.
        runs = env if b.predicate is TRUE else env.with_fact(b.predicate)
        body, needed = self.store(b.body, runs, known, b)
        init = b.init
        if init is not None:
            init, first = self.store(init, env, known, b)
            if first is not TRUE or needed is not TRUE:
                self.fail("expected a reduction whose stored index is inside its buffer at all sizes", b)
        if body is b.body and init is b.init and predicate is b.predicate and needed is TRUE:
            return b
        return replace(b, body=body, init=init, predicate=and_(predicate, needed))

    def store(self, s: BufferStore, env: Env, known: Mapping[Var, Expr], at: Stmt) -> tuple[BufferStore, Expr]:
        """Return the store with its reads clamped, and the condition under which the store is in bounds."""
        unproved = list(_unproved(s.buffer.shape, s.indices, env, known))
        if unproved:
            self.unproved.append((s.buffer, at))
        if unproved and loads(*s.indices):
            self.fail(f"expected a stored index of {s.buffer.name} that no data decide, or one that is clamped", at)
        where = [substitute(s.indices[a], known) for a in unproved]
        needed = and_(*(c for e, a in zip(where, unproved) for c in (le(0, e), lt(e, s.buffer.shape[a]))))
        return s.map_own_exprs(lambda e: self.reads(e, env, known, at)), needed

    def reads(self, e: Expr, env: Env, known: Mapping[Var, Expr], at: Stmt) -> Expr:
        def clamped(node: Expr) -> Expr | None:
            if not isinstance(node, Load):
                return None
            shape, outside = node.buffer.shape, set(_unproved(node.buffer.shape, node.indices, env, known))
            if not outside:
                return None
            self.unproved.append((node.buffer, at))
            near = load(node.buffer, [inside(i, shape[a]) if a in outside else i for a, i in enumerate(node.indices)])
            # An empty dim has no nearest element: clamping to dim - 1 would read at -1.
            empty = [lt(0, shape[a]) for a in outside if prove(lt(0, shape[a]), env) is not Proof.YES]
            return select(and_(*empty), near, const(0, near.dtype)) if empty else near

        return transform(e, clamped)

    def fail(self, problem: str, at: Stmt) -> NoReturn:
        raise VerifyError(f"{self.func.name}: {problem}\n{excerpt(self.func, at)}")


def _unproved(shape: Sequence[Expr], indices: Sequence[Expr], env: Env, known: Mapping[Var, Expr]) -> Iterator[int]:
    """Yield the axes at which an index is not proved to be inside its dim."""
    for axis, (index, dim) in enumerate(zip(indices, shape, strict=True)):
        at = substitute(index, known)
        large = any(isinstance(n, Const) and abs(n.value) >= _LARGE for n in postorder((at,)))
        if large or prove(le(0, at), env) is not Proof.YES or prove(lt(at, dim), env) is not Proof.YES:
            yield axis
