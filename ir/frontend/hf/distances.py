"""Distances between positions as rows of tables: buckets of relative attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def log_bucket(distance: NDArray[Any], span: int, furthest: int | None) -> NDArray[Any]:
    """Return relative positions, those beyond half the span on a logarithmic scale (He et al. 2023, DeBERTa V3)."""
    if furthest is None:
        return distance
    middle = span // 2
    far = np.maximum(np.abs(distance), 1).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(far / np.float32(middle)) / np.log(np.float32((furthest - 1) / middle))
    scaled = np.ceil(ratio * np.float32(middle - 1)) + middle
    return np.asarray(np.where(far <= middle, distance, scaled * np.sign(distance)), np.int64)


def distance_bucket(distance: NDArray[Any], count: int, furthest: int, behind: bool = False) -> NDArray[Any]:
    """Return the buckets of distances of columns from rows (Raffel et al. 2020): half of them for columns behind, or all.

    Half of each half holds one distance each, the other half logarithmically more up to `furthest`."""
    half = count if behind else count // 2
    exact = half // 2
    far = np.maximum(-distance, 0) if behind else np.abs(distance)
    with np.errstate(divide="ignore"):
        ratio = np.log(far.astype(np.float32) / np.float32(exact)) / np.float32(np.log(furthest / exact))
        large = exact + np.nan_to_num(ratio * np.float32(half - exact), neginf=0).astype(np.int64)
    found = np.where(far < exact, far, np.minimum(large, half - 1))
    return np.asarray(found if behind else found + half * (distance > 0))


def halves(heads: int, size: int) -> NDArray[Any]:
    """Return the order of rows that puts the even elements of each head before the odd ones."""
    head = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
    return np.asarray((np.arange(heads)[:, None] * size + head).ravel())
