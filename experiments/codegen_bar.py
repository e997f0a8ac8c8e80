"""The kernels the emitters are held to, built by hand as scheduled functions."""

from __future__ import annotations

from relax_tune.ir.buffer import Buffer
from relax_tune.ir.expr import Expr, Var, call, ceildiv, const, expr, load, lt, maximum
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.stmt import Block, For, IterVar, Seq, Store, seq


def gelu(x: Expr) -> Expr:
    return x * 0.5 * (call("erf", x * 0.7071067811865476) + 1.0)


def packed_matmul(m: Expr, n: int, k: int, rows: int, cols: int, fused: bool, target: str, tail: str = "pow2") -> PrimFunc:
    """C(m, n) = A(m, k) @ B, B packed as (n / cols, k, cols), with bias and GELU when fused."""
    A = Buffer("A", (m, const(k)), F)
    B = Buffer("B", (const(n // cols), const(k), const(cols)), F)
    bias = Buffer("bias", (const(n),), F)
    C = Buffer("C", (m, const(n)), F)
    acc = Buffer("acc", (m, const(n)), F, "local")
    p, mo = Var("p"), Var("mo")
    vi, vj, vk = Var("vi"), Var("vj"), Var("vk")

    def nest(name, value, init, buffer, with_k):
        i, j, kk = Var(f"{name}_i"), Var(f"{name}_j"), Var(f"{name}_k")
        row, col = mo * rows + i, p * cols + j
        iters = [IterVar(vi, m), IterVar(vj, const(n))]
        bindings = [row, col]
        if with_k:
            iters.append(IterVar(vk, const(k), "reduce"))
            bindings.append(kk)
        body = Block(name, tuple(iters), tuple(bindings), Store(buffer, (vi, vj), value), None, lt(row, m))
        s = For(i, const(rows), For(j, const(cols), body, "vectorized"), "unrolled")
        return For(kk, const(k), s) if with_k else s

    total = load(acc, (vi, vj))
    update = total + load(A, (vi, vk)) * load(B, (vj // cols, vk, vj % cols))
    out = gelu(total + load(bias, (vj,))) if fused else total
    inner = seq(
        nest("init", const(0.0), None, acc, False),
        nest("mm", update, None, acc, True),
        nest("out", out, None, C, False),
    )
    if target == "c":
        body = For(p, const(n // cols), For(mo, ceildiv(m, const(rows)), inner, tail=tail), "parallel")
    else:
        body = For(p, const(n // cols), For(mo, ceildiv(m, const(rows)), inner, "group", 1, tail), "group", 0)
    params = (A, B, bias, C) if fused else (A, B, C)
    return PrimFunc("matmul", params, 1, body, (acc,))


from relax_tune.ir.dtype import f32 as F  # noqa: E402
