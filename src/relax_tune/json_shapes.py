"""Shapes of untrusted JSON data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def has_shape(data: object, shape: Any) -> bool:
    """Tell whether JSON data has a shape.

    Args:
        data: The data.
        shape: A class for its instances, a tuple for a list of items of these shapes, or a mapping for an object that has at least
            these fields, each of its shape.
    """
    if isinstance(shape, Mapping):
        return isinstance(data, Mapping) and all(k in data and has_shape(data[k], s) for k, s in shape.items())
    if isinstance(shape, tuple):
        items = isinstance(data, (list, tuple)) and len(data) == len(shape)
        return items and all(map(has_shape, data, shape))  # type: ignore[call-overload]
    return isinstance(data, shape)
