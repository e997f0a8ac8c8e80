"""Generated code against NumPy on every target: the zoo as written and under schedules, at sizes 0, 1, primes and tiles +- 1."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support import zoo

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.generate import CodeTarget, generate
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, const, load
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, seq

LANGUAGES = ("c", "opencl")


def agree(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5, err_msg=what)
    else:
        np.testing.assert_array_equal(actual, expected, err_msg=what)


@pytest.mark.process
@pytest.mark.parametrize("language", LANGUAGES)
def test_zoo_as_written(language: str) -> None:
    device = opened(language)
    rng = np.random.default_rng(1)
    for case in zoo.cases():
        run = Compiled(device, language, case.func)
        for dims in case.sizes:
            arguments, results = case.arguments(rng, dims)
            for actual, expected in zip(run(arguments, case.scalar_arguments(dims)), results, strict=True):
                agree(actual, expected, f"{case.name} {dims}")
    device.close()


@pytest.mark.process
@pytest.mark.parametrize("language", LANGUAGES)
def test_tiled_matmul_of_the_zoo(language: str) -> None:
    device = opened(language)
    func = zoo.tiled_matmul()
    run = Compiled(device, language, func)
    rng = np.random.default_rng(2)
    for n, m in ((1, 1), (4, 8), (5, 9), (3, 7), (0, 3), (13, 31)):
        a, b = rng.standard_normal((n, 8), np.float32), rng.standard_normal((8, m), np.float32)
        (c,) = run([a, b, np.empty((n, m), np.float32)])
        agree(c, a @ b, f"{n} {m}")
    device.close()


def test_generate_too_much_shared_memory_is_refused() -> None:
    tile, out = Buffer("tile", (const(64),), f32, "shared"), Buffer("y", (const(64),), f32)
    i, j, vi, vj = Var("i"), Var("j"), Var("vi"), Var("vj")
    fill = Block("fill", (IterVar(vi, const(64)),), (i,), BufferStore(tile, (vi,), const(1.0)))
    copy = Block("copy", (IterVar(vj, const(64)),), (j,), BufferStore(out, (vj,), load(tile, (vj,))))
    body = For(Var("g"), const(1), seq(For(i, const(64), fill), For(j, const(64), copy)), "group")
    func = PrimFunc("shares", (out,), 1, body, (tile,))
    generate(func, CodeTarget("opencl", 8, 256))
    with pytest.raises(BuildError, match=r"at most 255 bytes .* got 256"):
        generate(func, CodeTarget("opencl", 8, 255))


def test_quotient_in_front_of_empty_loop_divides_by_one() -> None:
    m, p, k, vq, vk = Var("m"), Var("p"), Var("k"), Var("vq"), Var("vk")
    out = Buffer("y", (const(8), m), f32)
    store = BufferStore(out, (vq, vk), const(1.0))
    block = Block("fill", (IterVar(vq, const(8)), IterVar(vk, m)), (p // m, k), store)
    body = For(p, const(8), For(k, m, block), "parallel")
    source = generate(PrimFunc("fill", (out,), 1, body), CodeTarget("c", 8)).source
    assert "p_q_ = (p / (rt_max_i64(m, 1)));" in source
