"""Products by the warps of a group, by hand: what rules make of them, in a few lines, for the tests of each part."""

from __future__ import annotations

from relax_tune.ir.core.dtype import DType, f32
from relax_tune.ir.core.expr import Var, cast, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.schedule import Schedule

# Rows and columns of a group, in two by two warps of one and two, or two and one, tiles of the machine; steps that are fetched at once.
ROWS, COLUMNS, STEPS = 32, 32, 32


def product(form: str, dtype: DType, dims: tuple[int, int] | None = None) -> PrimFunc:
    """C = A B + 1 over (m, k) and (k, n), each lying as it is ("n") or turned ("t"); dims: of n and k, symbols without them."""
    m = Var("m")
    n, k = (Var("n"), Var("k")) if dims is None else map(const, dims)
    b = TensorBuilder(f"product_{form}")
    x = b.input("A", (k, m) if form[0] == "t" else (m, k), dtype)
    w = b.input("B", (n, k) if form[1] == "t" else (k, n), dtype)
    c, out = b.alloc("C", (m, n)), b.output("D", (m, n))

    def term(i: Var, j: Var, r: Var) -> object:
        left = x[r, i] if form[0] == "t" else x[i, r]
        return cast(left, f32) * cast(w[j, r] if form[1] == "t" else w[r, j], f32)

    b.reduce(c, (k,), const(0.0), lambda acc, i, j, r: acc + term(i, j, r), name="mm")
    b.compute(out, lambda i, j: c[i, j] + 1.0, name="last")
    return b.finish()


def by_warps(
    form: str,
    dtype: DType,
    items: tuple[int, int] = (8, 4),
    pad: int | None = 8,
    mark: bool = True,
    stages: int = 1,
    dims: tuple[int, int] | None = None,
) -> Schedule:
    """items: of a tile's rows and columns, (8, 4) being a warp's; pad: elements behind the rows in shared memory, which are swizzled
    without it; stages: slices that are
    there at once, all but one of them copied asynchronously before they are needed."""
    s = Schedule(product(form, dtype, dims))
    s.apply("pad", block="mm", factors=[ROWS, COLUMNS, STEPS])
    s.compute_inline("C_pad_take")
    i_0, i_w, i_m, i_r, i_y = s.split("mm_i", [None, 2, ROWS // 32, 16 // items[0], items[0]])
    j_0, j_w, j_n, j_x, j_c = s.split("mm_j", [None, 2, COLUMNS // 16, items[1], 8 // items[1]])
    k_0, k_1, k_2 = s.split("mm_k", [None, STEPS // 16, 16])
    s.reorder([i_0, j_0, k_0, i_w, j_w, k_1, i_y, j_x, i_m, i_r, j_n, j_c, k_2])
    for name, step in (("A_pad", form[0] == "n"), ("B_pad", form[1] == "t")):
        s.apply("set_scope", buffer=name, scope="shared")
        s.compute_at(f"{name}_fill", k_0)
        copies = [f"{name}_fill"]
        if stages > 1:
            copies.append(f"{name}_fill_first")
            s.apply("software_pipeline", block=copies[0], loop=k_0, stages=stages)
            s.apply("tile_layout", buffer=name, dim=int(step), factor=STEPS, order=[1, 0, 2] if step else [0, 1, 2])
        if pad is None:
            s.apply("swizzle", buffer=name, vector=8)
        else:
            s.apply("storage_align", buffer=name, factor=16, offset=pad)
        for block in copies:
            row, column = s.loops_of(block)[-2:]
            vectors, lanes = s.split(column, [None, 8])
            rounds, z, y, x = s.split(s.fuse([row, vectors]), [None, 4, *items])
            s.reorder([z, y, x, rounds, lanes])
            s.vectorize(lanes)
            for axis, loop in enumerate((x, y, z)):
                s.bind(loop, "item", axis)
            if stages > 1:
                s.apply("copy_async", loop=lanes)
    row, column = s.reverse_compute_at("last", j_0)
    e_w, e_m, e_r, e_y = s.split(row, [None, ROWS // 32, 16 // items[0], items[0]])
    f_w, f_n, f_x, f_c = s.split(column, [None, COLUMNS // 16, items[1], 8 // items[1]])
    s.reorder([e_w, f_w, e_y, f_x, e_m, e_r, f_n, f_c])
    s.apply("decompose_reduction", block="mm", loop=k_0)
    for block in ("last", "mm", "mm_init"):
        w_0, w_1, *own = [n for n in s.inner_loops(block, j_0) if n not in (k_0, k_1)]
        for axis, loop in enumerate((own[1], own[0], s.fuse([w_0, w_1]))):
            s.bind(loop, "item", axis)
    if mark:
        s.apply("tensorize", loop=i_y, intrinsic=f"mma_{dtype}_{form}")
    sums = find_block(s.func, "mm").body.buffer.name
    for rank, (at, factor) in enumerate(((0, items[0]), (2, 8), (3, 8 // items[1])), 2):
        s.apply("tile_layout", buffer=sums, dim=at, factor=factor, order=[*range(rank + 1)])
    s.apply("set_scope", buffer=sums, scope="local")
    s.bind(j_0, "group", 0)
    s.bind(i_0, "group", 1)
    return s
