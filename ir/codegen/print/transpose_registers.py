"""Recognise copies that transpose square tiles, and write their shuffles.

Tests: `tests/ir/codegen/test_schedules.py`.
"""

from __future__ import annotations

from relax_tune.ir.codegen.lower.affine import Algebra, Poly, plus
from relax_tune.ir.codegen.lower.guards import split_conditions
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, Load, Var, as_int
from relax_tune.ir.core.stmt import BufferStore, For


def transposed_copy(f: For) -> tuple[For, Expr | None, BufferStore] | None:
    """Return (inner loop, condition, store) of two vectorised loops around a copy; None for other loops.

    The condition is `x < bound`, or None for a copy without one.
    """
    inner = f.body
    if not isinstance(inner, For) or inner.kind != "vectorized":
        return None
    conditions, store = split_conditions(inner.body)
    if not isinstance(store, BufferStore) or len(conditions) > 1 or any(c.op != "lt" for c in conditions):
        return None
    return inner, conditions[0] if conditions else None, store


def mark_transpose(f: For, algebra: Algebra, lanes: int) -> For:
    """Mark a vectorised loop around another one as a transposing copy; return other loops as they are.

    The elements read are contiguous along the outer loop, those written along the inner one.
    """
    copy = transposed_copy(f)
    if copy is None:
        return f
    inner, condition, store = copy
    size = as_int(inner.extent)
    if as_int(f.extent) != lanes or size is None or size % lanes:
        return f
    if condition is not None:
        slack = plus(algebra.static(condition.args[1]), algebra.static(condition.args[0]), -1)
        rest = {m: c for m, c in slack.items() if m != (f.var,)}
        is_prefix = condition.args[0].dtype is i64 and slack.get((f.var,)) == -1
        if not is_prefix or algebra.depends(rest, (f.var, inner.var)):
            return f
    value = store.value
    if value.op == "select":
        if any(f.var in algebra.free(e) for e in value.args[::2]):
            return f
        value = value.args[1]
    if not isinstance(value, Load) or value.dtype is not f32 or store.buffer.dtype is not f32:
        return f
    contiguous = _step(value, f.var, algebra) == 1 and _step(store, inner.var, algebra) == 1
    return f.marked(transpose=True) if contiguous and _step(value, inner.var, algebra) != 1 else f


def _step(access: Load | BufferStore, var: Var, algebra: Algebra) -> int | None:
    """Return the stride of `var` in memory; None if it is not constant."""
    flat: Poly = {}
    for d, i in enumerate(access.indices):
        wide = algebra.times(flat, algebra.static(access.buffer.shape[d])) if d else flat
        flat = plus(wide, algebra.static(i))
    others = {m: c for m, c in flat.items() if m != (var,)}
    return None if algebra.depends(others, (var,)) else flat.get((var,), 0)


def transpose_text(width: int) -> str:
    """Return a function that transposes `width` vectors, passed as pointers.

    In each of log2(width) steps pairs of rows swap the lanes whose numbers differ in one bit.
    """
    rows = [f"x{k}" for k in range(width)]
    lines = [f"  $V {', '.join(f'{r} = *a{k}' for k, r in enumerate(rows))}, t;"]
    step = 1
    while step < width:
        low = ", ".join(str(j + width - step if j & step else j) for j in range(width))
        high = ", ".join(str(j + width if j & step else j + step) for j in range(width))
        for a, b in ((rows[k], rows[k + step]) for k in range(width) if not k & step):
            lines.append(f"  t = __builtin_shufflevector({a}, {b}, {low});")
            lines.append(f"  {b} = __builtin_shufflevector({a}, {b}, {high}); {a} = t;")
        step *= 2
    lines += [f"  *a{k} = {r};" for k, r in enumerate(rows)]
    head = ", ".join(f"$V *a{k}" for k in range(width))
    return f"STATIC void $N({head}) {{\n" + "\n".join(lines) + "\n}"
