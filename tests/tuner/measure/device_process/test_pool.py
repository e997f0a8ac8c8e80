"""Inputs that several batches share are drawn once, as long as they fit."""

from __future__ import annotations

import numpy as np
import pytest

from relax_tune.runtime.program.program import Fill
from relax_tune.tuner.measure.device_process import pool
from relax_tune.tuner.measure.device_process.inputs import random_array
from relax_tune.tuner.measure.device_process.pool import Contents, RecentArrays


def test_recent_arrays_are_drawn_once_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(pool, "random_array", lambda *x: (drawn.append(x[0]), random_array(*x))[1])
    arrays = RecentArrays(most_bytes=1000)
    first, second, third = ((name, "float32", (100,), Fill(), 0) for name in "abc")
    for contents in (first, second, first):
        np.testing.assert_array_equal(arrays.of(contents), random_array(*contents))
    assert drawn == ["a", "b"] and arrays.nbytes == 800
    for contents in (third, first, second):  # the third one takes the place of the second
        arrays.of(contents)
    assert drawn == ["a", "b", "c", "b"] and arrays.nbytes == 800
    large: Contents = ("d", "float32", (1000,), Fill(), 0)
    assert arrays.of(large).size == 1000 and arrays.nbytes == 0, "it is returned, and not kept"
