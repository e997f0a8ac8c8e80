"""Five programs of HPVM (Kotsifakou et al., PPoPP'18) as models with symbolic sizes: one source for every device.

python examples/hpvm.py [--target c] [--trials 4] [sgemm stencil spmv lbm edges]

sgemm: alpha A B + beta C. stencil: seven points of a grid. spmv: a sparse matrix in CSR times a vector. lbm: a step of lattice Boltzmann
(D3Q19, BGK). edges: edge detection in six stages. Grids and images come with the border that they read.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import relax_tune as rt
from relax_tune.ir.core.dtype import f32, i32
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.struct_info import ShapeInfo, TensorInfo
from relax_tune.ir.op.math.elementwise import Add, MulScalar
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Max

ALPHA, BETA = 1.5, 0.5
CENTER, AROUND = 0.4, 0.1
OMEGA, THETA = 1.2, 0.1
LEAST = 0.5  # density that a cell is taken to have at least: momentum is divided by it

Arrays = dict[str, NDArray[Any] | tuple[int, ...]]


def sgemm() -> rt.IRModule:
    """alpha A B + beta C, in operators."""
    g = rt.GraphBuilder()
    m, k, n = (g.symbol(s, 1, 1024) for s in "mkn")
    a, b, c = g.input("a", (m, k)), g.input("b", (k, n)), g.input("c", (m, n))
    product = g.call(MulScalar(ALPHA), g.call(Matmul(), a, b))
    return g.finish(g.call(Add(), product, g.call(MulScalar(BETA), c)))


STENCIL = f"""
@prim_func(outputs=1)
def stencil(a: Buffer((z + 2, y + 2, x + 2), f32), out: Buffer((z, y, x), f32)):
    for i in serial(z):
        for j in serial(y):
            for k in serial(x):
                with block("stencil"):
                    vi = spatial(z, i)
                    vj = spatial(y, j)
                    vk = spatial(x, k)
                    out[vi, vj, vk] = {AROUND} * (a[vi, vj + 1, vk + 1] + a[vi + 2, vj + 1, vk + 1]
                        + a[vi + 1, vj, vk + 1] + a[vi + 1, vj + 2, vk + 1]
                        + a[vi + 1, vj + 1, vk] + a[vi + 1, vj + 1, vk + 2]) - {CENTER} * a[vi + 1, vj + 1, vk + 1]
"""


def stencil() -> rt.IRModule:
    """Seven points of a grid, as a tensor function."""
    g = rt.GraphBuilder()
    z, y, x = (g.symbol(s, 1, 160) for s in "zyx")
    a = g.input("a", (z + 2, y + 2, x + 2))
    return g.finish(g.call_tir(g.add(rt.parse_prim_func(STENCIL)), [a], TensorInfo((z, y, x), f32)))


# a row ends where the next one starts; w, the length of the longest row, bounds the loop
SPMV = """
@prim_func(outputs=1)
def spmv(start: Buffer((n + 1,), i32), column: Buffer((m,), i32), value: Buffer((m,), f32), x: Buffer((k,), f32),
         y: Buffer((n,), f32), w: i64):
    for i in serial(n):
        for j in serial(w):
            with block("row"):
                vi = spatial(n, i)
                vj = reduce(w, j)
                with init():
                    y[vi] = 0.0
                y[vi] = y[vi] + select(cast(start[vi], i64) + vj < cast(start[vi + 1], i64),
                    value[min(cast(start[vi], i64) + vj, m - 1)]
                    * x[cast(column[min(cast(start[vi], i64) + vj, m - 1)], i64)], 0.0)
"""


def spmv() -> rt.IRModule:
    """A matrix in CSR times a vector. A shape gives the length of the longest row."""
    g = rt.GraphBuilder()
    n, m, k, w = g.symbol("n", 1, 1 << 18), g.symbol("m", 1, 1 << 22), g.symbol("k", 1, 1 << 18), g.symbol("w", 1, 16)
    start, column = g.input("start", (n + 1,), i32), g.input("column", (m,), i32)
    value, x = g.input("value", (m,)), g.input("x", (k,))
    g.parameter("widest", ShapeInfo((w,)))
    name = g.add(rt.parse_prim_func(SPMV))
    return g.finish(g.call_tir(name, [start, column, value, x], TensorInfo((n,), f32), scalars=(w,)))


# the directions of D3Q19 and their weights: the places of a cube of three without its corners, plane by plane
WAYS = np.array([(z, y, x) for z in (-1, 0, 1) for y in (-1, 0, 1) for x in (-1, 0, 1) if abs(z) + abs(y) + abs(x) < 3])
SHARE = np.array([{0: 1 / 3, 1: 1 / 18, 2: 1 / 36}[int(abs(w).sum())] for w in WAYS], np.float32)


def _source() -> str:
    """The cell from which direction vq streams in, as indices of f: 2 - the place of the direction along each axis."""
    skipped = lambda j: f"select({j} < 1, 1, select({j} < 4, 2, 3))"  # corners before place j of an outer plane
    place = f"select(vq < 5, vq + {skipped('vq')}, select(vq < 14, vq + 4, vq + 4 + {skipped('vq - 14')}))"
    return f"f[vq, vi + (2 - {place} // 9), vj + (2 - {place} // 3 % 3), vk + (2 - {place} % 3)]"


def _moments() -> str:
    """The density and the momentum of a cell, each a sum over the directions that stream into it."""
    lines = []
    for at, name in enumerate(("rho", "uz", "uy", "ux")):
        factor = f" * speed[vq, {at - 1}]" if at else ""
        lines.append(f"""
    for i{at} in serial(z):
        for j{at} in serial(y):
            for k{at} in serial(x):
                for q{at} in serial(19):
                    with block("{name}"):
                        vi = spatial(z, i{at})
                        vj = spatial(y, j{at})
                        vk = spatial(x, k{at})
                        vq = reduce(19, q{at})
                        with init():
                            {name}[vi, vj, vk] = 0.0
                        {name}[vi, vj, vk] = {name}[vi, vj, vk] + {_source()}{factor}
""")
    return "".join(lines)


_CELL = "[vi, vj, vk]"
_SPEED = " + ".join(f"speed[vq, {at}] * {u}{_CELL}" for at, u in enumerate(("uz", "uy", "ux")))
_SQUARE = " + ".join(f"{u}{_CELL} * {u}{_CELL}" for u in ("uz", "uy", "ux"))
LBM = f"""
@prim_func(outputs=1)
def lbm(f: Buffer((19, z + 2, y + 2, x + 2), f32), speed: Buffer((19, 3), f32),
        share: Buffer((19,), f32), out: Buffer((19, z, y, x), f32)):
    rho = alloc((z, y, x), f32)
    uz = alloc((z, y, x), f32)
    uy = alloc((z, y, x), f32)
    ux = alloc((z, y, x), f32)
{_moments()}
    for q in serial(19):
        for i in serial(z):
            for j in serial(y):
                for k in serial(x):
                    with block("collide"):
                        vq = spatial(19, q)
                        vi = spatial(z, i)
                        vj = spatial(y, j)
                        vk = spatial(x, k)
                        out[vq, vi, vj, vk] = {1 - OMEGA} * {_source()} + (
                            {OMEGA} * share[vq] * (rho{_CELL} + 3.0 * ({_SPEED})
                            + (4.5 * ({_SPEED}) * ({_SPEED}) - 1.5 * ({_SQUARE})) / max(rho{_CELL}, {LEAST})))
"""


def lbm() -> rt.IRModule:
    """A step of lattice Boltzmann: each direction streams in from a neighbour, then relaxes towards equilibrium."""
    g = rt.GraphBuilder()
    z, y, x = (g.symbol(s, 1, 64) for s in "zyx")
    f = g.input("f", (19, z + 2, y + 2, x + 2))
    args = [f, g.constant("speed", WAYS.astype(np.float32)), g.constant("share", SHARE)]
    return g.finish(g.call_tir(g.add(rt.parse_prim_func(LBM)), args, TensorInfo((const(19), z, y, x), f32)))


def _around(name: str, value: str, border: int, reads: Sequence[str] = ("a",), outs: str = "f32") -> str:
    """A tensor function over an image: each element from the elements around it in others with a wider border."""
    params = ", ".join(f"{r}: Buffer((h + {2 * border}, w + {2 * border}), f32)" for r in reads)
    return f"""
@prim_func(outputs=1)
def {name}({params}, out: Buffer((h, w), {outs})):
    for i in serial(h):
        for j in serial(w):
            with block("{name}"):
                vi = spatial(h, i)
                vj = spatial(w, j)
                out[vi, vj] = {value}
"""


GAUSS = np.outer(*[np.array([1, 4, 6, 4, 1]) / 16] * 2).astype(np.float32)
SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
NEAR = [(i, j) for i in range(3) for j in range(3)]


def _weighted(weights: NDArray[Any], at: int = 0) -> str:
    return " + ".join(f"{float(w)} * a[vi + {i + at}, vj + {j + at}]" for (i, j), w in np.ndenumerate(weights) if w)


def _folded(function: str, terms: Sequence[str]) -> str:
    first, *others = terms
    for term in others:
        first = f"{function}({first}, {term})"
    return first


_TERMS = [f"a[vi + {i}, vj + {j}]" for i, j in NEAR]
_ALL = _folded("max", _TERMS), _folded("min", _TERMS)
STAGES = {
    "smooth": _around("smooth", _weighted(GAUSS), 2),
    "laplace": _around("laplace", f"{_ALL[0]} + {_ALL[1]} - 2.0 * a[vi + 1, vj + 1]", 1),
    # two neighbours of opposite signs
    "crossing": _around("crossing", f"select({_ALL[1]} < 0.0, select({_ALL[0]} > 0.0, 1.0, 0.0), 0.0)", 1),
    "gradient": _around(
        "gradient",
        f"sqrt(({_weighted(SOBEL, 1)}) * ({_weighted(SOBEL, 1)}) + ({_weighted(SOBEL.T, 1)}) * ({_weighted(SOBEL.T, 1)}))",
        2,
    ),
}
REJECT = f"""
@prim_func(outputs=1)
def reject(crossing: Buffer((h, w), f32), gradient: Buffer((h, w), f32), most: Buffer((1, 1), f32), out: Buffer((h, w), f32)):
    for i in serial(h):
        for j in serial(w):
            with block("reject"):
                vi = spatial(h, i)
                vj = spatial(w, j)
                out[vi, vj] = select(gradient[vi, vj] > {THETA} * most[0, 0], crossing[vi, vj], 0.0)
"""


def edges() -> rt.IRModule:
    """Edges of an image: smoothed, its Laplacian by dilation and erosion, zero crossings, gradient, the largest one, rejection."""
    g = rt.GraphBuilder()
    h, w = g.symbol("h", 1, 1024), g.symbol("w", 1, 1024)
    image = g.input("image", (h + 8, w + 8))
    stage = {name: g.add(rt.parse_prim_func(text)) for name, text in STAGES.items()}
    smooth = g.call_tir(stage["smooth"], [image], TensorInfo((h + 4, w + 4), f32))
    laplace = g.call_tir(stage["laplace"], [smooth], TensorInfo((h + 2, w + 2), f32))
    crossing = g.call_tir(stage["crossing"], [laplace], TensorInfo((h, w), f32))
    gradient = g.call_tir(stage["gradient"], [smooth], TensorInfo((h, w), f32))
    most = g.call(Max((0, 1), True), gradient)
    reject = g.add(rt.parse_prim_func(REJECT))
    return g.finish(g.call_tir(reject, [crossing, gradient, most], TensorInfo((h, w), f32)))


PROGRAMS: Mapping[str, Callable[[], rt.IRModule]] = {
    "sgemm": sgemm,
    "stencil": stencil,
    "spmv": spmv,
    "lbm": lbm,
    "edges": edges,
}


def arguments(name: str, size: int) -> Arrays:
    """Return arguments of a program: matrices and images of `size` rows, grids of `size` planes."""
    rng = np.random.default_rng(size)
    random = lambda *shape: rng.random(shape, np.float32)
    if name == "sgemm":
        return {"a": random(size, size + 1), "b": random(size + 1, size + 2), "c": random(size, size + 2)}
    if name == "stencil":
        return {"a": random(size + 2, size + 3, size + 4)}
    if name == "lbm":
        return {"f": SHARE[:, None, None, None] * (1 + 0.1 * random(19, size + 2, size + 3, size + 4))}
    if name == "edges":
        rows, columns = np.mgrid[: size + 8, : size + 11]
        disc = (rows - size / 2) ** 2 + (columns - size / 2) ** 2 < (size / 3) ** 2
        return {"image": disc.astype(np.float32) + 0.1 * random(size + 8, size + 11)}
    offsets = np.array([-1024, -32, -2, -1, 0, 1, 2, 32, 1024])  # nine diagonals, fewer at the border
    columns = np.arange(size)[:, None] + offsets
    inside = (columns >= 0) & (columns < size)
    start = np.concatenate([[0], np.cumsum(inside.sum(1))]).astype(np.int32)
    column = columns[inside].astype(np.int32)
    widest = (int(inside.sum(1).max()),)
    return {"start": start, "column": column, "value": random(len(column)), "x": random(size), "widest": widest}


def reference(name: str, given: Mapping[str, Any]) -> NDArray[Any]:
    """Compute a program with NumPy, in double precision."""
    a = {k: np.asarray(v, float) if np.asarray(v).dtype == np.float32 else v for k, v in given.items()}
    if name == "sgemm":
        return ALPHA * (a["a"] @ a["b"]) + BETA * a["c"]
    if name == "stencil":
        x, c = a["a"], slice(1, -1)
        around = x[:-2, c, c] + x[2:, c, c] + x[c, :-2, c] + x[c, 2:, c] + x[c, c, :-2] + x[c, c, 2:]
        return AROUND * around - CENTER * x[c, c, c]
    if name == "spmv":
        rows = np.repeat(np.arange(len(a["start"]) - 1), np.diff(a["start"]))
        return np.bincount(rows, a["value"] * a["x"][a["column"]], len(a["start"]) - 1)
    if name == "lbm":
        _, z, y, x = np.array(a["f"].shape) - 2
        f = np.stack([a["f"][q, 1 - w[0] :][:z, 1 - w[1] :][:, :y, 1 - w[2] :][:, :, :x] for q, w in enumerate(WAYS)])
        rho = f.sum(0)
        u = np.einsum("qd,qzyx->dzyx", WAYS, f)
        cu = np.einsum("qd,dzyx->qzyx", WAYS, u)
        squares = (4.5 * cu**2 - 1.5 * (u**2).sum(0)) / np.maximum(rho, LEAST)
        equilibrium = SHARE[:, None, None, None].astype(float) * (rho + 3 * cu + squares)
        return (1 - OMEGA) * f + OMEGA * equilibrium
    windows = lambda x, n: np.lib.stride_tricks.sliding_window_view(x, (n, n))
    smooth = np.einsum("hwij,ij->hw", windows(a["image"], 5), GAUSS.astype(float))
    near = windows(smooth, 3)
    laplace = near.max((2, 3)) + near.min((2, 3)) - 2 * smooth[1:-1, 1:-1]
    signs = windows(laplace, 3)
    crossing = (signs.min((2, 3)) < 0) & (signs.max((2, 3)) > 0)
    inner = windows(smooth[1:-1, 1:-1], 3)
    gradient = np.hypot(*(np.einsum("hwij,ij->hw", inner, s) for s in (SOBEL, SOBEL.T)))
    return (crossing & (gradient > THETA * gradient.max())).astype(float)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--target", default="c", help="c, opencl or opencl:PART")
    parser.add_argument("--trials", type=int, default=0, help="candidates per task; 0 measures nothing")
    given = parser.parse_args()
    for name in given.programs:
        module, db = PROGRAMS[name](), rt.open_database("memory://")
        if given.trials:
            rt.tune(module, target=given.target, db=db, trials=given.trials)
        policy = "measured" if given.trials else "generic"
        with rt.build(module, target=given.target, db=db, policy=policy).open() as model:
            for size in (5, 40):
                arrays = arguments(name, size)
                (found,) = model.run(arrays)
                wanted = reference(name, arrays)
                close = np.isclose(found, wanted, rtol=1e-4, atol=1e-4).mean()
                print(f"{name} of size {size}: {found.shape}, {close:.2%} of the elements as NumPy's")


if __name__ == "__main__":
    main()
