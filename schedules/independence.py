"""Whether iterations of a loop touch different elements; whether moving a block would let it see other values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.linear import extent_of, linear
from relax_tune.ir.arith.prove import Proof, prove, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.buffer import Buffer
from relax_tune.ir.expr import (
    TRUE,
    Expr,
    Op,
    Var,
    as_int,
    const,
    floormod,
    free_vars,
    le,
    mul,
    postorder,
    sub,
    transform,
)
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.stmt import Block, blocks
from relax_tune.schedules.nest import block_loads


def separates(indices: Sequence[Expr], var: Var, inner: Mapping[Var, Expr], env: Env) -> bool:
    """Whether different values of `var` provably give different indices, whatever the `inner` variables (with their extents) do.

    It looks at each index alone, and at the numbers whose digits (`u // E`, `u % E`, as fused loops make them) can all be
    read off the indices.
    """
    if prove(le(var, 0), env) is Proof.YES:
        return True  # it has one value
    flat = [simplify(e, env) for e in indices]
    return any(_steps(e, var, inner, env) for e in (*flat, *_joined(flat, var, inner, env)))


def _steps(e: Expr, var: Var, inner: Mapping[Var, Expr], env: Env) -> bool:
    """A step of `var` moves `e` by at least what `e` covers while the inner variables run."""
    own = {v: inner[v] for v in free_vars(e) if v in inner and v is not var}
    parts = linear(e, (var, *own), env)
    if parts is None or var not in parts[0]:
        return False
    try:
        covered = extent_of(e, own, env)
    except ScheduleError:
        return False
    step = parts[0][var]
    return any(prove(le(covered, s), env) is Proof.YES for s in (step, simplify(mul(step, -1))))


def _joined(indices: Sequence[Expr], var: Var, inner: Mapping[Var, Expr], env: Env) -> list[Expr]:
    """Expressions that the indices determine together, because each of their digits can be read off one index."""
    digits = [_place_of(d) for e in indices for d in _digits(e, var, inner, env)]
    found = []
    for u in dict.fromkeys(number for number, _, _ in digits):
        left = [(d, m) for number, d, m in digits if number is u or _congruent(number, d, m, u)]
        scale: Expr = const(1)
        while left:
            here = [d for d in left if prove_equal(d[0], scale) is Proof.YES]
            if any(modulus is None for _, modulus in here):
                found.append(u)
            if not here or u in found:
                break
            left.remove(here[0])
            assert here[0][1] is not None
            scale = mul(scale, here[0][1])
    return found


def _congruent(number: Expr, divisor: Expr, modulus: Expr | None, u: Expr) -> bool:
    """`number % modulus` is `u % modulus` (simplifying takes multiples of the modulus out)."""
    if modulus is None or as_int(divisor) != 1:
        return False
    return as_int(simplify(floormod(sub(number, u), modulus))) == 0


def _place_of(digit: Op) -> tuple[Expr, Expr, Expr | None]:
    """`u // d` as (u, d, None) and `u // d % m` as (u, d, m)."""
    modulus = digit.args[1] if digit.op == "floormod" else None
    number: Expr = digit if modulus is None else digit.args[0]
    divisor: Expr = const(1)
    while isinstance(number, Op) and number.op == "floordiv":
        divisor = mul(divisor, number.args[1])
        number = number.args[0]
    return number, divisor, modulus


def _digits(e: Expr, var: Var, inner: Mapping[Var, Expr], env: Env) -> list[Op]:
    """Quotients and remainders of something with `var` in it that `e` determines: outermost ones that `e` steps through."""
    nodes = [n for n in postorder((e,)) if isinstance(n, Op) and n.op in ("floordiv", "floormod")]
    outermost: dict[Op, Var] = {}
    plain: Expr = e
    for n in reversed(nodes):
        if var in free_vars(n.args[0]) and any(x is n for x in postorder((plain,))):
            stand_in = outermost.setdefault(n, Var(f"digit{len(outermost)}"))
            plain = _swap(plain, n, stand_in)
    return [n for n, stand_in in outermost.items() if _steps(plain, stand_in, inner, env)]


def _swap(e: Expr, old: Expr, new: Expr) -> Expr:
    return transform(e, lambda n: new if n is old else None)


def overwritten_later(func: PrimFunc, block: Block) -> Buffer | None:
    """A buffer the block reads and a block after it writes again (an output that also holds an intermediate)."""
    order = blocks(func.body)
    later = {b.body.buffer for b in order[order.index(block) + 1 :]}
    return next((x.buffer for x in block_loads(block) if x.buffer in later and x.buffer is not block.body.buffer), None)


def writers(func: PrimFunc, buffer: Buffer) -> tuple[Block, ...]:
    return tuple(b for b in blocks(func.body) if b.body.buffer is buffer)


def updates_in_place(block: Block) -> bool:
    """The block reads elements of what it writes that something else put there (no initial value of its own)."""
    return any(x.buffer is block.body.buffer for x in block_loads(block))


def writes_everything(block: Block) -> bool:
    """The block alone writes each element of its buffer: plain distinct spatial iterators over the buffer's dimensions, and
    no condition but the guards that splitting its loops left."""
    if block.predicate is not TRUE and all(isinstance(b, Var) for b in block.bindings):
        return False
    extents = {i.var: i.extent for i in block.iters if i.kind == "spatial"}
    where = block.body.indices
    return len(set(where)) == len(where) and all(
        isinstance(e, Var) and e in extents and simplify(extents[e]) is simplify(d)
        for e, d in zip(where, block.body.buffer.shape, strict=True)
    )
