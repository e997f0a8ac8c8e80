"""The library form of fused functions: packing, one strided product, an epilogue; same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relax_tune.ir.buffer import Buffer
from relax_tune.ir.dtype import f32, f64
from relax_tune.ir.expr import Expr, Var, as_int, const, substitute
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.graph_builder import GraphBuilder
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.elementwise import Add, Gelu, MulScalar
from relax_tune.ir.op.linalg import Matmul
from relax_tune.ir.op.movement import Permute
from relax_tune.ir.op.reduce import Softmax
from relax_tune.ir.passes.libraries import LibraryForm, LibraryStep, library_form, library_forms
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.passes.reference import evaluate_prim
from relax_tune.ir.struct_info import TensorInfo

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)


def gemm(form: LibraryForm, a: Array, b: Array, sizes: list[int], total: int) -> Array:
    """Row-major strided products read from flat memory, as the routine defines them."""
    batch, sizes = (sizes[0], sizes[1:]) if form.routine.endswith("batched") else (1, sizes)
    m, n, k, ta, tb, lda, ldb, ldc, *strides = sizes
    sa, sb, sc = strides or (0, 0, 0)
    out = np.full(total, np.nan)

    def matrix(flat: Array, start: int, rows: int, columns: int, ld: int, turned: int) -> Array:
        at = start + (np.arange(columns)[None, :] * ld + np.arange(rows)[:, None] if turned else
                      np.arange(rows)[:, None] * ld + np.arange(columns)[None, :])  # fmt: skip
        return flat[at]

    for i in range(batch):
        product = matrix(a.ravel(), i * sa, m, k, lda, ta) @ matrix(b.ravel(), i * sb, k, n, ldb, tb)
        out[i * sc + np.arange(m)[:, None] * ldc + np.arange(n)[None, :]] = product
    return out


def run_form(func: PrimFunc, form: LibraryForm, inputs: list[Array], symbols: dict[Var, int]) -> Array:
    known: dict[Var, Expr] = {v: const(s) for v, s in symbols.items()}

    def number(e: Expr) -> int:
        found = as_int(substitute(e, known))
        assert found is not None
        return found

    memory: dict[Buffer, Array] = dict(zip(func.input_buffers, inputs, strict=True))

    def step(s: LibraryStep) -> None:
        (out,) = evaluate_prim(s.func, [memory[x] for x in s.args[:-1]], [number(x) for x in s.scalars])
        memory[s.args[-1]] = out

    for s in form.before:
        step(s)
    shape = tuple(number(d) for d in form.c.shape)
    flat = gemm(form, memory[form.a], memory[form.b], [number(s) for s in form.scalars], int(np.prod(shape)))
    memory[form.c] = flat.reshape(shape)
    if form.after is not None:
        step(form.after)
    return memory[func.output_buffers[0]]


def check(func: PrimFunc, *sizes: int) -> LibraryForm:
    form = library_form(func)
    assert form is not None
    symbols = dict(zip(func.symbols, sizes, strict=True))
    known: dict[Var, Expr] = {v: const(s) for v, s in symbols.items()}
    inputs = [
        RNG.standard_normal([as_int(substitute(d, known)) or 0 for d in b.shape]).astype(np.float32)
        for b in func.input_buffers
    ]
    (wanted,) = evaluate_prim(func, inputs)
    np.testing.assert_allclose(run_form(func, form, inputs, symbols), wanted, rtol=1e-6, atol=1e-6)
    return form


def legal(op: OperatorSpec, *shapes: tuple[Any, ...]) -> PrimFunc:
    infos = [TensorInfo(tuple(d if isinstance(d, Expr) else const(d) for d in s), f32) for s in shapes]
    return op.legalize("f", infos)


n, m = Var("n"), Var("m")


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_plain_products(rows: int) -> None:
    form = check(legal(Matmul(), (n, 5), (5, 4)), rows)
    assert form.routine == "openblas.sgemm" and not form.before and form.after is None and not form.temps
    form = check(legal(Matmul(True), (n, 5), (4, 5)), rows)
    assert as_int(form.scalars[4]) == 1
    form = check(legal(Matmul(True), (2, 3, n, 5), (2, 3, m, 5)), rows, 4)
    assert form.routine == "openblas.sgemm_batched" and not form.before


def test_collapsible_rows_need_no_packing() -> None:
    form = check(legal(Matmul(), (n, m, 5), (5, 4)), 2, 3)
    assert form.routine == "openblas.sgemm" and not form.before


def test_epilogue_is_a_function_of_its_own() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 6))
    w, c = (RNG.standard_normal(s).astype(np.float32) for s in ((6, 5), (5,)))
    y = g.call(Gelu(), g.call(Add(), g.call(Matmul(), x, g.constant("w", w)), g.constant("c", c)))
    (func,) = lower(g.finish(y)).prims.values()
    form = check(func, 7)
    assert form.after is not None and not form.before and form.c in form.temps
    assert [len(b.shape) for b in form.after.func.buffers] == [2, 1, 2]


def test_layouts_no_stride_reads_are_packed_and_unpacked() -> None:
    g = GraphBuilder()
    b, rows = g.symbol("b"), g.symbol("n")
    q, k, v = (g.call(Permute((0, 2, 1, 3)), g.input(p, (b, rows, 3, 4))) for p in "qkv")
    scores = g.call(MulScalar(0.5), g.call(Matmul(True), q, k))
    y = g.call(Permute((0, 2, 1, 3)), g.call(Matmul(), g.call(Softmax(), scores), v))
    lowered = lower(g.finish(y))
    first, second = (lowered.prims[c.callee] for c in (lowered.calls()[0], lowered.calls()[2]))
    form = check(first, 2, 5)
    assert len(form.before) == 2 and form.after is not None
    form = check(second, 2, 5)
    assert len(form.before) == 1 and form.after is not None
    assert set(library_forms(lowered.module)) == {first.name, second.name}


def test_no_form_for_what_is_no_single_product() -> None:
    assert library_form(legal(Softmax(), (n, 4))) is None
    double = Matmul().legalize("f", [TensorInfo((n, const(4)), f64), TensorInfo((const(4), const(4)), f64)])
    assert library_form(double) is None
