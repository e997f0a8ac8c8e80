"""32-bit indices in GPU kernels: used where every value fits; where that depends on shapes, decided at the launch.

The emulation of CUDA checks, in every test that runs there, that no computed index exceeds its declared bound.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cuda_emulation.driver import emulated
from tests.ir.codegen.codegen_runner import TARGETS, Compiled, kernels_of, opened
from tests.support import schedule_functions as make
from tests.support.candidates import CASES, MACHINES, arguments, problems

from relax_tune.errors import MeasureError
from relax_tune.ir.codegen.generate import GeneratedKernel, generate
from relax_tune.ir.core.expr import Var, as_int, const, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.runtime.device import cuda, opencl
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.source import INT_MOST
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.sketch import generate_sketches, instantiate

CASE = "matmul symbolic"


def tiled_product() -> PrimFunc:
    """A product in tiles, every dim of it a symbol."""
    sketch = next(s for s in generate_sketches(CASES[CASE][0](), MACHINES["gpu"]) if s.name == "matmul.data_parallel")
    return instantiate(sketch, {"TX": 8, "TY": 4, "MR": 2, "NV": 1, "KT": 8})


def copy(columns: str, index: str = "k") -> GeneratedKernel:
    text = f"""
@prim_func(outputs=1)
def f(x: Buffer((n, {columns}), f32), at: Buffer(({columns},), i64), y: Buffer((n, {columns}), f32)):
    for i in group(n):
        for j in item(8):
            for k in serial({columns}):
                if j == k % 8:
                    y[i, k] = x[i, {index}]
"""
    return generate(parse_prim_func(text.strip() + "\n"), TARGETS["cuda"])


@pytest.mark.slow
@pytest.mark.parametrize("language", ["cuda", "opencl"])
def test_matmul_within_32_bits_has_no_64_bit_index(language: str) -> None:
    (kernel,) = kernels_of(tiled_product(), language)
    head, body = kernel.source.split("/*end prelude*/")[1].split("{", 1)
    assert "rt_most" in head and not re.search(r"\b(i64|long)\b", body)
    # the bound at the launch is the size of the arrays plus what tiles reach beyond them
    *symbols, most = kernel.scalars
    sizes = {v: const(10_000) for v in symbols if isinstance(v, Var)}
    assert 10_000**2 - 1 <= (as_int(substitute(most, sizes)) or 0) <= 1.02 * 10_000**2


def test_known_shapes_decide_index_type() -> None:
    small, large = (generate(make.dense(n, 64, rows=4), TARGETS["cuda"]) for n in (1 << 10, 1 << 26))
    assert "idx" in small.source and "rt_most" not in small.source and small.scalars == ()
    assert "idx" not in large.source and "i64" in large.source


def test_index_read_from_memory_stays_wide() -> None:
    kernel = copy("m", "at[k]")
    assert "m * i + at_[k]" in kernel.source and "rt_most" in kernel.source
    bounded = copy("m", "min(max(at[k], 0), m - 1)").source
    assert "rt_max_i64" in bounded and "rt_min_i64" in bounded


@pytest.mark.process
@pytest.mark.ccompiler
def test_launch_beyond_32_bits_runs_wide_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_wide(emulated(tmp_path), "cuda", cuda, monkeypatch)
    texts = [p.read_text() for p in tmp_path.glob("*.cpp")]
    assert len(texts) == 2 and len({t.split("#include")[1] for t in texts}) == 1


@pytest.mark.opencl
def test_launch_beyond_32_bits_runs_wide_text_on_opencl(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_wide(opened("opencl"), "opencl", opencl, monkeypatch)


def runs_wide(device: Device, language: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    compile_, func = device.compile, tiled_product()

    def watched(kernels: Sequence[KernelSource]) -> dict[str, Any]:
        asked.extend(k.flags for k in kernels)
        return compile_(kernels)

    monkeypatch.setattr(device, "compile", watched)
    run = Compiled(device, language, func)
    for most, dims in enumerate(CASES[CASE][1]):
        monkeypatch.setattr(module, "INT_MOST", 10 if most == 0 else INT_MOST)
        arrays, scalars = arguments(func, dims, 0)
        assert not problems(CASES[CASE][0](), arrays, run(arrays, scalars), dims)
    assert asked == [(), ("-DRT_WIDE",)]


@pytest.mark.process
@pytest.mark.ccompiler
def test_emulation_detects_integers_above_declared_bound(tmp_path: Path) -> None:
    device, func = emulated(tmp_path), tiled_product()
    (kernel,) = kernels_of(func, "cuda")
    handle = device.compile([KernelSource(kernel.name, "cuda", kernel.source)])[kernel.name]
    sizes = {v.name: 64 for v in func.symbols}
    buffers = [device.alloc(64 * 64 * 4) for _ in kernel.buffers]
    values = [sizes[v.name] for v in kernel.scalars if isinstance(v, Var)]
    device.bind(handle, buffers, [*values, 64 * 64 - 2], (64 // 8 * 64 // 32, 1), kernel.local)()
    with pytest.raises(MeasureError, match="an index of 4"):
        device.synchronize()
