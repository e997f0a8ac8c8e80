"""The comparison of batches of a server: what is sent, and how times are summarised."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from relax_tune.runtime.signature import TensorSpec
from relax_tune.tuner.serve.costs import ShapeCosts
from relax_tune.tuner.serve.policy import Waiting
from relax_tune.tuner.serve.tensors import read_request


@pytest.fixture
def batching() -> Any:
    for package in ("starlette", "prometheus_client"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra serve)")
    return importlib.import_module("experiments.serving.batching")


def test_fixed_window_takes_the_first_requests_at_the_longest_shape(batching: Any) -> None:
    waiting = [Waiting(n, 0.0, 1, length) for n, length in enumerate((5, 9, 7, 30))]
    costs = ShapeCosts((1, 8), (1, 32))
    batch = batching.first_come(waiting[::-1], 0.0, costs, 3)
    assert [w.number for w in batch.members] == [0, 1, 2] and batch.shape[:2] == (3, 9)
    single = batching.one_by_one(waiting[::-1], 0.0, costs, 3)
    assert [w.number for w in single.members] == [0] and single.shape[:2] == (1, 5)


def test_bodies_are_requests_of_the_protocol(batching: Any) -> None:
    head, _, body = batching.body_of([4, 5, 6]).partition(b"\r\n\r\n")
    headers = dict(line.split(": ") for line in head.decode().split("\r\n")[1:])
    assert int(headers["Content-Length"]) == len(body)
    specs = [TensorSpec(n, np.dtype(np.int64), ("b", "n")) for n in ("input_ids", "attention_mask")]
    request = read_request(body, headers["Inference-Header-Content-Length"], specs)
    assert request.binary and request.arrays["input_ids"].tolist() == [[4, 5, 6]]


def test_table_shows_quantiles_and_the_greatest_rate_within_the_bound(batching: Any) -> None:
    fast, slow, empty = [0.01] * 99 + [0.5], [0.02] * 50 + [0.3] * 50, list[float]()
    lines = batching.table({"ours": {5.0: fast, 10.0: slow}, "other": {5.0: empty, 10.0: empty}}, 100)
    assert lines[2].startswith("| ours | 10.0, ") and lines[2].endswith("| 5/s |")
    assert lines[3] == "| other | - | - | 0/s |"
