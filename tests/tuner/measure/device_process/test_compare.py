"""Outputs compared with the reference: what passes is what the definition lets pass, in any block and among special values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tune.tuner.measure.device_process.compare import BLOCK, difference

SPECIAL = [0.0, -0.0, 1.0, 1.0001, -3.5, 1e-30, np.inf, -np.inf, np.nan]
RTOL, ATOL = 1e-3, 1e-6


def passes(found: float, wanted: float) -> bool:
    if np.isnan(wanted) or np.isnan(found):
        return bool(np.isnan(wanted) and np.isnan(found))
    if np.isinf(wanted) or np.isinf(found):
        return found == wanted
    return abs(found - wanted) <= ATOL + RTOL * abs(wanted)


@given(st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]), st.integers(0, 1 << 20),
       st.sampled_from(SPECIAL), st.sampled_from(SPECIAL))  # fmt: skip
def test_compare_single_wrong_element_fails(size: int, at: int, found: float, wanted: float) -> None:
    ours, reference = np.full(size, 2.0, np.float32), np.full(size, 2.001, np.float64).astype(np.float32)
    ours[at % size], reference[at % size] = found, wanted
    text = difference("y", ours, reference, RTOL, ATOL)
    assert (text is None) == passes(float(ours[at % size]), float(reference[at % size]))
    assert text is None or (f"1 of {size} elements differ" in text and f"({at % size},)" in text)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32"])
def test_integers_are_compared_exactly(dtype: str) -> None:
    wanted = (np.arange(BLOCK + 3).reshape(-1, 1) % 2).astype(dtype)
    found = wanted.copy()
    assert difference("y", found, wanted, 1.0, 1.0) is None
    found[-1, 0] ^= 1
    assert "1 of" in (difference("y", found, wanted, 1.0, 1.0) or "")


def test_another_signature_is_told() -> None:
    text = difference("y", np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32), 1.0, 1.0)
    assert text is not None and "disagree on the signature" in text


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64, np.float32])
def test_difference_where_some_elements_have_slack(dtype: type[np.generic]) -> None:
    top = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 100
    wanted, slack = np.asarray([top, 5, 7], dtype), np.asarray([1.0, 0.0, 1.0])
    one = np.asarray(1, dtype)
    assert difference("y", wanted, wanted, 0.0, 0.0, slack) is None
    assert difference("y", np.asarray([wanted[0] - one, 5, 7 - one], dtype), wanted, 0.0, 0.0, slack) is None
    for wrong in ([top, 5 + one, 7], [top, 5, 7 - one - one], [wanted[0] - one - one, 5, 7]):
        assert difference("y", np.asarray(wrong, dtype), wanted, 0.0, 0.0, slack) is not None
