"""Time generated kernels of schedules that are written by hand, next to OpenBLAS.

`python -m experiments.code.codegen_bar [c|opencl]` prints GFLOP/s of the packed matmul and of OpenBLAS, and times of softmax and layer
norm, interleaved in one process. Set OMP_NUM_THREADS for a comparison on one core.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relax_tune.ir.codegen.generate import CodeTarget, generate
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, Var, as_int, call, cast, ceildiv, const, div, load, lt, maximum, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, LoopKind, Stmt, Tail, seq
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program.program import KernelSource


def gelu(x: Expr) -> Expr:
    return x * 0.5 * (call("erf", x * 0.7071067811865476) + 1.0)


def packed_matmul(
    m: Expr, n: int, k: int, rows: int, cols: int, *, fused: bool, language: str, tail: Tail = "pow2"
) -> PrimFunc:
    """C(m, n) = A(m, k) @ B with B packed as (n / cols, k, cols); bias and GELU on top when fused."""
    a, b = Buffer("A", (m, const(k)), f32), Buffer("B", (const(n // cols), const(k), const(cols)), f32)
    bias, c = Buffer("bias", (const(n),), f32), Buffer("C", (m, const(n)), f32)
    acc = Buffer("acc", (m, const(n)), f32, "local")
    p, mo = Var("p"), Var("mo")
    vi, vj, vk = Var("vi"), Var("vj"), Var("vk")

    def nest(name: str, buffer: Buffer, value: Expr, reduce: bool) -> Stmt:
        i, j, kk = Var(f"{name}_i"), Var(f"{name}_j"), Var(f"{name}_k")
        row, col = mo * rows + i, p * cols + j
        iters, bindings = (IterVar(vi, m), IterVar(vj, const(n))), (row, col)
        if reduce:
            iters, bindings = (*iters, IterVar(vk, const(k), "reduce")), (*bindings, kk)
        block = Block(name, iters, bindings, BufferStore(buffer, (vi, vj), value), None, lt(row, m))
        tile = For(i, const(rows), For(j, const(cols), block, "vectorized"), "unrolled")
        return For(kk, const(k), tile) if reduce else tile

    total = load(acc, (vi, vj))
    update = total + load(a, (vi, vk)) * load(b, (vj // cols, vk, vj % cols))
    inner = seq(
        nest("init", acc, const(0.0), False),
        nest("mm", acc, update, True),
        nest("out", c, gelu(total + load(bias, (vj,))) if fused else total, False),
    )
    outer, axes = ("parallel", 0) if language == "c" else ("group", 0), ("serial" if language == "c" else "group")
    kind: LoopKind = "parallel" if outer[0] == "parallel" else "group"
    rows_kind: LoopKind = "serial" if axes == "serial" else "group"
    body = For(mo, ceildiv(m, const(rows)), inner, rows_kind, 1, tail)
    params = (a, b, bias, c) if fused else (a, b, c)
    return PrimFunc("matmul", params, 1, For(p, const(n // cols), body, kind), (acc,))


class _Rows:
    """Builds row reductions: rows in parallel, `tile` columns at a time, one accumulator per column of the tile."""

    def __init__(self, language: str, tile: int, columns: Expr, tail: Tail) -> None:
        self.n, self.m, self.tile, self.tail = Var("n"), columns, tile, tail
        self.kind: LoopKind = "parallel" if language == "c" else "group"
        self.r = Var("r")
        self.allocs: list[Buffer] = []

    def local(self, name: str, size: int) -> Buffer:
        self.allocs.append(Buffer(name, (const(size),), f32, "local"))
        return self.allocs[-1]

    def columns(
        self, name: str, buffer: Buffer, where: Callable[[Expr, Expr], Any], value: Callable[..., Expr]
    ) -> Stmt:
        """Every column: buffer[where(column, lane)] = value(row, column, lane)."""
        o, lane, vj, vl = Var(f"{name}_o"), Var(f"{name}_l"), Var("vj"), Var("vl")
        at = o * self.tile + lane
        vr = Var("vr")
        iters = (IterVar(vr, self.n), IterVar(vj, self.m), IterVar(vl, const(self.tile)))
        block = Block(
            name,
            iters,
            (self.r, at, lane),
            BufferStore(buffer, where(vr, vj, vl), value(vr, vj, vl)),
            None,
            lt(at, self.m),
        )
        inner = For(lane, const(self.tile), block, "vectorized")
        return For(o, ceildiv(self.m, const(self.tile)), inner, tail=self.tail)

    def fill(self, buffer: Buffer, value: float) -> Stmt:
        lane, vl = Var("f"), Var("vl")
        size = as_int(buffer.shape[0]) or 1
        block = Block("fill", (IterVar(vl, const(size)),), (lane,), BufferStore(buffer, (vl,), const(value)))
        return For(lane, const(size), block, "vectorized" if size > 1 else "serial")

    def gather(self, buffer: Buffer, lanes: Buffer, combine: Callable[[Expr, Expr], Expr]) -> Stmt:
        """buffer[0] = the lanes combined."""
        lane, vl = Var("g"), Var("vl")
        value = combine(load(buffer, (0,)), load(lanes, (vl,)))
        block = Block(
            "gather", (IterVar(vl, const(self.tile), "reduce"),), (lane,), BufferStore(buffer, (const(0),), value)
        )
        return For(lane, const(self.tile), block, "unrolled")

    def finish(self, name: str, params: Sequence[Buffer], *body: Stmt) -> PrimFunc:
        return PrimFunc(name, tuple(params), 1, For(self.r, self.n, seq(*body), self.kind), tuple(self.allocs))


def softmax(language: str, tile: int, columns: Expr, tail: Tail = "peel") -> PrimFunc:
    """y = softmax(x) over the last dim of x: (n, columns), in three passes."""
    b = _Rows(language, tile, columns, tail)
    x, y = Buffer("x", (b.n, columns), f32), Buffer("y", (b.n, columns), f32)
    tops, top, sums, total = b.local("tops", tile), b.local("top", 1), b.local("sums", tile), b.local("total", 1)
    lane = lambda _r, _j, i: (i,)
    place = lambda r, j, _i: (r, j)
    return b.finish(
        "softmax",
        (x, y),
        b.fill(tops, -math.inf),
        b.columns("largest", tops, lane, lambda r, j, i: maximum(load(tops, (i,)), load(x, (r, j)))),
        b.fill(top, -math.inf),
        b.gather(top, tops, maximum),
        b.fill(sums, 0.0),
        b.columns("exp", y, place, lambda r, j, i: call("exp", load(x, (r, j)) - load(top, (0,)))),
        b.columns("sum", sums, lane, lambda r, j, i: load(sums, (i,)) + load(y, (r, j))),
        b.fill(total, 0.0),
        b.gather(total, sums, lambda s, v: s + v),
        b.columns("scale", y, place, lambda r, j, i: load(y, (r, j)) * div(const(1.0), load(total, (0,)))),
    )


def layer_norm(language: str, tile: int, columns: Expr, tail: Tail = "peel") -> PrimFunc:
    """y = (x - mean) / sqrt(variance + 1e-5) * scale + shift over the last dim, in three passes."""
    b = _Rows(language, tile, columns, tail)
    x, y = Buffer("x", (b.n, columns), f32), Buffer("y", (b.n, columns), f32)
    scale, shift = Buffer("scale", (columns,), f32), Buffer("shift", (columns,), f32)
    sums, mean, squares, variance = (
        b.local("sums", tile),
        b.local("mean", 1),
        b.local("squares", tile),
        b.local("var", 1),
    )
    size = cast(columns, f32)
    lane = lambda _r, _j, i: (i,)

    def centred(r: Expr, j: Expr) -> Expr:
        return load(x, (r, j)) - div(load(mean, (0,)), size)

    def normal(r: Expr, j: Expr, _i: Expr) -> Expr:
        factor = call("rsqrt", div(load(variance, (0,)), size) + 1e-5)
        return centred(r, j) * factor * load(scale, (j,)) + load(shift, (j,))

    return b.finish(
        "layer_norm",
        (x, scale, shift, y),
        b.fill(sums, 0.0),
        b.columns("sum", sums, lane, lambda r, j, i: load(sums, (i,)) + load(x, (r, j))),
        b.fill(mean, 0.0),
        b.gather(mean, sums, lambda s, v: s + v),
        b.fill(squares, 0.0),
        b.columns("square", squares, lane, lambda r, j, i: load(squares, (i,)) + centred(r, j) * centred(r, j)),
        b.fill(variance, 0.0),
        b.gather(variance, squares, lambda s, v: s + v),
        b.columns("normal", y, lambda r, j, _i: (r, j), normal),
    )


def launch_of(device: Device, language: str, func: PrimFunc, arrays: Sequence[Any], sizes: dict[str, int]) -> Any:
    """(closure that runs the kernel once and waits, function that reads the output)."""
    kernel = generate(func, CodeTarget("c", 16) if language == "c" else CodeTarget("opencl", 8))
    handle = device.compile([KernelSource(kernel.name, language, kernel.source)])[kernel.name]
    memory = []
    for a in arrays:
        memory.append(device.alloc(a.nbytes))
        device.upload(memory[-1], a)
    by_name = {v: const(sizes[v.name]) for v in (*func.symbols, *(s for s in kernel.scalars if isinstance(s, Var)))}
    values = [as_int(substitute(s, by_name)) or 0 for s in kernel.scalars]
    grid = [as_int(substitute(e, by_name)) or 0 for e in kernel.grid]
    run = device.bind(handle, memory, values, grid, kernel.local)

    def once() -> None:
        run()
        device.synchronize()

    return once, lambda: device.download(memory[-1], arrays[-1].dtype, arrays[-1].shape)


def interleaved(functions: Sequence[Callable[[], None]], repeats: int) -> list[tuple[float, float]]:
    """(minimum, median) seconds of each, called in turns."""
    samples: list[list[float]] = [[] for _ in functions]
    for f in functions:
        f()
    for _ in range(repeats):
        for f, s in zip(functions, samples, strict=True):
            start = time.perf_counter()
            f()
            s.append(time.perf_counter() - start)
    return [(min(s), float(np.median(s))) for s in samples]


def openblas() -> Callable[..., None]:
    """C = A @ B through the OpenBLAS wheel."""
    import scipy_openblas32

    library = ctypes.CDLL(f"{scipy_openblas32.get_lib_dir()}/lib{scipy_openblas32.get_library()}.so")
    sgemm, one, zero = library.scipy_cblas_sgemm, ctypes.c_float(1), ctypes.c_float(0)

    def run(a: Any, b: Any, c: Any) -> None:
        (m, k), n = a.shape, b.shape[1]
        at, bt, ct = (ctypes.c_void_p(x.ctypes.data) for x in (a, b, c))
        sgemm(101, 111, 111, m, n, k, one, at, k, bt, n, zero, ct, n)

    return run


def main() -> None:
    language = sys.argv[1] if len(sys.argv) > 1 else "c"
    device = open_device(language)
    rng = np.random.default_rng(0)
    cols = 48 if language == "c" else 24
    blas = openblas()
    shapes = [(528, 528, 528), (1056, 1008, 1024), *((m, 3072, 768) for m in (1, 4, 17, 64, 128, 512))]
    for m, n, k in shapes:
        for fused in (False, True) if m == 128 else (False,):
            a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32) / np.float32(27)
            bias, c = rng.standard_normal(n, np.float32), np.empty((m, n), np.float32)
            packed = np.ascontiguousarray(b.reshape(k, n // cols, cols).transpose(1, 0, 2))
            func = packed_matmul(Var("M"), n, k, 8, cols, fused=fused, language=language)
            arrays = [a, packed, bias, c] if fused else [a, packed, c]
            once, read = launch_of(device, language, func, arrays, {"M": m})
            ours, theirs = interleaved(
                [once, lambda a=a, b=b, c=c: blas(a, b, c)], max(8, min(300, int(1e10 / (2 * m * n * k))))
            )
            if not fused:
                assert np.abs(read() - a @ b).max() < 1e-3
            flops = 2e-9 * m * n * k
            print(
                f"matmul {m}x{n}x{k}{' fused' if fused else ''}: {flops / ours[0]:.0f}/{flops / ours[1]:.0f} GFLOP/s, "
                f"OpenBLAS {flops / theirs[0]:.0f}/{flops / theirs[1]:.0f}, ratio {theirs[0] / ours[0]:.2f}/{theirs[1] / ours[1]:.2f}",
                flush=True,
            )
    for n, m, tile in ((1024, 1024, 64), (2048, 512, 64), (256, 4096, 64), (4096, 100, 16), (4096, 17, 16)):
        x = rng.standard_normal((n, m), np.float32)
        y = np.empty_like(x)
        for make, arrays in (
            (softmax, [x, y]),
            (layer_norm, [x, np.ones(m, np.float32), np.zeros(m, np.float32), y]),
        ):
            once, _read = launch_of(device, language, make(language, tile, Var("m")), arrays, {"n": n, "m": m})
            copy = interleaved([once, lambda x=x, y=y: np.copyto(y, x)], 50)
            print(
                f"{make.__name__} {n}x{m}: {copy[0][0] * 1e6:.0f}/{copy[0][1] * 1e6:.0f} us, NumPy copy {copy[1][0] * 1e6:.0f}",
                flush=True,
            )
    device.close()


if __name__ == "__main__":
    main()
