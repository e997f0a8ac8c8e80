"""Refusals of tensorize; that intrinsics do what their meaning says, on every target; and nests that match no longer."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import i8, i32, u8
from relax_tune.ir.core.expr import Var, cast, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import For, loops, rewrite
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.hardware.intrinsics import INTRINSICS
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.schedules.schedule import Schedule

Steps = list[tuple[str, dict[str, Any]]]


def bytes_product() -> PrimFunc:
    """C = A B^T of bytes, as B lies in memory (n, k): (m, n) i32."""
    m, n, k = Var("m"), Var("n"), Var("k")
    b = TensorBuilder("bytes_product")
    x, w, y = b.input("A", (m, k), u8), b.input("B", (n, k), i8), b.output("C", (m, n), i32)
    b.reduce(y, (k,), const(0, i32), lambda acc, i, j, r: acc + cast(w[j, r], i32) * cast(x[i, r], i32), name="dot")
    return b.finish()


def dots(columns: int = 16, steps: int = 4, intrinsic: str = "dot4_u8i8_x16") -> Schedule:
    """Some columns and steps at a time, of copies padded to whole tiles; B's in the layout of the instruction."""
    s = Schedule(bytes_product())
    s.apply("pad", block="dot", factors=[None, columns, steps])
    if "i16" in intrinsic:
        s.apply("store_as", buffer="A_pad", dtype="i16")
    where = f"j, r -> j // {columns}, r // {steps}, j % {columns}, r % {steps}"
    s.apply("transform_layout", buffer="B_pad", index_map=where)
    j_0, j_1 = s.split("dot_j", [None, columns])
    k_0, k_1 = s.split("dot_k", [None, steps])
    s.reorder([j_0, k_0, j_1, k_1])
    s.apply("decompose_reduction", block="dot", loop=k_0)
    s.apply("tensorize", loop=j_1, intrinsic=intrinsic)
    return s


def pairs() -> Schedule:
    return dots(8, 2, "dot2_i16i8_x8")


def tiles(local: bool) -> Schedule:
    """Tiles of four rows and sixteen columns, in memory or in a local accumulator."""
    s = Schedule(make.matmul(epilogue=False))
    s.apply("pad", block="mm", factors=[4, 16, None])
    i_0, i_1 = s.split("mm_i", [None, 4])
    j_0, j_1 = s.split("mm_j", [None, 16])
    s.reorder([i_0, j_0, "mm_k", i_1, j_1])
    if local:
        s.apply("set_scope", buffer="D_pad", scope="local")
        s.apply("reverse_compute_at", block="D_pad_take", loop=j_0)
    s.apply("decompose_reduction", block="mm", loop="mm_k")
    s.apply("tensorize", loop=i_1, intrinsic="outer_f32_4x16")
    return s


def product() -> PrimFunc:
    return make.matmul(16, 4, epilogue=False)


def doubled() -> PrimFunc:
    b = TensorBuilder("doubled")
    x, y = b.input("A", (4, 16)), b.output("C", (4, 16))
    b.compute(y, lambda i, j: x[i, j] * 2.0, name="double")
    return b.finish()


def put(loop: str, intrinsic: str = "outer_f32_4x16") -> tuple[str, dict[str, object]]:
    return step("tensorize", loop=loop, intrinsic=intrinsic)


DECOMPOSED = step("decompose_reduction", block="mm", loop="mm_k")
INSIDE = step("reorder", names=["mm_i_0", "mm_k", "mm_i_1", "mm_j"])
SPLIT = step("split", loop="mm_i", factors=[None, 4])
MERGED = step("fuse_sibling_loops", first="double_i", second="inc_i")
PADDED = step("pad", block="mm", factors=[4, None, None])

REFUSALS = [
    refuse("an unknown intrinsic", product, put("mm_i", "magic"), message="one of amx_.*, outer_f32_4x16, .*; got 'magic'"),
    refuse("other extents", product, SPLIT, INSIDE, put("mm_k"), message="4, 16 .*got 'mm_k' of extent 4"),
    refuse("several blocks", make.chain, MERGED, put("double_i"), message="several statements"),
    refuse("a marked loop", product, step("set_kind", loop="mm_j", kind="vectorized"), put("mm_j"), message="'mm_j' marked"),
    refuse("an initial value", product, PADDED, SPLIT, INSIDE, put("mm_i_1"), message="decompose_reduction first"),
    refuse("another value", doubled, put("double_i"), message="'double' does not compute what outer_f32_4x16 means"),
    refuse(
        "operands that lie otherwise",
        lambda: make.matmul(16, 4, epilogue=False),
        PADDED,
        step("permute_layout", buffer="D_pad", order=[1, 0]),
        SPLIT,
        INSIDE,
        DECOMPOSED,
        put("mm_i_1"),
        message="does not compute what outer_f32_4x16 means:\n@prim_func",
    ),
    refuse(
        "a loop of the nest",
        product,
        PADDED,
        SPLIT,
        INSIDE,
        DECOMPOSED,
        put("mm_i_1"),
        step("split", loop="mm_j", factors=[None, 4]),
        message="got 'mm_j' inside outer_f32_4x16",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_tensorize_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


@pytest.mark.parametrize(
    "make_schedule", [dots, pairs, lambda: tiles(False), lambda: tiles(True)], ids=["dots", "pairs", "tiles", "local"]
)
def test_tensorize_keeps_meaning(make_schedule: Any) -> None:
    s = make_schedule()
    start = bytes_product() if s.func.name == "bytes_product" else make.matmul(epilogue=False)
    assert structural_equal(parse_prim_func(print_text(s.func)), s.func)
    plain = replace(s.func, body=rewrite(s.func.body, lambda n: n.marked(intrinsic="") if isinstance(n, For) else n))
    assert not structural_equal(plain, s.func)
    for m, n, k in ((1, 1, 1), (5, 17, 4), (4, 16, 5), (3, 2, 0), (0, 3, 2)):
        assert_same_meaning(start, s.func, {"m": m, "n": n, "k": k})


@pytest.mark.process
@pytest.mark.parametrize("language", ["c", "opencl"])
def test_tensorized_kernels_compute_the_same(language: str) -> None:
    device = opened(language)
    schedules = [dots(), pairs(), tiles(False), tiles(True)]
    runs = Compiled.together(device, language, [s.func for s in schedules])
    for s, run in zip(schedules, runs, strict=True):
        name = next(x.marks.intrinsic for x in loops(s.func.body) if x.marks.intrinsic)
        # its definitions and its one call
        text = next(k.source for k in run.kernels if f"rt_{name}" in k.source)
        assert text.split("/*end prelude*/")[1].count(f"rt_{name}") == 1
        for m, n, k in ((1, 1, 1), (5, 17, 4), (4, 16, 5), (9, 33, 13), (3, 2, 0)):
            rng = np.random.default_rng(k)
            if s.func.name == "bytes_product":
                a = rng.integers(0, 256, (m, k)).astype(np.uint8)
                b = rng.integers(-128, 128, (n, k)).astype(np.int8)
                (c,) = run([a, b, np.empty((m, n), np.int32)])
                np.testing.assert_array_equal(c, a.astype(np.int32) @ b.astype(np.int32).T)
            else:
                x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
                (d,) = run([x, w, np.empty((m, n), np.float32)])
                np.testing.assert_allclose(d, x @ w, rtol=1e-5, atol=1e-5)
    device.close()


@pytest.mark.process
def test_tensorize_of_changed_nest_falls_back_to_loops() -> None:
    s = tiles(False)
    # the copy of A is computed where it is read: the product is of something else now
    s.apply("compute_inline", block="A_pad_fill")
    device = opened("c")
    run = Compiled(device, "c", s.func)
    assert not any("rt_outer" in k.source for k in run.kernels)
    x, w = np.ones((5, 3), np.float32), np.ones((3, 7), np.float32)
    (d,) = run([x, w, np.empty((5, 7), np.float32)])
    np.testing.assert_array_equal(d, x @ w)
    device.close()


@pytest.mark.parametrize("name", sorted(INTRINSICS))
def test_intrinsic_semantics_are_valid(name: str) -> None:
    intrinsic = INTRINSICS[name]
    assert intrinsic.name == name
    verify(intrinsic.semantics)
    assert all(b.name.isidentifier() and b.name.isupper() for b in intrinsic.semantics.buffers)


FLAGS = (
    ("dot2_i16i8_x4", "-msse2"),
    ("dot2_i16i8_x4", "-msimd128"),
    ("dot2_i16i8_x8", "-mavx2"),
    ("dot2_i16i8_x16", "-mavx512bw"),
    ("dot8_i8i4_x4", "-mssse3"),
    ("dot8_i8i4_x8", "-mavx2"),
    ("dot8_i8i4_x16", "-mavx512bw"),
    ("dot2_bf16_x16", "-mavx512bf16"),
    ("dot4_u8i8_x8", "-mavxvnni"),
    ("dot4_u8i8_x16", "-mavx512vnni"),
)
MADE = {
    "-msimd128": "i32x4.dot_i16x8_s",
    "-mavx512vnni": "vpdpbusd",
    "-mavxvnni": "vpdpbusd",
    "-mavx512bf16": "vdpbf16ps",
}
BYTES = ("-mavx2", "-mavx512bw")
COMPILED = [
    (name, flag, compiler)
    for name, flag in FLAGS
    for compiler in ("gcc", "clang")
    if shutil.which(compiler) and platform.machine() == "x86_64"
    if compiler == ("clang" if flag == "-msimd128" else "gcc") or flag in ("-msse2", "-mavx512bf16", *BYTES)
]


@pytest.mark.ccompiler
@pytest.mark.parametrize(("name", "flag", "compiler"), COMPILED)
def test_instructions_of_other_processors_compile(name: str, flag: str, compiler: str, tmp_path: Path) -> None:
    """Without a warning, to the instruction they are named for; this processor may lack it."""
    condition, body = INTRINSICS[name].fast["c"]
    kind = {"i16": "short", "bf1": "unsigned short", "i8i": "signed char"}.get(name.split("_")[1][:3], "unsigned char")
    columns = {"i16i8": "signed char", "bf16": "unsigned short", "u8i8": "signed char"}.get(
        name.split("_")[1], "unsigned char"
    )
    total = "float" if "bf16" in name else "int"
    text = f"#if !({condition})\n#error {flag}\n#endif\n"
    text += f"void f(const {kind} *a, const {columns} *b, {total} *c, long b_i) {{\n{body}\n}}\n"
    (tmp_path / "f.c").write_text(text)
    target = ["--target=wasm32"] if flag == "-msimd128" else []
    strict = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    command = [compiler, *target, "-O3", "-std=gnu11", *strict, flag, "-S", "f.c", "-o", "f.s"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assembly = (tmp_path / "f.s").read_text()
    widened = "pmaddubsw" if "i4" in name else "vpmovsxbw"
    assert MADE.get(flag, "pmaddwd") in assembly and (widened in assembly or flag not in BYTES)


@pytest.mark.ccompiler
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("gcc"), reason="expects gcc on x86-64")
@pytest.mark.parametrize(
    ("name", "flags", "product"),
    [
        ("amx_bf16_16x16", ["-mamx-tile", "-mamx-bf16"], "tdpbf16ps"),
        ("amx_u8i8_16x16", ["-mamx-tile", "-mamx-int8"], "tdpbusd"),
    ],
)
def test_tile_products_assemble(name: str, flags: list[str], product: str, tmp_path: Path) -> None:
    condition, body = INTRINSICS[name].fast["c"]
    left, right, total = ("short", "short", "float") if "bf16" in name else ("char", "signed char", "int")
    strides = "long a_i, long b_t, long b_r, long b_j, long c_i"
    text = f"#if !({condition})\n#error {flags}\n#endif\nenum {{ m = 5, n = 3 }};\n"
    text += f"void f(const unsigned {left} *a, const {right} *b, {total} *c, {strides}) {{\n  (void)b_j;\n{body}\n}}\n"
    (tmp_path / "f.c").write_text(text)
    strict = ["-Wall", "-Wextra", "-Werror"]
    command = ["gcc", "-O3", "-std=gnu11", *strict, *flags, "-c", "f.c", "-o", "f.o", "-save-temps"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assembly = (tmp_path / "f.s").read_text()
    assert assembly.index("ldtilecfg") < assembly.index(product) < assembly.index("tilerelease")
