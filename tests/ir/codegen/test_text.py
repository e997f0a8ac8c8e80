"""The shape of generated text: registers instead of arrays, literal tiles, tails, splitting into kernels, refusals."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.ir.codegen import codegen_cases as make
from tests.ir.codegen.codegen_runner import TARGETS, Compiled, opened
from tests.support import schedule_functions, zoo
from tests.support.candidates import WIDE

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.generate import generate, split_kernels
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import bf16, f16, f32, i8, i32, u8
from relax_tune.ir.core.expr import (
    Tunable,
    Var,
    call,
    cast,
    ceildiv,
    const,
    eq,
    free_vars,
    load,
    lt,
    maximum,
    minimum,
    select,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IfThenElse, IterVar, blocks, loops, seq
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import generate_sketches, instantiate, simplify_func


def body_of(source: str) -> str:
    return source.split("/*end prelude*/")[1]


@pytest.mark.parametrize("language", ["c", "opencl"])
def test_accumulators_are_named_vectors(language: str) -> None:
    lanes = TARGETS[language].lanes
    text = body_of(generate(make.matmul(language, 4, 2 * lanes, 64, "pow2"), TARGETS[language]).source)
    assert not re.search(r"acc\w*\[", text)
    assert re.search(rf"f32x{lanes} acc\w*( = \{{0\}})?;", text)
    # the last rows run as pieces of 2 and 1
    assert "(mo_left_ / 2) == 1" in text and "(mo_left_ % 2) == 1" in text
    assert "* 64" in text and "< 64;" in text


def test_wider_tiles_have_no_more_code_for_the_rest() -> None:
    lanes = TARGETS["c"].lanes
    masked = set()
    for vectors in (2, 3, 6):
        func = make.pointwise("c", (1, vectors * lanes), ("serial", "vectorized"), ("peel", "peel"), lambda x: x * 2.0)
        text = body_of(generate(func, TARGETS["c"]).source)
        masked.add((text.count("rt_loadm_"), text.count("rt_storem_")))
    assert masked == {(1, 1)}


def test_generate_is_deterministic() -> None:
    for language, target in TARGETS.items():
        first = generate(make.matmul(language, 4, 16, 8, "pow2"), target).source
        assert first == generate(make.matmul(language, 4, 16, 8, "pow2"), target).source


def test_exp_is_in_the_prelude_only_when_used() -> None:
    plain = generate(
        make.pointwise("c", (1, 16), ("serial", "vectorized"), ("peel", "peel"), lambda x: x), TARGETS["c"]
    )
    assert "rt_exp" not in plain.source
    assert plain.source.startswith("/*prelude*/\n") and "\n/*end prelude*/\n" in plain.source


def test_opencl_launch() -> None:
    kernel = generate(make.matmul("opencl", 4, 16, 8, "pow2"), TARGETS["opencl"])
    m, n = kernel.buffers[0].shape[0], kernel.buffers[1].shape[1]
    assert kernel.grid == (ceildiv(n, 16), ceildiv(m, 4))
    assert kernel.local == (1, 1)
    assert set(kernel.scalars) == {m, n}


def test_split_kernels_at_top_level() -> None:
    softmax = next(c.func for c in zoo.cases() if c.name == "softmax")
    parts = split_kernels(softmax)
    assert [p.name for p in parts] == ["softmax_part0", "softmax_part1", "softmax_part2", "softmax_part3"]
    top = softmax.allocs[0]
    assert parts[0].output_buffers == (top,) and top in parts[1].input_buffers
    assert all(p.allocs == () for p in parts)
    assert split_kernels(parts[0]) == (parts[0],)


@pytest.mark.process
def test_split_kernels_puts_prepack_first() -> None:
    b = TensorBuilder("packed")
    n = Var("n")
    x, w, y = b.input("x", (n, 4)), b.input("w", (4, 8), const=True), b.output("y", (n, 8))
    p = b.alloc("p", (8, 4))
    b.compute(p, lambda j, k: w[k, j])
    b.reduce(y, (4,), const(0.0), lambda acc, i, j, k: acc + x[i, k] * p[j, k])
    func = b.finish()
    first, second = func.body.stmts  # type: ignore[union-attr]
    marked = _as_prepare(first)
    func = replace(func, body=seq(second, marked))
    prepare, compute = split_kernels(func)
    assert blocks(prepare.body)[0].role == "prepack" and prepare.input_buffers == (w.buffer,)
    assert compute.name == "packed" and p.buffer in compute.input_buffers
    run = Compiled(opened("c"), "c", func)
    rng = np.random.default_rng(0)
    a, c = rng.standard_normal((3, 4), np.float32), rng.standard_normal((4, 8), np.float32)
    (actual,) = run([a, c, np.empty((3, 8), np.float32)])
    np.testing.assert_allclose(actual, a @ c, rtol=1e-5)


def _as_prepare(s: object) -> For:
    assert isinstance(s, For)
    inner = s.body
    body = replace(inner, role="prepack") if isinstance(inner, Block) else _as_prepare(inner)
    return replace(s, body=body)


def test_work_items_share_memory_across_barriers() -> None:
    func, size = make.through_shared_memory(), 16
    kernel = generate(func, TARGETS["opencl"])
    assert kernel.local == (size,) and kernel.source.count("barrier(") == 1 and "local float tile_[16]" in kernel.source
    run = Compiled(opened("opencl"), "opencl", func)
    data = np.random.default_rng(0).standard_normal((5, size), np.float32)
    (actual,) = run([data, np.empty_like(data)])
    np.testing.assert_array_equal(actual, data[:, ::-1])
    with pytest.raises(BuildError, match="work-item loop"):
        generate(func, TARGETS["c"])


def test_generate_refusals_name_the_remedy() -> None:
    with pytest.raises(BuildError, match="instantiate"):
        generate(next(f for f in zoo.functions() if any(True for _ in _tunables(f))), TARGETS["c"])
    n, i, vi = Var("n"), Var("i"), Var("vi")
    x = Buffer("x", (n,), f32, "local")
    y = Buffer("y", (n,), f32)
    loop = For(i, n, Block("b", (IterVar(vi, n),), (i,), BufferStore(y, (vi,), load(x, (vi,)))))
    first = For(i, n, Block("a", (IterVar(vi, n),), (i,), BufferStore(x, (vi,), const(0.0))))
    with pytest.raises(BuildError, match="constant extent"):
        generate(PrimFunc("f", (y,), 1, seq(first, loop), (x,)), TARGETS["c"])
    with pytest.raises(BuildError, match="used by 2 top-level statements"):
        split_kernels(PrimFunc("f", (y,), 1, seq(replace(first, kind="parallel"), loop), (x,)))
    assert len(split_kernels(PrimFunc("f", (y,), 1, seq(first, loop), (x,)))) == 1  # the same thread does both
    with pytest.raises(BuildError, match="global scope"):
        generate(PrimFunc("f", (x, y), 1, loop), TARGETS["c"])


def _tunables(func: PrimFunc) -> list[object]:
    return [v for s in loops(func.body) for v in free_vars(s.extent) if isinstance(v, Tunable)]


@pytest.mark.process
def test_plain_if_with_else() -> None:
    n, i = Var("n"), Var("i")
    y = Buffer("y", (n,), f32)
    body = For(i, n, IfThenElse(eq(i % 2, 0), BufferStore(y, (i,), const(1.0)), BufferStore(y, (i,), const(2.0))))
    func = PrimFunc("f", (y,), 1, body)
    for language in ("c", "opencl"):
        (actual,) = Compiled(opened(language), language, func)([np.empty(7, np.float32)])
        np.testing.assert_array_equal(actual, [1, 2, 1, 2, 1, 2, 1])


# What OpenCL text may call by name: indices, barriers, and what compiles to no call (bit casts, clang's builtins).
FREE = re.compile(
    r"get_(group|local)_id|barrier|as_\w+|__builtin_\w+|__has_builtin|__attribute__|aligned|ext_vector_type|rt_\w+"
)
WORDS = frozenset({"if", "for", "return", "while", "defined", "always_inline", "sizeof"})


def test_opencl_calls_no_builtin() -> None:
    """PoCL would not inline such calls."""
    x = Var("x", f32)
    operations = [call(name, x) for name in ("exp", "log", "erf", "tanh", "sqrt", "rsqrt", "abs", "floor", "rint")]
    operations += [minimum(x, x * 2.0), maximum(x, x * 2.0), select(lt(x, 0.0), x, x * 2.0)]
    operations += [cast(cast(x, d), f32) for d in (i8, u8, i32, bf16, f16)]
    for value in operations:
        for width in (8, 1):
            kinds = ("serial", "vectorized" if width > 1 else "serial")
            func = make.pointwise(
                "opencl", (1, width), kinds, ("peel", "peel"), lambda e, v=value: substitute(v, {x: e})
            )
            kernel = generate(func, TARGETS["opencl"])
            source = re.sub(
                r"#else\n.*?#endif", "#endif", kernel.source, flags=re.DOTALL
            )  # for compilers other than clang
            called = set(re.findall(r"\b([a-z_]\w*)\s*\(", source, re.IGNORECASE)) - WORDS - {kernel.name}
            assert not [name for name in called if not FREE.fullmatch(name)], value


def turned_copy() -> PrimFunc:
    """B[p, k, j] = A[j, k] in panels of 32 columns, zeros behind the last."""
    s = Schedule(schedule_functions.transposed_product())
    s.apply("pad", block="mm", factors=[None, 32, None])
    c_0, c_1 = s.split(s.loops_of("B_pad_fill")[0], [None, 32])
    d_0, d_1 = s.split(s.loops_of("B_pad_fill")[-1], [None, 16])
    s.reorder([c_0, d_0, d_1, c_1])
    s.vectorize(d_1)
    s.vectorize(c_1)
    s.apply("tile_layout", buffer="B_pad", dim=0, factor=32, order=[0, 2, 1])
    return split_kernels(simplify_func(s.func))[0]


def test_transposing_copy_stays_in_registers() -> None:
    text = body_of(generate(turned_copy(), TARGETS["c"]).source)
    # two 16 x 16 tiles, the last one possibly with fewer columns: no element is gathered separately
    assert text.count("rt_exchange_f32x16(") == 1 and "_o_ < 2;" in text and text.count("rt_loadm_f32x16") == 16
    assert not re.search(r"\bB\w*\[", text)


@pytest.mark.slow
def test_narrow_tail_has_one_body_per_possible_width() -> None:
    def bodies(n: int | None) -> int:
        func = schedule_functions.matmul(n, 8, epilogue=False, const_weight=False)
        sketch = next(s for s in generate_sketches(func, WIDE) if s.name == "matmul.serial.packed")
        instance = instantiate(sketch, {"NR": 48, "MR": 1})
        return body_of(generate(split_kernels(instance)[-1], TARGETS["c"]).source).count("mm_k_++")

    # full panels and a rest of one, two or three vectors; fewer cases if more is known of the rest
    assert (bodies(None), bodies(96), bodies(100), bodies(130)) == (3, 1, 2, 1)
