"""Functions whose groups have several items, for the tests of grids: shared work and barriers."""

from __future__ import annotations

from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.text.parser import parse_prim_func

# For each case: its text, the number of barriers in the generated text, and the number of warp shuffles in the CUDA text.
TEXTS: dict[str, tuple[int, int, str]] = {
    "between statements that are not neighbours": (1, 0, """
def f(x: Buffer((n, 16), f32), z: Buffer((n, 12), f32), y: Buffer((n, 16), f32)):
    tile = alloc((16,), f32, scope="shared")
    for g in group(n):
        for a in item(16):
            tile[a] = x[g, a]
        for b in item(12):
            z[g, b] = x[g, b] * 2.0
        for c in item(16):
            y[g, c] = tile[15 - c]
"""),
    "a tile that each step writes again": (2, 0, """
def f(x: Buffer((n, m, 16), f32), y: Buffer((n, m, 16), f32)):
    tile = alloc((16,), f32, scope="shared")
    for g in group(n):
        for k in serial(m):
            for b in item(16):
                tile[b] = x[g, k, b]
            for c in item(16):
                y[g, k, c] = tile[15 - c]
"""),
    "below conditions that some items meet": (3, 0, """
def f(x: Buffer((n, m, 16), f32), y: Buffer((n, 16), f32)):
    row = alloc((4, 16), f32, scope="shared")
    for g in group((n + 3) // 4):
        for r in item(4, axis=1):
            if g * 4 + r < n and r != 2:
                for z in item(16):
                    y[g * 4 + r, z] = 0.0
                for k in serial(m):
                    for a in item(16):
                        row[r, a] = x[g * 4 + r, k, a]
                    for c in item(16):
                        y[g * 4 + r, c] = y[g * 4 + r, c] + row[r, 15 - c]
            else:
                if g * 4 + r < n:
                    for d in item(16):
                        y[g * 4 + r, d] = 5.0
"""),
    "an item's own elements": (0, 0, """
def f(x: Buffer((n, m, 16), f32), y: Buffer((n, 16), f32)):
    total = alloc((4, 16), f32, scope="shared")
    for g in group((n + 3) // 4):
        for r in item(4, axis=1):
            for a in item(16):
                if g * 4 + r < n:
                    total[r, a] = 0.0
                    for k in serial(m):
                        total[r, a] = total[r, a] + x[g * 4 + r, k, a]
                    y[g * 4 + r, a] = total[r, a]
"""),
    "along four axes": (1, 0, """
def f(x: Buffer((n, 2, 3, 5, 2), f32), y: Buffer((n, 2, 3, 5, 2), f32)):
    tile = alloc((2, 3, 5, 2), f32, scope="shared")
    for g in group(n):
        for d in item(2, axis=3):
            for c in item(3, axis=2):
                for b in item(5, axis=1):
                    for a in item(2):
                        tile[d, c, b, a] = x[g, d, c, b, a]
        for w in item(2, axis=3):
            for z in item(3, axis=2):
                for v in item(5, axis=1):
                    for u in item(2):
                        y[g, w, z, v, u] = tile[1 - w, 2 - z, 4 - v, 1 - u]
"""),
    "by one item, for all": (1, 0, """
def f(x: Buffer((n, 16), f32), y: Buffer((n, 16), f32)):
    top = alloc((1,), f32, scope="shared")
    for g in group(n):
        top[0] = x[g, 0]
        for k in serial(15):
            top[0] = max(top[0], x[g, k + 1])
        for a in item(16):
            y[g, a] = x[g, a] / top[0]
"""),
    "through global memory": (1, 0, """
def f(x: Buffer((n, 16), f32), z: Buffer((n, 16), f32), y: Buffer((n, 16), f32)):
    for g in group(n):
        for a in item(16):
            z[g, a] = x[g, a] * 3.0
        for b in item(16):
            y[g, b] = z[g, 15 - b]
"""),
    "a sum that parts of a warp exchange": (1, 1, """
def f(x: Buffer((n, 16), f32), y: Buffer((n, 16), f32)):
    part = alloc((4, 16), f32, scope="warp")
    total = alloc((4,), f32, scope="local")
    for g in group((n + 3) // 4):
        for r in item(4, axis=1):
            if g * 4 + r < n:
                for a in item(16):
                    part[r, a] = x[g * 4 + r, a] * 2.0
                total[r] = x[g * 4 + r, 3]
                for k in serial(16):
                    if r < 3:
                        total[r] = total[r] + part[r, k]
                for c in item(16):
                    y[g * 4 + r, c] = total[r] + x[g * 4 + r, c]
"""),
    "the largest of every warp": (3, 1, """
def f(x: Buffer((n, m, 64), f32), y: Buffer((n, m, 64), f32)):
    part = alloc((2, 32), f32, scope="warp")
    top = alloc((2,), f32, scope="shared")
    for g in group(n):
        for k in serial(m):
            for v in item(2, axis=1):
                for a in item(32):
                    part[v, a] = x[g, k, v * 32 + a]
                top[v] = x[g, k, v * 32]
                for b in unrolled(32):
                    top[v] = max(top[v], part[v, b])
            for w in item(2, axis=1):
                for c in item(32):
                    y[g, k, w * 32 + c] = top[1 - w] - x[g, k, w * 32 + c]
"""),
    "items that are no whole warp": (1, 0, """
def f(x: Buffer((n, 16), f32), y: Buffer((n, 16), f32)):
    part = alloc((16,), f32, scope="warp")
    total = alloc((1,), f32, scope="local")
    for g in group(n):
        for a in item(16):
            part[a] = x[g, a]
        total[0] = 1.0
        for k in serial(16):
            total[0] = total[0] * part[k]
        for c in item(16):
            y[g, c] = total[0]
"""),
    "a warp's elements that another item reads": (1, 0, """
def f(x: Buffer((n, 32), f32), y: Buffer((n, 32), f32)):
    part = alloc((32,), f32, scope="warp")
    for g in group(n):
        for a in item(32):
            part[a] = x[g, a]
        for c in item(32):
            y[g, c] = part[31 - c]
"""),
    "a warp some of whose items have nothing": (2, 0, """
def f(x: Buffer((n, 32), f32), y: Buffer((n, 32), f32)):
    part = alloc((32,), i32, scope="warp")
    total = alloc((1,), i32, scope="local")
    for g in group(n):
        for z in item(32):
            part[z] = 7
        for a in item(12):
            part[a] = cast(x[g, a] * 100.0, i32)
        total[0] = 0
        for k in serial(32):
            total[0] = min(total[0], part[k])
        for c in item(32):
            y[g, c] = cast(total[0], f32)
"""),
}  # fmt: skip


def function(name: str) -> PrimFunc:
    """One of `TEXTS`; everything but the first parameter is an output."""
    text = TEXTS[name][2]
    outputs = text.split("):\n")[0].count("Buffer") - 1
    return parse_prim_func(f"@prim_func(outputs={outputs})\n{text.strip()}\n")
