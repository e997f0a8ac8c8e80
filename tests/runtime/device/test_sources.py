"""Several kernels in one translation unit: a name means one thing in all of them."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.generate import CodeTarget, generate
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.c_compiler import LARGE_UNIT
from relax_tune.runtime.device.source import join_sources
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import simplify_func


def product(rows: int, vectors: int) -> PrimFunc:
    """Rows of f32 times bf16 by the intrinsic, in one tile; a dim of one has no loop of its own."""
    func = parse_prim_func(f"""@prim_func(outputs=1)
def product{rows}x{vectors}(a: Buffer(({rows}, 64), f32), b: Buffer((32, {vectors}, 8, 2), bf16), c: Buffer(({rows}, {vectors}, 8), f32)):
    for i0 in serial({rows}):
        for j0 in serial({vectors}):
            for l0 in serial(8):
                with block("start"):
                    vi = spatial({rows}, i0); vj = spatial({vectors}, j0); vl = spatial(8, l0)
                    c[vi, vj, vl] = 0.0
    for k0 in serial(32):
        for i in serial({rows}):
            for j in serial({vectors}):
                for l in serial(8):
                    for k1 in serial(2):
                        with block("total"):
                            vi = spatial({rows}, i); vj = spatial({vectors}, j); vl = spatial(8, l)
                            vo = reduce(32, k0); vk = reduce(2, k1)
                            c[vi, vj, vl] = c[vi, vj, vl] + a[vi, vo * 2 + vk] * cast(b[vo, vj, vl, vk], f32)
""")
    s = Schedule(func)
    s.apply("tensorize", loop="i" if rows > 1 else "j", intrinsic="dot2_f32bf16_x8")
    return simplify_func(s.func)  # as instances of sketches are


@pytest.mark.ccompiler
def test_tiles_of_turned_sizes_share_a_translation_unit() -> None:
    device, rng = opened("c"), np.random.default_rng(0)
    sizes = [(1, 2), (2, 1), (4, 2), (2, 4), (1, 4), (4, 1)]
    made = Compiled.together(device, "c", [product(*x) for x in sizes])
    for run, (rows, vectors) in zip(made, sizes, strict=True):
        a = rng.standard_normal((rows, 64)).astype(np.float32)
        b = rng.standard_normal((32, vectors, 8, 2)).astype(ml_dtypes.bfloat16)
        (found,) = run([a, b, np.empty((rows, vectors, 8), np.float32)])
        wanted = np.einsum("iok,ojlk->ijl", a.reshape(rows, 32, 2), b.astype(np.float32))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=f"{rows} x {vectors}")
    device.close()


def test_names_of_intrinsics_differ_with_sizes() -> None:
    sources = [generate(product(*x), CodeTarget("c", 8)).source for x in ((1, 2), (2, 1))]
    first, second = (set(re.findall(r"rt_dot2_f32bf16_\w+", s)) for s in sources)
    assert first and second and first.isdisjoint(second)


def test_one_name_with_two_meanings_is_refused() -> None:
    def kernel(name: str, value: int) -> KernelSource:
        one = f"#ifndef RT_ONE\n#define RT_ONE\nstatic int rt_one(void) {{ return {value}; }}\n#endif\n"
        other = "#ifndef RT_TWO\n#define RT_TWO\nstatic int rt_two(void) { return 2; }\n#endif\n"
        body = f"void {name}(int *a) {{ *a = rt_one() + rt_two(); }}\n"
        return KernelSource(name, "c", f"/*prelude*/\n{one}{other}/*end prelude*/\n{body}")

    joined = join_sources([kernel("a", 1), kernel("b", 1)])
    assert joined.count("rt_one(void)") == 1 and "void a(" in joined and "void b(" in joined
    with pytest.raises(BuildError, match=r"kernel c: expected one definition of RT_ONE .*got two"):
        join_sources([kernel("a", 1), kernel("b", 1), kernel("c", 3)])


@pytest.mark.ccompiler
def test_long_translation_unit_is_compiled_without_the_slow_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    commands: list[list[str]] = []
    device = opened("c")
    assert isinstance(device, CDevice)
    compile_in = device.compiler.compile_in

    def recorded(work: str, command: list[str]) -> None:
        commands.append(command)
        compile_in(work, command)

    monkeypatch.setattr(device.compiler, "compile_in", recorded)
    short = KernelSource("short_one", "c", "void short_one(float *x) { x[0] = 1.0f; }")
    long = KernelSource("long_one", "c", f"/* {' ' * LARGE_UNIT} */ void long_one(float *x) {{ x[0] = 2.0f; }}")
    device.compile([short])
    device.compile([long])
    device.close()
    assert ["-O1" in c for c in commands] == [False, True]
