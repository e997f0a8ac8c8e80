"""Random uses of the operators of com.microsoft that are nearly operators of the standard domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.fuzz.importers.builder import F32, I32, I64, Builder, within
from tests.fuzz.importers.elementwise import Use
from tests.fuzz.importers.formulas import MICROSOFT
from tests.fuzz.importers.microsoft import F64, floats, rows


def _node(b: Builder, op: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
    return b.node(op, inputs, outputs, MICROSOFT, **attributes)


def triangle(b: Builder, op: str) -> None:
    k = [b.literal(np.int64(b.rng.randint(-3, 3)), b.chance(0.7))] if b.chance(0.7) else []
    _node(b, op, [rows(b, b.choose((2, 3)), known=False), *k], upper=b.choose((None, 0, 1)))


def pad(b: Builder, op: str) -> None:
    x = rows(b, b.choose((1, 2, 3)), known=False)
    shape, mode = b.get(x).shape, b.choose((None, "constant", "reflect", "edge"))
    most = [n - 1 if mode == "reflect" else 3 for n in shape]
    pads = np.array([b.rng.randint(0, min(3, m)) for m in (*most, *most)])
    value = [b.literal(np.array([1.5], np.float32))] if mode in (None, "constant") and b.chance(0.5) else []
    _node(b, op, [x, b.ints(pads[None] if b.chance(0.3) else pads), *value], mode=mode)


def index(b: Builder, op: str) -> None:
    """GatherND, of all dims from the first on."""
    x = rows(b, b.choose((2, 3)), known=False)
    shape = b.get(x).shape
    depth = b.rng.randint(1, len(shape))
    kind = b.choose((I32, I64))
    b.p.stated |= {depth}
    indices = b.given((*b.shape(b.choose((0, 1)), 1), depth), kind, within(0, min(shape[:depth]), kind))
    _node(b, op, [x, indices])


def expand(b: Builder, op: str) -> None:
    x = rows(b, b.choose((1, 2, 3)), known=False)
    rank = b.get(x).ndim
    _node(b, op, [x, b.literal(np.int32(b.rng.randint(-rank - 1, rank)))])


def steps(b: Builder, op: str) -> None:
    kind = b.choose((F32, I32, I64))
    step, first = b.choose((1, 2, -1)), b.rng.randint(-4, 4)
    ends = [first, first + step * b.choose((0, 1, 5)), *([step] if step != 1 or b.chance(0.5) else [])]
    _node(b, op, [b.literal(np.asarray(e, kind)) for e in ends])


def unique(b: Builder, op: str) -> None:
    _node(b, op, [b.given((b.size(1),), F32, _few)], 3)


def _few(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.asarray(rng.integers(-3, 3, shape)).astype(F32)


def samples(b: Builder, op: str) -> None:
    n = b.size(1, 2)
    x, grid = floats(b, n, b.size(1, 2), b.size(2, 5), b.size(2, 5)), (n, b.size(1, 4), b.size(1, 4), 2)
    more = {"mode": b.choose((None, "bilinear", "nearest")), "padding_mode": b.choose((None, "zeros", "border"))}
    _node(b, op, [x, b.given(grid, F32, within(-1.4, 1.4, F32))], align_corners=b.choose((None, 0, 1)), **more)


def distances(b: Builder, op: str) -> None:
    dtype, width = b.choose((F32, F64)), b.size(1)
    b.p.stated |= {width}
    sides = [floats(b, b.size(1, 5), width, dtype=dtype) for _ in range(2)]
    _node(b, op, sides, metric=b.choose(("euclidean", "sqeuclidean")))


def integers(b: Builder, op: str) -> None:
    kind, k = np.dtype("i2"), b.size(1)
    b.p.stated |= {k}
    draw = within(-300, 300, kind)
    _node(b, op, [b.given((b.size(1, 4), k), kind, draw), b.given((k, b.size(1, 4)), kind, draw)])


USES: Mapping[str, Use] = {
    "Trilu": triangle, "Pad": pad, "GatherND": index, "ExpandDims": expand, "Range": steps, "Unique": unique,
    "GridSample": samples, "CDist": distances, "MatMulInteger16": integers,
}  # fmt: skip
"""Random uses of the operators of com.microsoft that are nearly operators of the standard domain."""
