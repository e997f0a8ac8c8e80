"""The `Library` contract: tuned routines of other authors, called on device buffers.

Tests: `tests/tuner/emit/test_library_packages.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from relax_tune.runtime.device.base import Device, Launch


class Library(Protocol):
    """Routines over a device's buffers, in launch order with its kernels.

    Who binds or launches holds the device's turn. What a library shares between devices, or in the process, it guards itself.

    `name` is the part of a routine before the dot; `routines` maps each routine to the names of its int64 scalars, in
    order. Buffers are the buffers of the step, outputs last. A separate package provides a library as a class that opens
    without arguments, by an entry point of the group `relax_tune.libraries`.
    """

    name: str
    routines: dict[str, tuple[str, ...]]

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        """Return sorted (text, text) that identifies version and settings well enough to reuse a timing."""
        ...

    def bind(self, routine: str, device: Device, buffers: Sequence[Any], scalars: Sequence[int]) -> Launch:
        """Return a closure that runs the routine. Sizes of 0 are allowed: an empty sum is 0.

        Raises: ArtifactError for an unknown routine or a wrong number of buffers or scalars; MeasureError when sizes
        exceed the buffers or the library, or when host code cannot reach this device's memory.
        """
        ...
