"""Devices, and a small program written by hand for both: y = relu(2x) + bias, z = row sums of y.

x: (n, 3) f32, bias: (3,) f32, scaled copy of bias in `packed`, y: (n, 3) temp, z: (n,) f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.plan import Entry, choice_slot
from relax_tune.runtime.program.program import (
    BufferSpec,
    CallSite,
    CallVariant,
    Check,
    KernelSource,
    LaunchStep,
    Program,
    Symbol,
)
from relax_tune.runtime.program.scalars import Opcode, ScalarBuilder

C_PRELUDE = """/*prelude*/
#include <stdint.h>
static inline float relu(float x) { return x > 0.0f ? x : 0.0f; }
#if !defined(RT_PARALLEL_FOR)
#define RT_PARALLEL_FOR(part, data, count, uneven, pays) part(data, 0, count)
#endif
/*end prelude*/
"""
CL_PRELUDE = """/*prelude*/
float relu(float x) { return x > 0.0f ? x : 0.0f; }
/*end prelude*/
"""
C_KERNELS = {
    "scale_bias": """void scale_bias(const float* restrict b, float* restrict p) {
  for (int i = 0; i < 3; ++i) p[i] = b[i] * 1.0f;
}
""",
    "affine": """struct rt_data_0_affine { const float *x, *p; float *y; };
static void rt_part_0_affine(const void *data, int64_t first, int64_t end) {
  const struct rt_data_0_affine d = *(const struct rt_data_0_affine *)data;
  for (int64_t i = first; i < end; ++i)
    for (int j = 0; j < 3; ++j) d.y[i * 3 + j] = relu(2.0f * d.x[i * 3 + j]) + d.p[j];
}
void affine(const float* restrict x, const float* restrict p, float* restrict y, int64_t n) {
  const struct rt_data_0_affine d = {x, p, y};
  RT_PARALLEL_FOR(rt_part_0_affine, &d, n, 0, 1);
}
""",
    "affine_few": """void affine_few(const float* restrict x, const float* restrict p, float* restrict y, int64_t n) {
  for (int64_t i = 0; i < n * 3; ++i) y[i] = relu(2.0f * x[i]) + p[i % 3];
}
""",
    "sums": """void sums(const float* restrict y, float* restrict z, int64_t n) {
  for (int64_t i = 0; i < n; ++i) z[i] = y[i * 3] + y[i * 3 + 1] + y[i * 3 + 2];
}
""",
}
CL_KERNELS = {
    "scale_bias": """kernel void scale_bias(global const float* restrict b, global float* restrict p) {
  int i = get_global_id(0); if (i < 3) p[i] = b[i];
}
""",
    "affine": """kernel void affine(global const float* restrict x, global const float* restrict p,
    global float* restrict y, long n) {
  long i = get_global_id(0); if (i < n * 3) y[i] = relu(2.0f * x[i]) + p[i % 3];
}
""",
    "affine_few": """kernel void affine_few(global const float* restrict x, global const float* restrict p,
    global float* restrict y, long n) {
  for (long i = 0; i < n * 3; ++i) y[i] = relu(2.0f * x[i]) + p[i % 3];
}
""",
    "sums": """kernel void sums(global const float* restrict y, global float* restrict z, long n) {
  long i = get_global_id(0); if (i < n) z[i] = y[i * 3] + y[i * 3 + 1] + y[i * 3 + 2];
}
""",
}
BIAS = np.array([0.5, -1.0, 2.0], np.float32)


def reference(x: NDArray[Any]) -> NDArray[Any]:
    y = np.maximum(2 * x, 0) + BIAS
    return y.sum(axis=1, dtype=np.float32)


def small_program(kind: str, upper: int | None = 4096) -> Program:
    """The program for device kind `c` or `opencl`; `affine` has a variant for n <= 4 and one for the rest."""
    b = ScalarBuilder()
    n, three, four, group = b.symbol(0), b.const(3), b.const(4), b.const(16)
    one = b.const(1)
    elements = b.op(Opcode.MUL, n, three)
    y_bytes = b.op(Opcode.MUL, elements, four)

    def blocks(count: int) -> int:
        return b.op(Opcode.FLOORDIV, b.op(Opcode.ADD, count, b.const(15)), group)

    choice = choice_slot(b, [Entry(b.op(Opcode.LE, n, four), 0), Entry(None, 1)])
    zero = b.const(0)
    opencl = kind == "opencl"
    prelude, texts = (CL_PRELUDE, CL_KERNELS) if opencl else (C_PRELUDE, C_KERNELS)
    kernels = tuple(KernelSource(name, kind, prelude + text) for name, text in texts.items())

    def step(name: str, buffers: tuple[int, ...], scalars: tuple[int, ...], grid: int, local: int = 16) -> LaunchStep:
        return LaunchStep("kernel", name, buffers, scalars, (grid,) if opencl else (), (local,) if opencl else ())

    not_13 = b.op(Opcode.NE, n, b.const(13))
    blocks_of_elements, blocks_of_rows = blocks(elements), blocks(n)
    few = CallVariant("generic", (step("affine_few", (0, 2, 3), (n,), one, 1),))
    many = CallVariant("tuned", (step("affine", (0, 2, 3), (n,), blocks_of_elements),))
    sums = CallVariant("generic", (step("sums", (3, 4), (n,), blocks_of_rows),))
    return Program(
        symbols=(Symbol("n", 0, upper),),
        scalars=b.code,
        checks=(Check(not_13, "dim 0 of x: expected anything but 13, got {0}", (n,)),),
        buffers=(
            BufferSpec("x", "float32", (n, three), "input"),
            BufferSpec("bias", "float32", (three,), "const"),
            BufferSpec("packed", "float32", (three,), "packed"),
            BufferSpec("y", "float32", (n, three), "temp", storage=0),
            BufferSpec("z", "float32", (n,), "output"),
        ),
        storages=(y_bytes,),
        kernels=kernels,
        prepare=(step("scale_bias", (1, 2), (), one),),
        calls=(CallSite("affine", "task-affine", choice, (few, many)), CallSite("sums", "task-sums", zero, (sums,))),
        inputs=(0,),
        outputs=(4,),
        name="small",
    )


class Small:
    """The program, its constant and its meaning."""

    program = staticmethod(small_program)
    reference = staticmethod(reference)
    constants: ClassVar[dict[str, NDArray[Any]]] = {"bias": BIAS}


@pytest.fixture(scope="session")
def small() -> type[Small]:
    return Small


@pytest.fixture(
    scope="session",
    params=[pytest.param("c", marks=pytest.mark.ccompiler), pytest.param("opencl", marks=pytest.mark.opencl)],
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    try:
        opened = open_device(request.param)
    except UserError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


@pytest.fixture(scope="session", autouse=True)
def _own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAX_TUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def executor(device: Device, small: Any) -> Any:
    made = Executor(small.program(device.info.kind), device, small.constants)
    yield made
    made.close()
