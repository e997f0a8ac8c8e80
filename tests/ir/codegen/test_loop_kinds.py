"""Every kind and mark of a loop, on every target: it changes the kernel, or the kernel says why not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import TARGETS, Compiled, opened

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.generate import GeneratedKernel, generate
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.schedules.schedule import Schedule

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "kernels.md"
LANGUAGES = ("c", "opencl", "cuda", "webgpu")
ADD = parse_prim_func("""
@prim_func(outputs=1)
def add(x: Buffer((n, 256), f32), z: Buffer((256,), f32), y: Buffer((n, 256), f32)):
    for i in serial(n):
        for j in serial(256):
            with block("add"):
                vi = spatial(n, i)
                vj = spatial(256, j)
                y[vi, vj] = x[vi, vj] + z[vj]
""")
COPY = parse_prim_func("""
@prim_func(outputs=1)
def copy(x: Buffer((n, 64), f32), y: Buffer((n, 64), f32)):
    tile = alloc((64,), f32, scope="shared")
    for i in group(n):
        for a in item(16):
            for v in vectorized(4, async_copy=True):
                tile[a * 4 + v] = x[i, a * 4 + v]
        for c in item(64):
            y[i, c] = tile[63 - c]
""")
DOT = parse_prim_func("""
@prim_func(outputs=1)
def dot(a: Buffer((4,), u8), b: Buffer((4, 16), i8), c: Buffer((16,), i32)):
    for i in serial(16, intrinsic="mma_bf16_nn"):
        for j in serial(4, intrinsic="mma_bf16_nn"):
            c[i] = c[i] + cast(a[j], i32) * cast(b[j, i], i32)
""")


def _with(*steps: Callable[[Schedule], object]) -> PrimFunc:
    s = Schedule(ADD)
    for step in steps:
        step(s)
    return s.func


def _split(s: Schedule) -> None:
    s.split("j", [None, 16], divides=True)


# What each kind and mark is tried on, and the text or launch that shows its effect.
CASES: dict[str, PrimFunc] = {
    "parallel": _with(lambda s: s.parallel("i")),
    "group": _with(lambda s: s.bind("i", "group")),
    "item": _with(_split, lambda s: s.bind("j_1", "item")),
    "vectorized": _with(_split, lambda s: s.vectorize("j_1")),
    "unrolled": _with(_split, lambda s: s.unroll("j_1")),
    "nontemporal_stores": _with(_split, lambda s: s.vectorize("j_1"), lambda s: s.nontemporal_stores("j_1")),
    "prefetch": _with(_split, lambda s: s.vectorize("j_1"), lambda s: s.prefetch("i", 4)),
    "hold_vectors": _with(lambda s: s.vectorize("j"), lambda s: s.hold_vectors("i")),
    "copy_async": COPY,
}
SIGNS: dict[str, Callable[[GeneratedKernel], object]] = {
    "threads": lambda k: "RT_PARALLEL_FOR" in k.source,
    "groups of the grid": lambda k: str(k.grid[0]) != "1",
    "items of a group": lambda k: k.local[0] == 16,
    "vectors": lambda k: re.search(r"f32x\d+|vec4", k.source),
    "copies": lambda k: "240" not in k.source and len(re.findall(r"= .*x\[", k.source)) >= 16,
    "streaming stores": lambda k: "stream" in k.source,
    "registers": lambda k: re.search(r"RT_KEEP_16\(t\w*\)", k.source),
    "asynchronous copies": lambda k: "rt_copy<4>" in k.source,
    "prefetch instructions": lambda k: "__builtin_prefetch" in k.source,
}


def attempt(func: PrimFunc, language: str) -> tuple[GeneratedKernel | None, str]:
    """The kernel, or None and why it is refused."""
    try:
        kernel = generate(func, TARGETS[language])
    except BuildError as error:
        return None, str(error)
    return (kernel, "") if not kernel.ignored else (None, "; ".join(kernel.ignored))


def table() -> dict[str, list[str]]:
    """The cells of the guide's table, by kind."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.M)
    return {name: [c.strip() for c in cells.split("|")] for name, cells in rows if name in CASES}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_table_of_the_guide_agrees_with_code(name: str, language: str) -> None:
    cell = table()[name][LANGUAGES.index(language)]
    kernel, refusal = attempt(CASES[name], language)
    if cell == "refused":
        assert kernel is None and re.search(r"loop '?(i|j_1|v|a)\b", refusal), refusal
        return
    assert kernel is not None, refusal
    assert SIGNS[cell](kernel), kernel.source
    plain = generate(ADD, TARGETS[language])
    assert not SIGNS[cell](plain)


def test_table_of_the_guide_has_every_kind() -> None:
    assert table().keys() == CASES.keys()


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_parallel_loops_take_free_axes_of_the_grid(language: str) -> None:
    s = Schedule(ADD)
    s.bind("i", "group")
    s.split("j", [None, 16], divides=True)
    s.parallel("j_0")
    kernel = generate(s.func, TARGETS[language])
    assert "16" in [str(e) for e in kernel.grid] or "16" in str(kernel.grid)
    assert not kernel.ignored


@pytest.mark.opencl
def test_parallel_loop_on_opencl_agrees_with_numpy() -> None:
    s = Schedule(ADD)
    s.parallel("i")
    device = opened("opencl")
    try:
        run = Compiled(device, "opencl", s.func)
        rng = np.random.default_rng(0)
        for n in (1, 7):
            x, z = rng.standard_normal((n, 256), np.float32), rng.standard_normal(256, np.float32)
            y = np.zeros_like(x)
            results = run([x, z, y])
            np.testing.assert_array_equal(results[-1], x + z)
    finally:
        device.close()


REFUSED = {
    "groups that depend on each other": ("i", """
def f(x: Buffer((n, 8), f32), y: Buffer((8,), f32)):
    for k in serial(n):
        for i in parallel(8):
            y[i] = y[i] + x[k, i]
"""),
    "an extent that depends on another loop": ("j", """
def f(x: Buffer((8, 8), f32), y: Buffer((8, 8), f32)):
    for i in group(8):
        for j in parallel(i + 1):
            y[i, j] = x[i, j]
"""),
    "no free axis": ("m", """
def f(x: Buffer((4, 4, 4, 4), f32), y: Buffer((4, 4, 4, 4), f32)):
    for i in group(4):
        for j in group(4, axis=1):
            for k in group(4, axis=2):
                for m in parallel(4):
                    y[i, j, k, m] = x[i, j, k, m]
"""),
}  # fmt: skip


@pytest.mark.parametrize("language", LANGUAGES[1:])
@pytest.mark.parametrize("case", REFUSED)
def test_parallel_loop_without_a_grid_is_refused(case: str, language: str) -> None:
    loop, text = REFUSED[case]
    with pytest.raises(BuildError, match=f"parallel loop.*'{loop}'") as error:
        generate(parse_prim_func(f"@prim_func(outputs=1){text}"), TARGETS[language])
    assert re.search(r"`\w+`|make '\w+' the parallel", str(error.value))


def ignored(text: str, language: str) -> str:
    (reason,) = generate(parse_prim_func(f"@prim_func(outputs=1){text}"), TARGETS[language]).ignored
    return reason


def test_ignored_hints_name_loop_and_reason() -> None:
    wide = """
def f(x: Buffer((n, 128), f32), y: Buffer((n, 128), f32)):
    for i in serial(n):
        for j in unrolled(128):
            y[i, j] = x[i, j]
"""
    assert re.search(r"unrolled of loop 'j': 128 .* 64; `split`", ignored(wide, "c"))
    one = """
def f(x: Buffer((n, 16), f32), y: Buffer((n,), f32)):
    for i in serial(n):
        for j in vectorized(16):
            y[i] = y[i] + x[i, j]
"""
    assert re.search(r"vectorized of loop 'j': .* one element of 'y'", ignored(one, "opencl"))
    nested = """
def f(x: Buffer((n, 64), f32), y: Buffer((n, 64), f32)):
    for i in group(n):
        y[i, 0] = 1.0
        for j in group(64, axis=1):
            y[i, j] = x[i, j]
"""
    assert re.search(r"group of loop 'j': a loop around .*`fuse`", ignored(nested, "c"))
    assert "uda has no" not in ignored(nested, "c")


def test_loops_without_iterations_are_not_reported() -> None:
    text = """
def f(x: Buffer((n, 16), f32), y: Buffer((n, 16), f32)):
    for i in serial(n):
        for k in serial(0):
            for j in vectorized(16):
                y[i, j] = x[i, j]
        y[i, 0] = 1.0
"""
    assert generate(parse_prim_func(f"@prim_func(outputs=1){text}"), TARGETS["c"]).ignored == ()


def test_instruction_of_another_target_is_reported() -> None:
    (reason,) = generate(DOT, TARGETS["opencl"]).ignored
    assert re.search(r"tensorize of loop 'i': mma_bf16_nn .* cuda, not of opencl", reason)
    (reason,) = generate(DOT, TARGETS["cuda"]).ignored
    assert re.search(r"tensorize of loop 'i': the nest .* tensorize last", reason)
