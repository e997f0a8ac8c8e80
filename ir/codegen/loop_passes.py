"""Upper bounds of the loop passes of a work-item, for devices that stop loops after a limited number of passes."""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.codegen.generate import CodeTarget, lanes_of, lowered_body, split_kernels
from relax_tune.ir.codegen.lower.vectors import is_expanded
from relax_tune.ir.core.expr import Expr, Load, as_int, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import For, Let, Stmt

# Passes of the loops inside helper functions. Divisions of 64-bit integers are loops in WGSL only.
OF_FUNCTION: Mapping[str, int] = {"fmod": 256, "integer_power": 65}
OF_WIDE: Mapping[str, int] = {"floordiv": 65, "floormod": 65}
LEAST = -(1 << 63)


def most_passes(func: PrimFunc, target: CodeTarget, env: Env) -> int | None:
    """Return an upper bound of the loop passes of a work-item in any kernel of a scheduled function; None if unbounded.

    A loop makes one pass more than it has iterations: the pass in which its condition is false.

    Args:
        env: Ranges of the function's symbols.
    """
    bounds = [
        _passes(lowered_body(part, target), env, lanes_of(part, target), target.language == "webgpu")
        for part in split_kernels(func)
    ]
    known = [n for n in bounds if n is not None]
    return max(known, default=0) if len(known) == len(bounds) else None


def _passes(s: Stmt, env: Env, lanes: int, wide: bool) -> int | None:
    inner, in_functions = _inside(s, env), sum(_of_functions(e, wide) for e in s.own_exprs)
    within = 0 if isinstance(s, For) else in_functions
    for child in s.children:
        more = _passes(child, inner, lanes, wide)
        if more is None:
            return None
        within += more
    if not isinstance(s, For) or s.kind in ("group", "item"):
        return within
    size = as_int(s.extent)
    if size is not None and (size <= 1 or (is_expanded(s, lanes) and not s.marks.transpose)):
        return within * max(size, 0)
    most = interval(s.extent, env)[1]
    # The extent is evaluated in every pass.
    return None if most is None else max(most, 0) * (within + in_functions + 1) + in_functions + 1


def _inside(s: Stmt, env: Env) -> Env:
    """Return the ranges of variables inside a statement."""
    if isinstance(s, For):
        return env.with_loop(s.var, s.extent)
    if isinstance(s, Let) and s.var.dtype.is_int:
        low, high = interval(s.value, env)
        return Env({**env.bounds, s.var: (LEAST if low is None else low, high)}, env.facts)
    return env


def _of_functions(e: Expr, wide: bool) -> int:
    """Return the passes of the loops inside the functions of an expression.

    Args:
        wide: Whether 64-bit integers from memory and from floats are pairs of words, as in WGSL.
    """
    passes: dict[Expr, int] = {}
    pairs: dict[Expr, bool] = {}
    for n in postorder((e,)):
        from_float = n.op == "cast" and n.args[0].dtype.is_float
        pairs[n] = isinstance(n, Load) or from_float or any(pairs[c] for c in n.children)
        function_passes = OF_FUNCTION.get(n.op, 0)
        if wide and pairs[n] and n.dtype.is_int and n.dtype.bytes == 8:
            function_passes = max(function_passes, OF_WIDE.get(n.op, 0))
        passes[n] = function_passes + sum(passes[c] for c in n.children)
    return passes[e]
