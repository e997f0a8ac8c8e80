"""Bytes of a program's buffers: all at once, as one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tune.errors import ArtifactError
from relax_tune.runtime.program.buffer_sizes import BufferSizes
from relax_tune.runtime.program.program import BufferSpec

SHAPES = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=6)


def found(sizes: BufferSizes, values: Sequence[int]) -> list[int]:
    known = sizes.of(values)
    return [known[kind] for kind in sizes.kinds]


def sizes_of(*buffers: BufferSpec, storages: tuple[int, ...] = ()) -> BufferSizes:
    program: Any = SimpleNamespace(name="main", buffers=buffers, storages=storages)
    return BufferSizes(program)


@given(SHAPES, st.lists(st.integers(0, 1 << 40), min_size=4, max_size=4))
def test_all_at_once_are_as_one_by_one(shapes: list[tuple[int, ...]], values: list[int]) -> None:
    kinds = ("float32", "int8", "float64")
    buffers = [BufferSpec(f"b{n}", kinds[n % 3], shape, "const") for n, shape in enumerate(shapes)]
    wanted = [math.prod(values[s] for s in b.shape) * (4, 1, 8)[n % 3] for n, b in enumerate(buffers)]
    assert found(sizes_of(*buffers), values) == wanted


def test_buffers_beyond_the_memory_are_refused() -> None:
    base = BufferSpec("x", "float32", (0,), "output")
    view = BufferSpec("y", "float32", (1,), "view", base=0)
    scratch = BufferSpec("z", "float32", (0,), "temp", storage=0)
    sizes = sizes_of(base, view, scratch, storages=(2,))
    assert found(sizes, [3, 2, 12]) == [12, 8, 12]
    for values, message in (
        ([3, 4, 12], "buffer y: expected 16 bytes, x that it views has 12"),
        ([3, 2, 11], "buffer z: expected 12 bytes, its storage has 11"),
        ([3, -2, 12], r"buffer y: expected dims of 0 or more, got \(-2,\)"),
        ([1 << 61, 2, 12], "buffer z: expected 9223372036854775808 bytes, its storage has 12"),
    ):
        with pytest.raises(ArtifactError, match=message):
            found(sizes, values)


def test_a_result_may_extend_an_input() -> None:
    cache = BufferSpec("x", "float32", (0,), "input")
    longer = BufferSpec("y", "float32", (1,), "view", base=0)
    assert found(sizes_of(cache, longer), [3, 4]) == [12, 16]
