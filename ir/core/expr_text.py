"""Scalar expressions as text in Python's syntax.

Tests: `tests/ir/core/test_scalar_ops.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from relax_tune.ir.core.dtype import bool_, f32, i64
from relax_tune.ir.core.scalar_ops import ATOM, SCALAR_OPS

if TYPE_CHECKING:
    from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Const, Expr, Load, Var, postorder


def format_expr(e: Expr, name: Callable[[Var | Buffer], str] = lambda x: x.name) -> str:
    """Return Python-syntax text with only the parentheses that precedence needs.

    Args:
        name: the text of a variable or buffer.
    """
    done: dict[Expr, tuple[str, int]] = {}
    for n in postorder((e,)):
        done[n] = _format_node(n, done, name)
    return done[e][0]


def _format_node(n: Expr, done: Mapping[Expr, tuple[str, int]], name: Callable[[Var | Buffer], str]) -> tuple[str, int]:
    """Return the text of a node and its precedence."""
    if isinstance(n, Const):
        return _format_const(n)
    if isinstance(n, Var):
        return name(n), ATOM
    if isinstance(n, Load):
        return f"{name(n.buffer)}[{', '.join(done[i][0] for i in n.indices) or '()'}]", ATOM
    known = SCALAR_OPS[n.op]
    level = known.precedence
    if known.infix is not None:
        # comparisons do not chain, and floats do not reassociate: the right side binds one level tighter
        (left, tight_left), (right, tight_right) = (done[a] for a in n.args)
        lhs = left if tight_left >= level + (known.kind == "comparison") else f"({left})"
        rhs = right if tight_right > level else f"({right})"
        return f"{lhs} {known.infix} {rhs}", level
    if n.op == "not":
        text, tight = done[n.args[0]]
        return f"not {text if tight > level else f'({text})'}", level
    args = ", ".join(done[a][0] for a in n.args)
    return (f"{n.op}({args}, {n.dtype})" if known.kind == "cast" else f"{n.op}({args})"), ATOM


def _format_const(n: Const) -> tuple[str, int]:
    """Return the text of a literal: plain for int64, float32 and bool, else with its type. Infinities and NaN are
    strings.
    """
    if not math.isfinite(n.value):
        return f'const("{n.value}", {n.dtype})', ATOM
    if n.dtype in (i64, bool_, f32):
        text = repr(n.value)
        return text, ATOM - 1 if text.startswith("-") else ATOM
    return f"const({n.value!r}, {n.dtype})", ATOM
