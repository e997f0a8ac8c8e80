"""Rounds of improving in a server, with a program in place of the process that tunes: swaps, returns, refusals, failures."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tuner.serve.served import Answer, Files, Server, infer_body, running, tensor

from relax_tune.errors import UserError
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.hashed_zip import digest_at_end
from relax_tune.tuner.serve.improve import improver, watch
from relax_tune.tuner.serve.improve.order import IMPROVES, ImproveOptions
from relax_tune.tuner.serve.improve.start import improve_models, load_improved

pytestmark = [pytest.mark.ccompiler, pytest.mark.process]
FAKE = Path(__file__).with_name("fake_child.py")
GAIN = {"refused": "", "gain": 0.5, "p99": 0.5, "difference": 1e-6, "sizes": 2, "secs": 1.0}
BODIES = [infer_body(tensor("x", "FP32", np.full((rows, 512), rows, np.float32))) for rows in (4, 8)]


@pytest.fixture
def given(files: Files, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of an artifact under the name `net.rta`."""

    def copied(name: str) -> Path:
        return Path(shutil.copy(files.artifact(name), tmp_path / "net.rta"))

    return copied


def offer(monkeypatch: pytest.MonkeyPatch, result: Any, candidate: Path | None = None) -> None:
    command = (sys.executable, "-P", str(FAKE), json.dumps(result), "-" if candidate is None else str(candidate))
    monkeypatch.setattr(improver, "COMMAND", command)


def improving(sentences: list[str], **options: Any) -> Callable[[Any], None]:
    chosen = replace(ImproveOptions(sources={"net": "model.relax"}), **options)
    return lambda serving: improve_models(serving, chosen, sentences.append)


@contextmanager
def traffic(server: Server) -> Iterator[list[Answer]]:
    """Requests in two threads until the end of the context."""
    answers, ended = list[Answer](), threading.Event()

    def send() -> None:
        number = 0
        while not ended.is_set():
            answers.append(server.ask("/v2/models/net/infer", BODIES[number % 2]))
            number += 1

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def state_when(server: Server, condition: Callable[[dict[str, Any]], bool], secs: float = 60) -> dict[str, Any]:
    end = time.monotonic() + secs
    while True:
        (state,) = server.ask("/improvement").json["models"]
        if condition(state):
            return dict(state)
        assert time.monotonic() < end, state
        time.sleep(0.05)


def all_right(answers: list[Answer]) -> bool:
    """Whether every request was answered with the means of its rows: the weights are averages."""
    for answer in answers:
        (output,) = answer.json["outputs"]
        rows = output["shape"][0]
        if answer.status != 200 or not np.allclose(output["data"], rows, rtol=1e-3):
            return False
    return len(answers) > 400


def test_faster_artifact_is_swapped_in_and_confirmed(
    given: Callable[[str], Path], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences: list[str] = []
    path = given("slow")
    monkeypatch.setattr(watch, "ALLOWED", 1e3)  # other processes of the machine may begin to slow calls down
    offer(monkeypatch, GAIN, files.artifact("fast"))
    with running([str(path)], prepare=improving(sentences)) as server, traffic(server) as answers:
        state = state_when(server, lambda s: s["rounds"] == 1 and s["phase"] == "recording")
        assert (state["swaps"], state["returns"], state["gain"]) == (1, 0, 0.5)
        assert state["watched"]["calls"] >= 300 and state["artifact"].endswith("net.improved.rta")
        assert server.metric("swaps_total", model="net", version="1") == 1
        assert server.metric("improve_rounds_total", model="net", version="1", outcome="swapped") == 1
    assert all_right(answers)
    assert digest_at_end(path.with_name("net.improved.rta")) == digest_at_end(files.artifact("fast"))
    assert sorted(p.name for p in path.parent.iterdir()) == ["net.improved.rta", "net.rta"]
    assert any("50.0%" in s for s in sentences)


def test_slower_artifact_is_swapped_out_again(
    given: Callable[[str], Path], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences: list[str] = []
    path = given("fast")
    monkeypatch.setattr(watch, "ALLOWED", 0.0)  # so that the times of this machine do not matter
    monkeypatch.setattr(watch, "SIGMAS", -1e3)
    offer(monkeypatch, {**GAIN, "secs": 1e6}, files.artifact("slow"))
    with running([str(path)], prepare=improving(sentences)) as server, traffic(server) as answers:
        state = state_when(server, lambda s: s["returns"] == 1 and s["phase"] == "recording")
        assert "went back" in state["message"]
        state = state_when(server, lambda s: s["rounds"] == 2 and s["phase"] == "recording")
        assert state["swaps"] == 1 and "slower" in state["message"]  # the same artifact is not tried twice
    assert all_right(answers)
    assert [p.name for p in path.parent.iterdir()] == ["net.rta"]
    assert any("slower" in s for s in sentences)


def test_refused_artifact_is_not_swapped_in(given: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = given("slow")
    offer(monkeypatch, {**GAIN, "refused": "it saves 0.1%"})
    with running([str(path)], prepare=improving([])) as server, traffic(server):
        state = state_when(server, lambda s: s["rounds"] == 1 and s["phase"] == "recording")
        assert state["message"] == "it saves 0.1%" and state["swaps"] == 0


@pytest.mark.parametrize("result, subject", [(None, "database is away"), ("dies", "code -9")])
def test_failed_round_is_told_and_tried_again(
    given: Callable[[str], Path], files: Files, monkeypatch: pytest.MonkeyPatch, result: Any, subject: str
) -> None:
    sentences: list[str] = []
    path = given("slow")
    monkeypatch.setattr(improver, "RETRY_SECS", 0.2)
    offer(monkeypatch, result)
    with running([str(path)], prepare=improving(sentences)) as server, traffic(server) as answers:
        state = state_when(server, lambda s: s["rounds"] >= 1 and s["phase"] == "recording")
        assert subject in state["message"] and state["swaps"] == 0
        offer(monkeypatch, GAIN, files.artifact("fast"))
        state_when(server, lambda s: s["swaps"] == 1)
    assert all(a.status == 200 for a in answers)
    assert any(subject in s for s in sentences)


def test_damaged_candidate_is_a_failed_round(
    given: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = given("slow")
    torn = tmp_path / "torn.rta"
    torn.write_bytes(path.read_bytes()[:-100])
    offer(monkeypatch, GAIN, torn)
    with running([str(path)], prepare=improving([])) as server, traffic(server) as answers:
        state = state_when(server, lambda s: s["rounds"] == 1 and s["phase"] == "recording")
        assert "candidate" in state["message"] and state["swaps"] == 0
    assert all(a.status == 200 for a in answers)


def test_artifact_of_another_signature_is_a_failed_round(
    given: Callable[[str], Path], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = given("slow")
    offer(monkeypatch, GAIN, files.artifact("dense"))
    with running([str(path)], prepare=improving([])) as server, traffic(server) as answers:
        state = state_when(server, lambda s: s["rounds"] == 1 and s["phase"] == "recording")
        assert "signature" in state["message"] and state["swaps"] == 0
    assert all(a.status == 200 for a in answers)


def test_end_of_the_server_ends_the_tuning_process(
    given: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = given("slow")
    monkeypatch.setattr(improver, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    with running([str(path)], prepare=improving([])) as server, traffic(server):
        state_when(server, lambda s: s["phase"] == "tuning")
    assert [p.name for p in path.parent.iterdir()] == ["net.rta"]


def test_unsuitable_models_are_named(given: Callable[[str], Path], files: Files) -> None:
    path = given("slow")
    with pytest.raises(UserError, match="--improve-from"), running([str(path)], prepare=improving([], sources=None)):
        pass
    sentences: list[str] = []
    arguments = [str(path), f"decoder={files.artifact('decoder')}"]
    folders = [f"decoder={files.folder('decoder')}"]
    with running(arguments, folders, prepare=improving(sentences)) as server:
        assert [m["model"] for m in server.ask("/improvement").json["models"]] == ["net"]
    assert any("decoder" in s for s in sentences)


def test_second_server_of_a_file_serves_without_improving(given: Callable[[str], Path]) -> None:
    path = given("slow")
    sentences: list[str] = []
    with (
        running([str(path)], prepare=improving([])) as first,
        running([str(path)], prepare=improving(sentences)) as second,
    ):
        assert len(first.ask("/improvement").json["models"]) == 1
        assert second.ask("/improvement").json["models"] == [] and "another server" in sentences[0]


def test_start_serves_the_improvement_of_the_same_file_only(given: Callable[[str], Path], files: Files) -> None:
    path = given("slow")
    artifact, fast = load_artifact(path), load_artifact(files.artifact("fast"))
    improved = path.with_name("net.improved.rta")

    def stored(base: str) -> None:
        extra = {**fast.manifest["extra"], IMPROVES: base}
        replace(fast, manifest={**fast.manifest, "extra": extra}).save(improved)

    sentences: list[str] = []
    assert load_improved(path, artifact, sentences.append) is artifact and not sentences
    stored(digest_at_end(path))
    assert load_improved(path, artifact, sentences.append).path == str(improved) and not sentences
    stored("another")
    assert load_improved(path, artifact, sentences.append) is artifact and "another file" in sentences[-1]
    improved.write_bytes(improved.read_bytes()[:1000])
    assert load_improved(path, artifact, sentences.append) is artifact and len(sentences) == 2
