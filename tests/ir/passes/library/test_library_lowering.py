"""The library form of fused functions: packing, one strided product and an epilogue, with equal results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from tests.runtime.library.library_matrices import ACTIVATIONS

from relax_tune.errors import UserError
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bf16, f16, f32, f64, u8
from relax_tune.ir.core.expr import Expr, Var, as_int, const, eq, substitute
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.reference import evaluate_prim
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Exp, Gelu, Mul, MulScalar, Relu, Sigmoid, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.ir.passes.fusion.unfuse import FunctionStep
from relax_tune.ir.passes.library.epilogue_match import BINARY_EPILOGUE_OPS, EPILOGUE_OPS
from relax_tune.ir.passes.library.library_forms import ALTERNATIVES, Alternative, MatrixProduct, whole
from relax_tune.ir.passes.library.library_lowering import LibraryForm, library_forms
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.library import cublaslt, onednn
from relax_tune.runtime.library.registry import OURS

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)


OPENBLAS = [a for a in ALTERNATIVES if a.library == "openblas"]
PACKED = [a for a in ALTERNATIVES if isinstance(a.takes, MatrixProduct) and a.takes.packing is not None]
ONEDNN = [a for a in ALTERNATIVES if a.library == "onednn" and a not in PACKED]
CUBLAS, CUBLASLT = ([a for a in ALTERNATIVES if a.library == name] for name in ("cublas", "cublaslt"))
SCALARS = {a.routine: a.scalars for a in ALTERNATIVES}
PACKINGS = {p.routine: p for a in PACKED if isinstance(a.takes, MatrixProduct) and (p := a.takes.packing) is not None}
AFTER: Mapping[str, Callable[..., Array]] = {
    "add": lambda y, d: y + d,
    "mul": lambda y, d: y * d,
    "bias": lambda y, d: y + d,
    "residual": lambda y, d: y + d,
    **ACTIVATIONS,
}


def epilogue_names(code: int, known: Sequence[str] = onednn.FOLLOWS) -> list[str]:
    return [] if code == 0 else [known[code % 16 - 1], *epilogue_names(code // 16, known)]


def gemm(
    a: Array,
    b: Array,
    arrays: Sequence[Array],
    sizes: Mapping[str, int],
    total: int,
    known: Sequence[str] = onednn.FOLLOWS,
) -> Array:
    """Row-major strided products from flat memory and their epilogues, as the routine defines them."""
    m, n, k = (sizes[x] for x in "mnk")
    out = np.full(total, np.nan)

    def matrix(flat: Array, start: int, rows: int, columns: int, row: int, column: int) -> Array:
        return flat.ravel()[start + np.arange(rows)[:, None] * row + np.arange(columns)[None, :] * column]

    def operand(which: str, flat: Array, i: int, rows: int, columns: int) -> Array:
        lead = sizes[f"ld{which}"]
        assert lead >= (rows if sizes[f"trans_{which}"] else columns), "routines refuse rows that overlap"
        row, column = (1, lead) if sizes[f"trans_{which}"] else (lead, 1)
        return matrix(flat, i * sizes.get(f"stride_{which}", 0), rows, columns, row, column)

    for i in range(sizes.get("batch", 1)):
        y, left = operand("a", a, i, m, k) @ operand("b", b, i, k, n), list(enumerate(arrays))
        for name in epilogue_names(sizes.get("follows", 0), known):
            if name in BINARY_EPILOGUE_OPS:
                (at, array), *left = left
                stride, row, column = (sizes[f"{what}_d{at}"] for what in ("stride", "row", "column"))
                y = AFTER[name](y, matrix(array, i * stride, m, n, row, column))
            else:
                y = AFTER[name](y)
        out[i * sizes.get("stride_c", 0) + np.arange(m)[:, None] * sizes["ldc"] + np.arange(n)[None, :]] = y
    return out


def run_form(func: PrimFunc, form: LibraryForm, inputs: list[Array], symbols: dict[Var, int]) -> Array:
    table: dict[Var, Expr] = {v: const(s) for v, s in symbols.items()}

    def number(e: Expr) -> int:
        value = as_int(substitute(e, table))
        assert value is not None
        return value

    memory: dict[Buffer, Array] = dict(zip(func.input_buffers, inputs, strict=True))

    def step(s: FunctionStep) -> None:
        (out,) = evaluate_prim(s.func, [memory[x] for x in s.args[:-1]], [number(x) for x in s.scalars])
        memory[s.args[-1]] = out

    for s in form.before:
        step(s)
    a, b, *arrays, c = form.buffers
    shape = tuple(number(d) for d in c.shape)
    sizes = dict(zip(SCALARS.get(form.routine, OPENBLAS[0].scalars), map(number, form.scalars), strict=True))
    if form.packing is not None:  # the packed layout is opaque: here, packing keeps the weights as they are
        weights, packed = form.packing.buffers
        assert packed is b and math.prod(map(number, packed.shape)) >= memory[weights].size and weights in func.consts
        memory[packed] = memory[weights]
        packing_sizes = dict(
            zip(PACKINGS[form.packing.routine].scalars, map(number, form.packing.scalars), strict=True)
        )
        assert sizes | packing_sizes == packing_sizes | sizes, "both routines get the same sizes"
        sizes |= packing_sizes
    wide = [memory[x].astype(np.float64) for x in (a, b, *arrays)]
    known = cublaslt.FOLLOWS if form.routine.startswith("cublaslt") else onednn.FOLLOWS
    flat = gemm(wide[0], wide[1], wide[2:], sizes, int(np.prod(shape)), known)
    memory[c] = flat.astype(c.dtype.numpy).reshape(shape)
    if form.after is not None:
        step(form.after)
    return memory[func.output_buffers[0]]


def check(func: PrimFunc, *sizes: int, table: Sequence[Alternative] = OPENBLAS, bound: float = 1e-6) -> LibraryForm:
    (form,) = library_forms(func, table)
    symbols = dict(zip(func.symbols, sizes, strict=True))
    known: dict[Var, Expr] = {v: const(s) for v, s in symbols.items()}
    inputs = [
        RNG.standard_normal([as_int(substitute(d, known)) or 0 for d in b.shape]).astype(b.dtype.numpy)
        for b in func.input_buffers
    ]
    (expected,) = evaluate_prim(func, inputs)
    actual = run_form(func, form, inputs, symbols)
    np.testing.assert_allclose(actual.astype(float), expected.astype(float), rtol=bound, atol=bound)
    return form


def legalised(op: OperatorSpec, *shapes: tuple[Any, ...]) -> PrimFunc:
    infos = [TensorInfo(tuple(d if isinstance(d, Expr) else const(d) for d in s), f32) for s in shapes]
    return op.legalize("f", infos)


n, m = Var("n"), Var("m")


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_plain_products(rows: int) -> None:
    form = check(legalised(Matmul(), (n, 5), (5, 4)), rows)
    assert form.routine == "openblas.sgemm" and not form.before and form.after is None and not form.temps
    form = check(legalised(Matmul(True), (n, 5), (4, 5)), rows)
    assert as_int(form.scalars[4]) == 1
    form = check(legalised(Matmul(True), (2, 3, n, 5), (2, 3, m, 5)), rows, 4)
    assert form.routine == "openblas.sgemm_batched" and not form.before


@pytest.mark.parametrize("swapped", [False, True])
def test_library_form_inner_dim_of_one_keeps_rows_separate(swapped: bool) -> None:
    check(legalised(Matmul(swapped), (n, 1), (m, 1) if swapped else (1, m)), 3, 4)
    check(legalised(Matmul(swapped), (2, n, 1), (2, m, 1) if swapped else (2, 1, m)), 3, 4)


def test_collapsible_rows_need_no_packing() -> None:
    form = check(legalised(Matmul(), (n, m, 5), (5, 4)), 2, 3)
    assert form.routine == "openblas.sgemm" and not form.before


def test_library_form_epilogue_becomes_separate_function() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 6))
    w, c = (RNG.standard_normal(s).astype(np.float32) for s in ((6, 5), (5,)))
    y = g.call(Gelu(), g.call(Add(), g.call(Matmul(), x, g.constant("w", w)), g.constant("c", c)))
    (func,) = lower(g.finish(y)).prims.values()
    form = check(func, 7)
    assert form.after is not None and not form.before and form.buffers[-1] in form.temps
    assert [len(b.shape) for b in form.after.func.buffers] == [2, 1, 2]


# -- what follows the product, taken along -----------------------------------------------------------------------------------

COUNT = itertools.count()


def gelu_by_tanh(g: GraphBuilder, y: Any) -> Any:
    cube = g.call(Mul(), g.call(Mul(), y, y), y)
    inner = g.call(MulScalar(math.sqrt(2 / math.pi)), g.call(Add(), y, g.call(MulScalar(0.044715), cube)))
    return g.call(Mul(), g.call(MulScalar(0.5), y), g.call(AddScalar(1.0), g.call(Tanh(), inner)))


def with_bias(g: GraphBuilder, y: Any) -> Any:
    return g.call(Add(), y, g.constant("c", RNG.standard_normal(5).astype(np.float32)))


def other(g: GraphBuilder, rows: Any) -> Any:
    name = f"z{next(COUNT)}"
    return g.input(name, (rows, 5))


@pytest.mark.parametrize(
    ("names", "rest", "make"),
    [
        ("", False, lambda g, y, n: y),
        ("add", False, lambda g, y, n: with_bias(g, y)),
        ("add gelu", False, lambda g, y, n: g.call(Gelu(), with_bias(g, y))),
        ("add relu", False, lambda g, y, n: g.call(Relu(), with_bias(g, y))),
        ("gelu_tanh", False, lambda g, y, n: gelu_by_tanh(g, y)),
        ("add swish", False, lambda g, y, n: (z := with_bias(g, y), g.call(Mul(), z, g.call(Sigmoid(), z)))[1]),
        ("sigmoid", False, lambda g, y, n: g.call(Sigmoid(), y)),
        ("add add", False, lambda g, y, n: g.call(Add(), other(g, n), with_bias(g, y))),
        ("add tanh mul", False, lambda g, y, n: g.call(Mul(), g.call(Tanh(), with_bias(g, y)), other(g, n))),
        ("add", True, lambda g, y, n: g.call(MulScalar(0.5), with_bias(g, y))),
        ("add", True, lambda g, y, n: (z := with_bias(g, y), g.call(Add(), z, g.call(Exp(), z)))[1]),
        ("", True, lambda g, y, n: g.call(Exp(), y)),
        (
            "add mul",
            True,
            lambda g, y, n: g.call(Add(), g.call(Mul(), g.call(Add(), y, other(g, n)), other(g, n)), other(g, n)),
        ),
        ("add gelu", True, lambda g, y, n: g.call(Permute((1, 0)), g.call(Gelu(), with_bias(g, y)))),
    ],
)
def test_epilogue_becomes_part_of_the_library_call(names: str, rest: bool, make: Any) -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n, 6))
    w = g.constant("w", RNG.standard_normal((6, 5)).astype(np.float32))
    (func,) = lower(g.finish(make(g, g.call(Matmul(), x, w), n))).prims.values()
    for table, routine in ((ONEDNN, "onednn.matmul"), (PACKED, "onednn.matmul_packed")):
        for rows in (1, 7):
            form = check(func, rows, table=table)
        code = form.scalars[SCALARS[routine].index("follows")]
        assert form.routine == routine and epilogue_names(as_int(code) or 0) == names.split()
        assert (form.after is not None) == rest and (rest or form.buffers[-1] is func.output_buffers[0])


def test_only_weights_are_packed_ahead() -> None:
    g = GraphBuilder()
    rows = g.symbol("n")
    (func,) = lower(g.finish(g.call(Matmul(), g.input("x", (rows, 6)), g.input("w", (6, 5))))).prims.values()
    assert library_forms(func, ONEDNN) and not library_forms(func, PACKED)


def test_epilogue_of_batched_matmul() -> None:
    g = GraphBuilder()
    b, rows = g.symbol("b"), g.symbol("n")
    q, k = (g.input(name, (b, rows, 4)) for name in "qk")
    scores = g.call(Add(), g.call(Matmul(True), q, k), g.input("bias", (rows, rows)))
    (func,) = lower(g.finish(g.call(Relu(), scores))).prims.values()
    form = check(func, 3, 5, table=ONEDNN)
    assert form.routine == "onednn.matmul_batched" and form.after is None and not form.before


# -- 16-bit floats, and what NVIDIA's libraries take -------------------------------------------------------------------------

HALF_BOUND = 1e-2


def half_product(dtype: DType, after: Any, turned: bool = False, batched: bool = False) -> PrimFunc:
    """The tensor function of a product of arrays of `dtype` and what `after(builder, product, rows)` makes of it."""
    g = GraphBuilder()
    rows = g.symbol("n")
    lead = (3,) if batched else ()
    x, w = g.input("x", (*lead, rows, 6), dtype), g.input("w", (*lead, *((5, 6) if turned else (6, 5))), dtype)
    (func,) = lower(g.finish(after(g, g.call(Matmul(turned), x, w), rows))).prims.values()
    return func


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_16_bit_floats(dtype: DType, batched: bool, turned: bool) -> None:
    """The routine writes the sums as f32 or rounded, as the function stores them."""
    end = "_batched" if batched else ""
    for table, name in ((CUBLAS, "cublas.gemm"), (CUBLASLT, "cublaslt.matmul")):
        form = check(half_product(dtype, lambda g, y, n: y, turned, batched), 4, table=table, bound=HALF_BOUND)
        assert form.routine == f"{name}_{dtype}{end}" and not form.before and form.after is None and not form.temps
    wide = half_product(dtype, lambda g, y, n: g.call(Exp(), y), turned, batched)
    form = check(wide, 4, table=CUBLAS, bound=HALF_BOUND)
    assert form.routine == f"cublas.gemm_{dtype}{end}" and form.after is not None and form.temps[0].dtype is dtype


def test_sums_of_16_bit_floats_used_as_float32() -> None:
    g = GraphBuilder()
    rows = g.symbol("n")
    x, w = (g.call(Cast(f32), g.input(name, shape, bf16)) for name, shape in (("x", (rows, 6)), ("w", (6, 5))))
    (func,) = lower(g.finish(g.call(Relu(), g.call(Matmul(), x, w)))).prims.values()
    form = check(func, 7, table=CUBLASLT)
    assert (
        form.routine == "cublaslt.matmul_bf16_f32"
        and form.after is None
        and not form.before
        and form.buffers[-1].dtype is f32
    )


def bias(g: GraphBuilder, y: Any, dtype: DType = f32) -> Any:
    return g.call(Add(), y, g.input(f"b{next(COUNT)}", (5,), dtype))


def residual(g: GraphBuilder, y: Any, rows: Any, dtype: DType = f32) -> Any:
    return g.call(Add(), g.input(f"r{next(COUNT)}", (rows, 5), dtype), y)


@pytest.mark.parametrize(
    ("names", "rest", "make"),
    [
        ("bias", False, lambda g, y, n: bias(g, y)),
        ("residual", False, lambda g, y, n: residual(g, y, n)),
        ("bias relu", False, lambda g, y, n: g.call(Relu(), bias(g, y))),
        ("bias residual gelu_tanh", False, lambda g, y, n: gelu_by_tanh(g, residual(g, bias(g, y), n))),
        ("residual bias", False, lambda g, y, n: bias(g, residual(g, y, n))),
        ("bias", True, lambda g, y, n: bias(g, bias(g, y))),
        ("bias", True, lambda g, y, n: g.call(Gelu(), bias(g, y))),
        ("relu", True, lambda g, y, n: residual(g, g.call(Relu(), y), n)),
        ("", True, lambda g, y, n: g.call(Mul(), y, g.input("z", (5,)))),
    ],
)
def test_cublaslt_epilogues(names: str, rest: bool, make: Any) -> None:
    """The library takes one bias, one residual, then an activation; its GELU is the form with tanh."""
    g = GraphBuilder()
    rows = g.symbol("n")
    product = g.call(Matmul(), g.input("x", (rows, 6)), g.input("w", (6, 5)))
    (func,) = lower(g.finish(make(g, product, rows))).prims.values()
    for size in (1, 7):
        form = check(func, size, table=CUBLASLT)
    code = form.scalars[SCALARS["cublaslt.matmul_f32"].index("follows")]
    assert epilogue_names(as_int(code) or 0, cublaslt.FOLLOWS) == names.split() and (form.after is not None) == rest


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_epilogues_in_16_bit_floats(dtype: DType) -> None:
    func = half_product(dtype, lambda g, y, n: g.call(Relu(), residual(g, bias(g, y, dtype), n, dtype)))
    form = check(func, 9, table=CUBLASLT, bound=HALF_BOUND)
    code = form.scalars[SCALARS[form.routine].index("follows")]
    assert epilogue_names(as_int(code) or 0, cublaslt.FOLLOWS) == ["bias", "residual", "relu"] and form.after is None


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
    assert {n for n, f in lowered.prims.items() if library_forms(f)} == {first.name, second.name}


def test_library_forms_need_a_single_matmul() -> None:
    assert not library_forms(legalised(Softmax(), (n, 4)))
    double = Matmul().legalize("f", [TensorInfo((n, const(4)), f64), TensorInfo((const(4), const(4)), f64)])
    assert not library_forms(double)


# -- the table ---------------------------------------------------------------------------------------------------------------


def test_library_entries_match_the_library() -> None:
    expected = SCALARS | {routine: packing.scalars for routine, packing in PACKINGS.items()}
    assert {routine: scalars for kind in OURS for routine, scalars in kind.routines.items()} == expected
    assert {(a.takes.follows, a.takes.operands) for a in ONEDNN if isinstance(a.takes, MatrixProduct)} == {
        (onednn.FOLLOWS, onednn.OPERANDS)
    }
    assert {(a.takes.follows, a.takes.operands) for a in CUBLASLT if isinstance(a.takes, MatrixProduct)} == {
        (cublaslt.FOLLOWS, len(cublaslt.WITH_ARRAY))
    }
    assert set(EPILOGUE_OPS) == {*onednn.FOLLOWS, *cublaslt.FOLLOWS}


@pytest.mark.parametrize(
    ("routine", "scalars", "message"),
    [("sgemm", ("m",), "got no dot in the name"), ("my.sgemm", ("m", "rows"), "expected LIBRARY.NAME .*; got rows")],
)
def test_wrong_library_entry_is_refused(routine: str, scalars: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Alternative(routine, MatrixProduct(), scalars, ("c",))


def test_requirements_of_a_routine_are_proved() -> None:
    def forms(needs: Any, *shape: Any) -> int:
        entry = Alternative("my.gemm", MatrixProduct(), ("m", "n", "k"), ("c",), needs)
        return len(library_forms(legalised(Matmul(), shape, (shape[-1], 8)), [entry]))

    assert forms(lambda s: eq(s["k"] % 4, 0), n, 12) == 1
    assert forms(lambda s: eq(s["k"] % 4, 0), n, 13) == 0, "never"
    assert forms(lambda s: eq(s["m"] % 4, 0), n, 12) == 0, "not for every n"


def test_operands_are_packed_for_row_only_routine() -> None:
    rows_only = Alternative("my.gemm", MatrixProduct(transposed=False), ALTERNATIVES[0].scalars, ("c",))
    for op, shapes, packed in (
        (Matmul(), ((n, 5), (5, 4)), 0),
        (Matmul(True), ((n, 5), (4, 5)), 1),
        (Matmul(), ((n, 5), (5, 1)), 0),
    ):
        func = legalised(op, *shapes)
        (form,) = library_forms(func, [rows_only])
        assert len(form.before) == packed and [as_int(s) for s in form.scalars[3:5]] == [0, 0]
        inputs = [RNG.standard_normal([as_int(d) or 3 for d in b.shape]).astype(np.float32) for b in func.input_buffers]
        (expected,) = evaluate_prim(func, inputs)
        np.testing.assert_allclose(run_form(func, form, inputs, {func.symbols[0]: 3}), expected, rtol=1e-6, atol=1e-6)


def test_a_workspace_is_an_array_before_the_output() -> None:
    entry = Alternative("my.gemm", MatrixProduct(), ("m", "n", "k"), ("c",), workspace=lambda s: s["m"] * s["k"] * 4)
    func = legalised(Matmul(), (n, 5), (5, 4))
    (form,) = library_forms(func, [entry])
    a, b, space, c = form.buffers
    assert (a, b, c) == func.buffers and space in form.temps and space.dtype is u8 and repr(space.shape) == "(n * 20,)"


def softmax(*dims: Any) -> IRModule:
    g = GraphBuilder()
    return g.finish(g.call(Softmax(), g.input("x", dims)))


def test_whole_function_routine_takes_any_sizes() -> None:
    rows, columns = Var("rows"), Var("columns")
    entry = Alternative("my.softmax", whole(softmax(rows, columns)), ("rows", "columns"), ("c",))
    for dims, sizes in (((n, 7), "n, 7"), ((n, m), "n, m"), ((4, 1), "4, 1"), ((2, n, 7), "m, 7")):
        (func,) = lower(softmax(*dims)).prims.values()
        (form,) = library_forms(func, [entry])
        assert form.buffers == func.buffers and not form.before and form.after is None
        assert repr(form.scalars) == f"({sizes})"
    assert not library_forms(legalised(Exp(), (n, 7)), [entry]) and not library_forms(
        legalised(Softmax(), (n,)), [entry]
    )
    square = Alternative("my.square", whole(softmax(rows, rows)), ("rows",), ("c",))
    (func,) = lower(softmax(n, m)).prims.values()
    assert not library_forms(func, [square]), "not for certain"
    both = GraphBuilder()
    x = both.input("x", (rows, columns))
    with pytest.raises(UserError, match=r"one tensor function, got 2: "):
        whole(both.finish([both.call(Softmax(), x), both.call(Exp(), x)]))


def test_a_whole_function_may_have_weights() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 6))
    w, c = g.constant("w", np.ones((6, 5), np.float32)), g.constant("c", np.ones(5, np.float32))
    y = g.call(Gelu(), g.call(Add(), g.call(Matmul(), x, w), c))
    (func,) = lower(g.finish(y)).prims.values()
    r = GraphBuilder()
    a, k, j = (r.symbol(s) for s in "akj")
    parts = [r.input("x", (a, k)), r.input("w", (k, j)), r.input("c", (j,))]
    reference = r.finish(r.call(Gelu(), r.call(Add(), r.call(Matmul(), *parts[:2]), parts[2])))
    entries = (*OPENBLAS, Alternative("my.fused", whole(reference), ("a", "k", "j"), ("c",)))
    first, second = library_forms(func, entries)
    assert (first.routine, second.routine, repr(second.scalars)) == ("openblas.sgemm", "my.fused", "(n, 6, 5)")
