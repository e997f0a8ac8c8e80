from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from relax_tune.runtime.mapped_file import ALIGNMENT, drop_pages, hash_ranges, is_lasting, map_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(np.arange(1 << 20, dtype=np.float32).tobytes())
    return path


def resident(array: np.ndarray) -> int:
    """KiB of the mapping that holds an array which are in this process."""
    at = array.__array_interface__["data"][0]
    for first, end, facts in re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) (.*\n(?:[A-Z]\w+:.*\n)+)", Path("/proc/self/smaps").read_text(), re.M
    ):
        if int(first, 16) <= at < int(end, 16):
            return int(re.search(r"^Rss:\s+(\d+)", facts, re.M)[1])
    raise AssertionError("it is not mapped")


def test_hash_ranges_hashes_each_piece(file: Path) -> None:
    data = file.read_bytes()
    with file.open("rb") as opened:
        found = hash_ranges(opened.fileno(), [((0, 10), (1 << 21, len(data))), ((5, 5),)])
        with pytest.raises(OSError, match="cut"):
            hash_ranges(opened.fileno(), [((0, len(data) + 1),)])
    assert found == [hashlib.blake2b(x, digest_size=32).hexdigest() for x in (data[:10] + data[1 << 21 :], b"")]


def test_drop_pages_of_mapped_array_keeps_elements(file: Path) -> None:
    with file.open("rb") as opened:
        array = np.frombuffer(map_file(opened.fileno()), np.float32)
    assert array.sum() == np.arange(1 << 20, dtype=np.float32).sum()
    before = resident(array)
    drop_pages(array[1:])
    assert before > 4000 and resident(array) < 1000
    assert array[-1] == (1 << 20) - 1


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_drop_pages_of_written_mapping_changes_nothing(mode: str, file: Path) -> None:
    array = np.memmap(file, np.float32, mode)
    array[:] = 7
    array.flags.writeable = False
    drop_pages(array)
    assert (array == 7).all()


def test_lasting_arrays_are_read_only_aligned_and_in_order(file: Path) -> None:
    with file.open("rb") as opened:
        array = np.frombuffer(map_file(opened.fileno()), np.float32)
    assert is_lasting(array) and is_lasting(array[ALIGNMENT // 4 :])
    assert not is_lasting(array[1:]) and not is_lasting(array[::2]) and not is_lasting(array[:0])
    assert not is_lasting(np.array(array))
