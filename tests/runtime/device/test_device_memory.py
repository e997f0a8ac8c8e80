"""Host memory of devices: aligned, apart, and given back."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import MeasureError
from relax_tune.runtime.device import memory
from relax_tune.runtime.device.memory import ALIGNMENT, SLAB_BYTES, Slabs

SIZES = st.one_of(
    st.integers(0, 200), st.sampled_from([1 << 20, (2 << 20) + 1, SLAB_BYTES // 2 + 1, SLAB_BYTES, SLAB_BYTES + 1])
)


@settings(max_examples=examples(20))
@given(st.lists(SIZES, max_size=12))
def test_arrays_are_aligned_and_share_no_byte(sizes: list[int]) -> None:
    slabs = Slabs()
    arrays = [slabs.take(size) for size in sizes]
    places = sorted((int(a.__array_interface__["data"][0]), a.size) for a in arrays)
    assert all(start % ALIGNMENT == 0 for start, _ in places)
    assert all(a.size >= max(size, 1) and a.flags.writeable for a, size in zip(arrays, sizes, strict=True))
    assert all(start + size <= after for (start, size), (after, _) in zip(places, places[1:], strict=False))


@pytest.mark.slow
def test_slab_without_arrays_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __init__(self, *_: object, **__: object) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(memory.mmap, "mmap", Watched)
    slabs = Slabs()
    kept, other = slabs.take(100), slabs.take(SLAB_BYTES)  # no room beside the first
    assert len(made) == 2
    kept[:] = 7
    del other
    gc.collect()
    assert made[0]() is not None and made[1]() is None and np.all(kept == 7)
    del kept
    gc.collect()
    assert made[0]() is None


def mapping_flags(address: int) -> set[str]:
    """What Linux says of the mapping that an address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span, *rest = line.split()
        if not span.endswith(":"):
            low, high = (int(end, 16) for end in span.split("-"))
            inside = low <= address < high
        elif inside and span == "VmFlags:":
            return set(rest)
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells of its mappings")
def test_slabs_are_private_and_ask_for_huge_pages() -> None:
    """Shared memory would not get them: whether it does is another setting of the system, and off by default."""
    held = Slabs().take(100)
    flags = mapping_flags(int(held.__array_interface__["data"][0]))
    assert "sh" not in flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


def test_missing_memory_is_error() -> None:
    with pytest.raises(MeasureError, match="0 or more bytes, got -1"):
        Slabs().take(-1)
    with pytest.raises(MeasureError, match="the host has not that much"):
        Slabs().take(1 << 60)
