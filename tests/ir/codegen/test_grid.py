"""Kernels of a grid: barriers where items depend on each other and all items pass; annotations of CUDA text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import indent

import numpy as np
import pytest
from tests.ir.codegen import codegen_cases as make
from tests.ir.codegen.codegen_runner import TARGETS, Compiled, opened
from tests.ir.codegen.grid_cases import TEXTS, function

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.generate import CodeTarget, generate
from relax_tune.ir.core.expr import call
from relax_tune.ir.interp.interp import run_prim
from relax_tune.ir.text.parser import parse_prim_func

CUDA = TARGETS["cuda"]


def enclosing_lines(text: str) -> Iterator[list[str]]:
    """For every barrier or warp exchange of a kernel, the lines that open the blocks around it."""
    around: list[str] = []
    for line in text.split("/*end prelude*/")[1].splitlines():
        if re.search(r"barrier\(|__syncthreads|rt_across", line):
            yield list(around)
        if line.rstrip().endswith("}"):
            around.pop()
        if line.rstrip().endswith("{"):
            around.append(line)


@pytest.mark.parametrize("language", ["opencl", "cuda"])
@pytest.mark.parametrize("name", TEXTS)
def test_barriers_are_reached_by_every_work_item(name: str, language: str) -> None:
    source = generate(function(name), TARGETS[language]).source
    items = re.findall(r"const \w+ (\w+) = (?:get_local_id|threadIdx)", source)
    barriers = list(enclosing_lines(source))
    exchanges = TEXTS[name][1] if language == "cuda" else 0
    # a warp exchange replaces a barrier
    assert items and len(barriers) == TEXTS[name][0] and source.count("= rt_across") == exchanges
    for lines in barriers:
        assert not [x for x in lines if "if (" in x and set(re.findall(r"\w+", x)) & set(items)], lines


@pytest.mark.opencl
@pytest.mark.parametrize("name", TEXTS)
def test_work_items_compute_the_same_as_loops(name: str) -> None:
    func = function(name)
    device = opened("opencl")
    run = Compiled(device, "opencl", func)
    rng = np.random.default_rng(1)
    for n in (0, 1, 5):
        dims = {"n": n, "m": 3}
        shapes = [[dims.get(str(d), d) for d in b.shape] for b in func.buffers]
        arrays = [rng.standard_normal([int(str(d)) for d in s]).astype(np.float32) for s in shapes]
        expected = [a.copy() for a in arrays]
        run_prim(func, expected)
        for actual, e in zip(run(arrays), expected[1:], strict=True):
            np.testing.assert_allclose(actual, e, rtol=1e-6)
    device.close()


def test_barrier_in_divergent_loop_is_refused() -> None:
    text = """
@prim_func(outputs=1)
def f(x: Buffer((n, 16), f32), y: Buffer((n, 16), f32)):
    tile = alloc((16,), f32, scope="shared")
    for g in group(n):
        for a in item(16):
            for k in serial(a):
                tile[a] = tile[15 - a] + x[g, k]
            y[g, a] = tile[a]
"""
    for language in ("opencl", "cuda"):
        with pytest.raises(BuildError, match=r"barrier is in the loop over k"):
            generate(parse_prim_func(text.strip() + "\n"), TARGETS[language])
    reading = text.replace("for k in serial(a):", "if x[g, a] < 0.0:\n              for k in serial(16):")
    with pytest.raises(BuildError, match="compute it before the condition"):
        generate(parse_prim_func(reading.strip() + "\n"), CUDA)


@pytest.mark.parametrize(
    "body",
    [
        "for g in group(n):\n  t[g] = x[g]\nfor h in serial(n):\n  y[h] = t[n - 1 - h]",
        "for g in group(n):\n  t[g] = x[g]\nfor h in group(n):\n  y[h] = t[n - 1 - h]",
        "for g in group(n):\n  y[g] = y[n - 1 - g] + x[g]",
        "for g in group(2, axis=1):\n  t[g] = x[g]\nfor h in serial(2):\n  y[h] = y[h] + x[h]",
    ],
    ids=["one for all", "another", "round after round", "all do the same"],
)
def test_dependent_groups_are_refused(body: str) -> None:
    text = """
@prim_func(outputs=1)
def f(x: Buffer((n,), f32), y: Buffer((n,), f32)):
    t = alloc((n,), f32, scope="global")
    for k in serial(3):
"""
    func = parse_prim_func((text + indent(body, " " * 8)).strip() + "\n")
    for language in ("opencl", "cuda"):
        with pytest.raises(BuildError, match=r"groups .*[ty] is written"):
            generate(func, TARGETS[language])


def test_vector_access_at_aligned_address_is_one_instruction() -> None:
    def pieces(columns: str, offset: int) -> set[str]:
        text = f"""
@prim_func(outputs=1)
def f(x: Buffer((n, {columns}), f32), y: Buffer((n, {columns}), f32)):
    for i in group(n):
        for v in vectorized(8):
            y[i, v + {offset}] = x[i, v + {offset}] + 1.0
"""
        source = generate(parse_prim_func(text.strip() + "\n"), CUDA).source.split("/*end prelude*/")[1]
        return set(re.findall(r"rt_(?:load<f32x4, |store<)(\d)>", source))

    assert pieces("64", 0) == pieces("64", 12) == {"4"}
    assert pieces("66", 0) == pieces("64", 6) == {"2"}
    assert pieces("63", 0) == pieces("64", 3) == pieces("m", 0) == {"1"}


@pytest.mark.parametrize(("stored", "each"), [("f32", 4), ("bf16", 8), ("i8", 16)])
def test_vector_access_width_follows_element_size(stored: str, each: int) -> None:
    text = f"""
@prim_func(outputs=1)
def f(x: Buffer((n, 64), {stored}), y: Buffer((n, 64), f32)):
    for i in group(n):
        for v in vectorized(32):
            y[i, v] = cast(x[i, v], f32) * 2.0
"""
    source = generate(parse_prim_func(text.strip() + "\n"), CUDA).source.split("/*end prelude*/")[1]
    assert re.findall(r"rt_load<[^,]*, (\d+)>", source) == [str(each)] * (32 // each)
    assert source.count("rt_store<4>") == 32 // each


def test_launch_beyond_axis_limits_uses_one_axis() -> None:
    def kernel(second: str) -> tuple[str, list[str]]:
        text = f"""
@prim_func(outputs=1)
def f(x: Buffer((n, {second}, 7), f32), y: Buffer((n, {second}, 7), f32)):
    for i in group(n, axis=0):
        for j in group({second}, axis=1):
            for k in group(7, axis=2):
                y[i, j, k] = x[i, j, k]
"""
        kernel = generate(parse_prim_func(text.strip() + "\n"), CUDA)
        return kernel.source, [str(e) for e in kernel.grid]

    source, grid = kernel("65535")
    assert grid == ["n", "65535", "7"] and "blockIdx.y" in source and "i64 n" not in source
    for second in ("65536", "m"):
        source, grid = kernel(second)
        assert grid[1:] == ["1", "1"] and "blockIdx.y" not in source
        assert f"blockIdx.x / (unsigned)(n) % (unsigned)({second});" in source


def test_shared_arrays_beyond_static_limit_are_dynamic() -> None:
    def source(rows: int) -> str:
        text = f"""
@prim_func(outputs=1)
def f(x: Buffer((n, {rows}, 16), f32), y: Buffer((n, {rows}, 16), f32)):
    tile = alloc(({rows}, 16), f32, scope="shared")
    for g in group(n):
        for a in item({rows}):
            for k in serial(16):
                tile[a, k] = x[g, a, k]
        for b in item({rows}):
            for l in serial(16):
                y[g, b, l] = tile[{rows - 1} - b, l]
"""
        return generate(parse_prim_func(text.strip() + "\n"), CUDA).source

    assert "__shared__ __align__(16) float tile_[12288];" in source(768) and "/*shared" not in source(768)
    assert "/*shared 65536*/" in source(1024) and "float *const tile_ = (float *)(rt_shared + 0);" in source(1024)
    with pytest.raises(BuildError, match=r"at most 3 bytes .* got 4"):
        generate(function("by one item, for all"), CodeTarget("cuda", 4, 3))


def test_generate_cuda_is_deterministic() -> None:
    texts = {generate(make.matmul("cuda", 4, 16, 8, "pow2"), CUDA).source for _ in range(2)}
    assert len(texts) == 1 and "__launch_bounds__(1)" in texts.pop()
    exponential = make.pointwise("cuda", (1, 4), ("serial", "vectorized"), ("peel", "peel"), lambda x: call("exp", x))
    assert "expf(a)" in generate(exponential, CUDA).source
