"""What runs: needs nothing of relax-tune but its errors, so a machine that only runs built models has it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relax_tune.errors import MeasureError


class OwnLibrary:
    """Softmax of rows, in NumPy."""

    name = "own"
    routines = {"own.softmax": ("n", "k")}  # noqa: RUF012 - the Protocol declares an instance attribute

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        return (("numpy", np.__version__),)

    def bind(self, routine: str, device: Any, buffers: Sequence[Any], scalars: Sequence[int]) -> Callable[[], None]:
        """`buffers`: x, workspace and y, each (n, k) f32."""
        n, k = scalars
        launch: Callable[[], None] | None = device.bind_host(lambda views: softmax(views, n, k), buffers)
        if launch is None:
            raise MeasureError(f"{routine}: expected a device that shares memory with the host, got {device.info.name}")
        return launch


def softmax(views: Sequence[Any], n: int, k: int) -> None:
    x, space, y = (v[: n * k * 4].view(np.float32).reshape(n, k) for v in views)
    np.subtract(x, x.max(1, keepdims=True), out=space)
    np.exp(space, out=space)
    np.divide(space, space.sum(1, keepdims=True), out=y)
