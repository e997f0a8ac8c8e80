"""Generated names never clash with names of the target languages, whatever names a program uses."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ir.codegen.codegen_runner import TARGETS, Compiled, opened

from relax_tune.ir.codegen.generate import generate
from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.codegen.print.c.prelude import CPrelude
from relax_tune.ir.codegen.print.c.printer import CPrinter
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, load
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import BufferStore, For
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.program.program import KernelSource

# Keywords, types, functions, variables and macros of C, C++, OpenCL and CUDA.
TAKEN = tuple(
    """
    auto bool break case char class const continue default delete do double else enum extern float for friend goto half if inline
    int kernel local long main namespace new operator private register restrict return short signed sizeof static struct switch
    template this throw typedef typename uchar uint ulong union unsigned ushort void volatile while xor alignas asm global constant
    linux unix i386 NULL NAN INFINITY MAXFLOAT HUGE_VALF FLT_MAX INT_MIN M_PI M_PI_2 M_SQRT1_2 CLK_LOCAL_MEM_FENCE uint8_t size_t
    float4 int2 uchar16 image2d_t event_t sampler_t dim3 warpSize threadIdx blockIdx blockDim gridDim __syncthreads __shared__
    dot cross length distance normalize fast_length mad mad24 mul24 fma clamp mix step smoothstep sign degrees radians max min abs
    abs_diff add_sat hadd rhadd rotate select bitselect shuffle shuffle2 vload4 vstore4 as_float convert_int4_sat exp exp2 exp10
    expm1 log log2 log10 pow pown powr rootn sqrt rsqrt cbrt erf erfc erff tanh sin cos floor ceil rint round trunc fmin fmax fmod
    j0 j1 y0 y1 jn yn gamma lgamma signbit isnan isinf any all printf barrier mem_fence prefetch async_work_group_copy atomic_add
    atomicAdd get_global_id get_local_id get_group_id get_num_groups work_group_reduce_add sub_group_broadcast clock malloc free
    memcpy memset assert exit index time read write saturate norm3d rhypot tex2D surf2Dread i64 f32x8 f32x8u rt_max_f32 RT_MAX_F32
    """.split()  # noqa: SIM905
)
NAMES = tuple(dict.fromkeys((*TAKEN, *OPERATORS)))
# the names that are compiled; a sample is enough, as all are renamed in the same way
SOME = ("dot", "M_PI", "NULL", "f32x8", *NAMES[::8])
HEADERS = ("opencl-c.h", "opencl-c-base.h")


def printed(name: str) -> str:
    return CPrinter(CPrelude(), Algebra(), 16, {}).fresh(name)


def declared() -> set[str]:
    """The names that the OpenCL compiler's header declares; empty where it is not installed."""
    package = find_spec("pocl_binary_distribution")
    folders = [Path(x) for x in (package.submodule_search_locations or ())] if package else []
    texts = [p.read_text(errors="replace") for f in folders for p in f.rglob("opencl-c*.h")]
    return {w for text in texts for w in re.findall(r"\b[A-Za-z_]\w+", text)}


def copy_function(name: str) -> PrimFunc:
    """A copy whose function, loop and arrays have names that are reserved in the languages."""
    n, i = Var(f"{name}"), Var(name)
    x, y = Buffer(name, (n,), f32), Buffer(f"{name}_out", (n,), f32)
    return PrimFunc(name, (x, y), 1, For(i, n, BufferStore(y, (i,), load(x, (i,)))))


def test_no_name_of_the_languages_is_printed() -> None:
    assert not {printed(x) for x in (*NAMES, *declared())} & (set(NAMES) | declared())


@given(st.lists(st.text(st.sampled_from("aZ_09 é.ß"), max_size=6) | st.sampled_from(NAMES), max_size=8))
def test_printed_names_are_unique(hints: list[str]) -> None:
    printer = CPrinter(CPrelude(), Algebra(), 16, {})
    names = [printer.fresh(x) for x in hints]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", x) for x in names)
    assert not any(x.startswith("rt_") or x in NAMES for x in names)


@pytest.mark.parametrize(
    "language",
    [pytest.param("c", marks=pytest.mark.ccompiler), pytest.param("opencl", marks=pytest.mark.opencl)],
)
def test_functions_named_like_keywords_compile(language: str) -> None:
    device = opened(language)
    kernels = [generate(copy_function(name), TARGETS[language]) for name in SOME]
    device.compile([KernelSource(k.name, language, k.source) for k in kernels])
    data = np.arange(7, dtype=np.float32)
    (actual,) = Compiled(device, language, copy_function("dot"))([data, np.empty_like(data)])
    np.testing.assert_array_equal(actual, data)


@pytest.mark.nvrtc
def test_functions_named_like_keywords_compile_for_cuda() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    kernels = [generate(copy_function(name), TARGETS["cuda"]) for name in SOME]
    compiled = CUDACompiler("sm_80").compile([KernelSource(k.name, "cuda", k.source) for k in kernels])
    assert len(compiled.kernels) == len(SOME)


@pytest.mark.process
def test_register_names_do_not_clash_with_variables() -> None:
    """The second register of a buffer of two vectors is `x_1`; the loop around it may have the same name."""
    text = """
@prim_func(outputs=1)
def f(a: Buffer((n, 32), f32), b: Buffer((n, 32), f32)):
    x = alloc((2, 16), f32, scope="local")
    for x_1 in serial(n):
        for i in unrolled(2):
            for v in vectorized(16):
                x[i, v] = a[x_1, i * 16 + v]
        for i in unrolled(2):
            for v in vectorized(16):
                b[x_1, i * 16 + v] = x[1 - i, v]
"""
    data = np.arange(96, dtype=np.float32).reshape(3, 32)
    (actual,) = Compiled(opened("c"), "c", parse_prim_func(text.strip() + "\n"))([data, np.empty_like(data)])
    np.testing.assert_array_equal(actual, data.reshape(3, 2, 16)[:, ::-1].reshape(3, 32))
