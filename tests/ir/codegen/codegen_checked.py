"""Run by test_codegen_memory.py in a child process: generated kernels, run where an access out of bounds is noticed.

`pages`: C kernels on buffers that end, then begin, at a protected page: an access beyond them kills the process.
`oclgrind`: OpenCL kernels under the simulator, whose log the parent reads.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.ir.codegen import codegen_cases as make
from tests.ir.codegen.codegen_runner import Compiled, kernels_of
from tests.runtime.device.watched import SimulatedDevice

from relax_tune.ir.core.expr import call
from relax_tune.ir.core.function import PrimFunc

PAGE = mmap.PAGESIZE


def functions(language: str) -> list[tuple[PrimFunc, list[tuple[int, int]]]]:
    lanes = 16 if language == "c" else 8
    spread = make.pointwise(
        language, (2, lanes), ("serial", "vectorized"), ("peel", "predicate"), lambda x: call("exp", x)
    )
    overshooting = make.pointwise(
        language, (3, 2 * lanes), ("serial", "vectorized"), ("predicate", "narrow"), lambda x: call("exp", x)
    )
    return [
        (make.matmul(language, 4, 2 * lanes, 5, "pow2"), [(1, 1), (5, lanes + 3), (7, 2 * lanes)]),
        (make.row_softmax(language, lanes, "peel"), [(1, 1), (3, lanes - 1), (2, 2 * lanes + 1)]),
        (spread, [(1, 0), (lanes + 1, 0), (4 * lanes, 0)]),
        (overshooting, [(1, 0), (2 * lanes, 0), (4 * lanes + 3, 0)]),
    ]


def arguments(func: PrimFunc, n: int, m: int) -> list[np.ndarray]:
    rng = np.random.default_rng(6)
    if func.name == "matmul":
        shapes: list[tuple[int, ...]] = [(n, 5), (5, m), (m,), (n, m)]
    elif func.name == "softmax":
        shapes = [(n, m)] * 2
    else:
        shapes = [(n,)] * 2
    return [rng.standard_normal(s, np.float32) for s in shapes]


def reference(func: PrimFunc, args: list[np.ndarray]) -> np.ndarray:
    wide = [a.astype(float) for a in args]
    if func.name == "matmul":
        z = wide[0] @ wide[1] + wide[2]
        return np.asarray(z * 0.5 * (np.vectorize(math.erf)(z * math.sqrt(0.5)) + 1))
    e = np.exp(wide[0])
    return e / e.sum(axis=1, keepdims=True) if func.name == "softmax" else e


class Fenced:
    """An array that ends (or begins) at the border of a protected page."""

    def __init__(self, array: np.ndarray, at_end: bool) -> None:
        room = -(-max(array.nbytes, 1) // PAGE) * PAGE
        self._map = mmap.mmap(-1, room + 2 * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for page in (base, base + PAGE + room):
            if ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                raise OSError("mprotect failed")
        self.address = base + PAGE + (room - array.nbytes if at_end else 0)
        ctypes.memmove(self.address, array.ctypes.data, array.nbytes)
        self.shape = array.shape

    def array(self) -> np.ndarray:
        count = int(np.prod(self.shape))
        raw = (ctypes.c_float * count).from_address(self.address)
        return np.frombuffer(raw, np.float32).reshape(self.shape).copy()


def pages(folder: str, flags: list[str]) -> None:
    for i, (func, sizes) in enumerate(functions("c")):
        (kernel,) = kernels_of(func, "c")
        source, library = Path(folder) / f"k{i}.c", Path(folder) / f"k{i}.so"
        source.write_text(kernel.source)
        base = ["-O2", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
        subprocess.run(["gcc", *base, *flags, str(source), "-o", str(library), "-lm"], check=True)
        entry = getattr(ctypes.CDLL(str(library)), kernel.name)
        for n, m in sizes:
            for at_end in (True, False):
                args = arguments(func, n, m)
                fenced = [Fenced(a, at_end) for a in args]
                by_name = {"m": n, "n": m} if func.name == "matmul" else {"n": n, "m": m}
                scalars = [ctypes.c_int64(by_name[s.name]) for s in kernel.scalars]  # type: ignore[attr-defined]
                entry(*(ctypes.c_void_p(f.address) for f in fenced), *scalars)
                np.testing.assert_allclose(fenced[-1].array(), reference(func, args), rtol=1e-5, atol=1e-5)
    print("pages done")


def oclgrind(names: list[str]) -> None:
    device = SimulatedDevice()
    for func, sizes in functions("opencl"):
        if func.name not in names:
            continue
        run = Compiled(device, "opencl", func)
        for n, m in sizes:
            args = arguments(func, n, m)
            run.guard = 0
            (actual,) = run(args)
            np.testing.assert_allclose(actual, reference(func, args), rtol=1e-5, atol=1e-5)
    device.close()
    print("oclgrind done")


if __name__ == "__main__":
    if sys.argv[1] == "pages":
        pages(sys.argv[2], sys.argv[3:])
    else:
        oclgrind(sys.argv[2:])
