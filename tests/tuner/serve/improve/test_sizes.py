"""Served sizes: the last calls, their file, profiles for tuning, the change of the mix, and samples of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tuner.serve.served import Files, running, tensor
from tests.tuner.serve.served import infer_body as body_of

from relax_tune.errors import UserError
from relax_tune.runtime.shapes import ShapeProfile
from relax_tune.tuner.serve.improve.recording import SizesRecorder
from relax_tune.tuner.serve.improve.sizes import MOST_SIZES, MOST_TIMES, WINDOW, ServedSizes, drift, sample_sizes


def sizes_of(*values: int, function: str = "main") -> ServedSizes:
    sizes = ServedSizes()
    sizes.of_model("key")
    record = sizes.recorder(function, ["b", "n"])
    for value in values:
        record((1, value))
    return sizes


def test_counts_are_of_the_last_calls() -> None:
    sizes = sizes_of(*[3] * WINDOW, *[5] * 10)
    assert sizes.counts() == {("main", (1, 3)): WINDOW - 10, ("main", (1, 5)): 10}
    assert sizes.calls == WINDOW + 10


def test_calls_of_threads_are_all_counted() -> None:
    sizes = sizes_of()
    record = sizes.recorder("main", ["b", "n"])
    threads = [threading.Thread(target=lambda: [record((2, 2)) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes.counts() == {("main", (2, 2)): 2000}


def test_file_is_a_profile_and_is_read_again(tmp_path: Path) -> None:
    sizes = sizes_of(3, 3, 7)
    path = tmp_path / "deeper" / "net.1.shapes.json"
    sizes.save(path)
    profile = ShapeProfile.read(path)
    assert profile.model == "key" and profile.histograms["main"]["n"].values == {3: 2, 7: 1}
    again = ServedSizes.read(path)
    assert again.counts() == sizes.counts() and again.to_json() == sizes.to_json()
    again.of_model("another")
    assert not again.counts()
    assert ServedSizes.read(tmp_path / "none.json").counts() == {}


@pytest.mark.parametrize(
    "change",
    [
        {"calls": 3},
        {"model": None},
        {"calls": {"main": {"symbols": ["b"], "counts": [[1, 2, 3]]}}},
        {"calls": {"main": {"symbols": ["b"], "counts": [[-1, 2]]}}},
        {"calls": {"main": {"symbols": ["b"], "counts": [["1", 2]]}}},
    ],
)
def test_file_of_other_content_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "net.1.shapes.json"
    path.write_text(json.dumps({**json.loads(sizes_of(3).to_json()), **change}))
    with pytest.raises(UserError, match=r"net\.1\.shapes\.json"):
        ServedSizes.read(path)


@given(st.binary(max_size=200))
def test_file_of_any_bytes_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("sizes") / "x.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"x\.json"):
        ServedSizes.read(path)


def test_full_disk_is_reported_once_and_recovers(tmp_path: Path) -> None:
    class Served:
        name, version, sizes = "net", 1, sizes_of(3)

    folder = tmp_path / "sizes"
    folder.write_text("no folder")
    sentences: list[str] = []
    recorder = SizesRecorder([Served()], folder, sentences.append)  # type: ignore[list-item]
    recorder.save()
    recorder.save()
    assert len(sentences) == 1 and "sizes" in sentences[0]
    folder.unlink()
    recorder.save()
    assert ServedSizes.read(folder / "net.1.shapes.json").counts() == Served.sizes.counts()


def test_times_are_few_and_the_last() -> None:
    sizes = sizes_of()
    record = sizes.recorder("main", ["b", "n"])
    for n in range(MOST_SIZES + 5):
        record((1, n))
        sizes.timed("main", float(n))
    for secs in range(MOST_TIMES + 9):
        sizes.timed("main", float(secs))
    times = sizes.times()
    assert len(times) == MOST_SIZES and times["main", (1, MOST_SIZES + 4)][-1] == MOST_TIMES + 8.0
    assert all(len(t) <= MOST_TIMES for t in times.values())
    sizes.forget_times()
    assert not sizes.times()


def test_drift_is_the_change_of_shares() -> None:
    short, long = sizes_of(*[8] * 100).counts(), sizes_of(*[200] * 100).counts()
    assert drift(short, short) == 0 and drift(short, long) == 1
    assert drift(short, sizes_of(*[8] * 30, *[200] * 10).counts()) == pytest.approx(0.25)
    assert drift(short, sizes_of(*[9] * 7).counts()) == 0  # the same power of two


@given(st.dictionaries(st.integers(1, 500), st.integers(1, 50), min_size=1), st.integers(1, 40))
def test_sample_has_the_shares_of_the_calls(counts: dict[int, int], most: int) -> None:
    sizes = {("main", (n,)): count for n, count in counts.items()}
    sample = sample_sizes(sizes, most)
    assert len(sample) <= most and sum(share for _, share in sample) == pytest.approx(1)
    total = sum(counts.values())
    for size, share in sample:
        assert abs(share - sizes[size] / total) < 1 / most + 1e-9


@pytest.mark.ccompiler
def test_server_counts_requests_but_no_measurements(files: Files, tmp_path: Path) -> None:
    with running([str(files.artifact("dense"))]) as server:
        for rows in (1, 3, 3):
            body = body_of(tensor("x", "FP32", np.ones((rows, 4))))
            assert server.ask("/v2/models/dense/infer", body).status == 200
        (model,) = server.serving.repository.models
        counts = model.sizes.counts()
        assert sum(counts.values()) == 3 and model.sizes.model == model.artifact.manifest["extra"]["model"]
        assert sum(map(len, model.sizes.times().values())) == 3
        recorder = SizesRecorder([model], tmp_path, print)
        recorder.save()
    assert ServedSizes.read(tmp_path / "dense.1.shapes.json").counts() == counts
