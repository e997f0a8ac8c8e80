"""Host memory for results: taken again when its arrays are gone, never while one is there."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from relax_tune.runtime.memory.host_pool import LEAST, HostPool

F32 = np.dtype(np.float32)
MANY = LEAST // 4 * 3


def start(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_of_a_lost_array_serves_another() -> None:
    pool = HostPool()
    first = pool.empty(F32, (3, MANY // 3))
    at, view = start(first), first[1:].T
    assert first.flags.writeable and at % 64 == 0
    del first
    gc.collect()
    second = pool.empty(F32, (MANY,))
    assert start(second) != at, "a view is still there"
    del view
    gc.collect()
    assert start(pool.empty(F32, (MANY - 5,))) == at, "of a shorter array too"


def test_idle_memory_is_bounded_by_the_largest_call() -> None:
    pool = HostPool()
    held = []
    for _ in range(5):
        pool.begin()
        held.append(pool.empty(F32, (MANY,)))
    most = held[0].base.__array_interface__["shape"][0]
    held.clear()
    gc.collect()
    assert sum(size * len(blocks) for size, blocks in pool._idle.items()) == most
    kept = pool.empty(F32, (MANY,))
    pool.close()
    del kept
    gc.collect()
    assert not any(pool._idle.values())


@given(st.lists(st.tuples(st.integers(0, 3 * LEAST), st.booleans()), max_size=30))
def test_arrays_never_share_memory(steps: list[tuple[int, bool]]) -> None:
    pool, held = HostPool(), []
    for number, (size, drops) in enumerate(steps):
        pool.begin()
        array = pool.empty(np.dtype(np.uint8), (size,))
        array[...] = number % 256
        held.append((array, number % 256))
        del array
        if drops:
            del held[len(held) // 2]
        for one, value in held:
            assert (one == value).all()
