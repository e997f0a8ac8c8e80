from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from relax_tune.runtime.mapped_file import ALIGNMENT
from relax_tune.runtime.stored_weights import weights_from_bytes, weights_to_bytes

WEIGHTS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(64, dtype=np.int8).reshape(8, 8).T, "c": np.array(2.5),
    "d": np.zeros((0, 3), np.int64), "e": np.arange(32).astype(ml_dtypes.bfloat16), "f": np.array([True, False]),
}  # fmt: skip


def file(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_weights_to_bytes_is_read_by_safetensors() -> None:
    data = b"".join(weights_to_bytes(WEIGHTS))
    read = dict(safetensors.deserialize(data))
    assert set(read) == set(WEIGHTS)
    for name, array in WEIGHTS.items():
        assert bytes(read[name]["data"]) == array.tobytes() and tuple(read[name]["shape"]) == array.shape
    assert [read[n]["dtype"] for n in sorted(WEIGHTS)] == ["F32", "I8", "F64", "I64", "BF16", "BOOL"]


def test_arrays_of_whole_cache_lines_start_at_one() -> None:
    pieces = weights_to_bytes(WEIGHTS)
    places = np.cumsum([0, *(len(p) for p in pieces)])
    header = json.loads(bytes(pieces[0])[8:])
    assert len(pieces[0]) % ALIGNMENT == 0 and list(header)[:3] == ["b", "d", "e"]
    assert all(place % ALIGNMENT == 0 for place in places[1:4])


def test_weights_from_bytes_shares_memory_of_file() -> None:
    data = b"".join(weights_to_bytes(WEIGHTS))
    read = weights_from_bytes(data, {})
    for name, array in WEIGHTS.items():
        np.testing.assert_array_equal(read[name], array)
        assert not read[name].flags.writeable and (
            not array.size or np.shares_memory(read[name], np.frombuffer(data, np.uint8))
        )


def test_files_of_the_library_are_read() -> None:
    plain = {n: np.ascontiguousarray(a) for n, a in WEIGHTS.items() if n != "c"}
    read = weights_from_bytes(safetensors.numpy.save(plain, {"note": "x"}), {})
    assert all((read[n] == a).all() for n, a in plain.items())


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0" * 7, file(b""), file(b"{"), file(b"[" * 100_000), file([]), file({"a": 3}), (1 << 63).to_bytes(8, "little"),
        *(
            file({"a": ENTRY | change}, b"\0" * 8)
            for change in (
                {"dtype": "F99"}, {"dtype": 3}, {"shape": [3]}, {"shape": [-1, -2]}, {"shape": [2.0]}, {"shape": [True, 2]},
                {"shape": ["2"]}, {"data_offsets": [0, 4]}, {"data_offsets": [-8, 0]}, {"data_offsets": [4, 12]},
                {"data_offsets": [0]}, {"shape": [1 << 62, 0], "data_offsets": [0, 0]}, {"shape": [1] * 80 + [2]},
            )
        ),
        file({"a": ENTRY}, b"\0" * 4), file({"a": ENTRY}, b"\0" * 9), file({"a": ENTRY, "b": ENTRY}, b"\0" * 8),
        file({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, b"\0" * 20),
    ],
)  # fmt: skip
def test_damaged_or_hostile_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        weights_from_bytes(data, {})
