"""Attention with linear biases (ALiBi; Press et al. 2022)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import bf16
from relax_tune.ir.frontend.hf.decoders.spec import Alibi


def paper_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of the paper; heads beyond a power of 2 have every second one of twice as many heads."""
    power = 2 ** math.floor(math.log2(heads))

    def slopes(count: int) -> list[float]:
        base = np.float32(2 ** (-(2 ** -(math.log2(count) - 3))))
        return [float(base ** np.float32(i)) for i in range(1, count + 1)]

    return tuple(slopes(power) + slopes(2 * power)[: 2 * (heads - power) : 2])


def mpt_slopes(heads: int, largest: float) -> tuple[float, ...]:
    """Return the slopes of MPT: of the next power of 2, every second one first."""
    power = 2 ** math.ceil(math.log2(heads))
    found = [1 / 2 ** (i * largest / power) for i in range(1, power + 1)]
    return tuple(found if power == heads else (found[1::2] + found[::2])[:heads])


def biases(alibi: Alibi, heads: int, positions: int, scale: float) -> NDArray[np.float32]:
    """Return the biases of all columns, (heads, positions). scale: of the scores"""
    found = paper_slopes(heads) if alibi.largest is None else mpt_slopes(heads, alibi.largest)
    slopes = np.asarray(found, np.float32)[:, None]
    at = np.arange(1 - positions if alibi.from_end else 0, 1 if alibi.from_end else positions, dtype=np.float32)
    if alibi.half:
        slopes, at = (t.astype(bf16.name).astype(np.float32) for t in (slopes, at))
    table = slopes * at
    table = table.astype(bf16.name).astype(np.float32) if alibi.half else table
    return np.ascontiguousarray(table * np.float32(scale) if alibi.scaled else table)
