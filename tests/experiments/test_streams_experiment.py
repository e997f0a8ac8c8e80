"""The comparison of texts that are generated at a time: a run of a tiny decoder, and the table of its times."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from experiments.serving import streams
from tests.support.effort import GENERIC

import relax_tune as rt


def test_rates_are_tokens_per_second_of_all_texts() -> None:
    times = {"paged": {1: [0.5, 0.1, 0.5], 4: [1.0], 16: [2.0]}}
    *_, row = streams.page(times, {"paged": "20 of 21"}, 3)
    assert row == "| paged | 128 | 256 | 512 | 20 of 21 |"
    texts = {"1": {"texts": [[1, 2]]}, "4": {"texts": [[3], [4]]}}
    assert streams.agreement({"1": {"texts": [[1, 2]]}, "4": {"texts": [[3], [5]]}}, texts) == "2 of 3"


@pytest.mark.ccompiler
@pytest.mark.slow
def test_tiny_run_gives_the_same_texts_with_both_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rt, "build", partial(rt.build, **GENERIC))
    monkeypatch.setattr(streams, "STREAMS", (1, 4))
    monkeypatch.setattr(streams, "ADDED", 16)
    present = streams.prepare(tmp_path, tiny=True, effort="none")
    assert {"paged", "apart"} <= set(present)
    results = {}
    for name in ("paged", "apart"):
        streams.run(name, tmp_path)
        results[name] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [len(r["texts"]) for r in results["paged"].values()] == list(streams.STREAMS)
    assert {len(t) for r in results["paged"].values() for t in r["texts"]} == {streams.ADDED}
    assert streams.agreement(results["paged"], results["apart"]) == "5 of 5"
