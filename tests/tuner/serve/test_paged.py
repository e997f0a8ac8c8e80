"""Completions over paged caches: requests that come and go at any time get the tokens of `rt.generate` with contiguous caches."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.tuner.serve.served import Files, Server, running

import relax_tune as rt
from relax_tune.errors import MeasureError
from relax_tune.runtime.calls.session import Session
from relax_tune.tuner.serve.paged_generator import PagedGenerator

pytestmark = pytest.mark.ccompiler
END = 2
"""`eos_token_id` of the folder."""


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[Server]:
    with running([str(files.artifact("paged"))], [str(files.folder("decoder"))]) as opened:
        yield opened


@pytest.fixture(scope="module")
def contiguous(files: Files) -> Iterator[rt.Model]:
    with rt.load(files.artifact("decoder")) as model:
        yield model


def generator_of(server: Server) -> PagedGenerator:
    generator = server.serving.repository.find("paged").generator
    assert isinstance(generator, PagedGenerator)
    return generator


def test_paged_folder_has_the_end_token(server: Server) -> None:
    assert generator_of(server).config().eos_ids == (END,)


def wait_until_idle(server: Server) -> None:
    """Wait until every block is free: requests that left give theirs back after the step that runs."""
    pool, end = generator_of(server).decoder.scheduler.pool, time.monotonic() + 30
    while pool.free < pool.count:
        assert time.monotonic() < end
        time.sleep(0.01)


def words(tokens: Any) -> str:
    return "".join(f" w{t}" for t in tokens)


def expected_text(model: rt.Model, prompt: list[int], body: dict[str, Any]) -> str:
    """The text up to the folder's end token."""
    drawn = body["temperature"] > 0
    options = {"do_sample": True, "temperature": body["temperature"], "top_k": 0, "seed": body["seed"]} if drawn else {}
    (row,) = rt.generate(model, [prompt], body["max_tokens"], eos_token_id=END, **options)
    return words(token for token in row[len(prompt) :] if token != END)


def test_paged_requests_at_random_times_get_the_tokens_of_generate(server: Server, contiguous: rt.Model) -> None:
    rng = random.Random(0)
    cases = []
    for number in range(40):
        prompt = [rng.randrange(1, 30) for _ in range(rng.randint(1, 12))]
        body = {"model": "paged", "prompt": prompt, "max_tokens": rng.randint(1, 16)}
        body |= {"temperature": rng.choice([0, 0, 1.2]), "seed": number}
        cases.append((prompt, body, rng.random() * 0.2, rng.random() < 0.2))

    def ask(case: Any) -> str | None:
        _, body, delay, leaves = case
        time.sleep(delay)
        if not leaves:
            return str(server.ask("/v1/completions", body).json["choices"][0]["text"])
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True, "max_tokens": 50}))
        connection.getresponse().read(1)
        connection.close()
        return None

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, cases))
    for (prompt, body, *_), text in zip(cases, texts, strict=True):
        assert text is None or text == expected_text(contiguous, prompt, body)
    assert texts.count(None) > 2
    wait_until_idle(server)
    together = server.metric("batch_requests_sum", model="paged", version="1")
    assert together > 1.5 * server.metric("batch_requests_count", model="paged", version="1")


def test_paged_stream_and_chat_have_the_tokens_of_generate(server: Server, contiguous: rt.Model) -> None:
    body = {"model": "paged", "prompt": "w1 w2 w3", "max_tokens": 6, "temperature": 0}
    expected = expected_text(contiguous, [1, 2, 3], body)
    parts = server.ask("/v1/completions", {**body, "stream": True}).body.decode().split("\n\n")[:-2]
    assert "".join(json.loads(p.removeprefix("data: "))["choices"][0]["text"] for p in parts) == expected
    assert len(parts) > 3
    chat = {"model": "paged", "messages": [{"role": "user", "content": "w2"}], "max_tokens": 6, "temperature": 0}
    (choice,) = server.ask("/v1/chat/completions", chat).json["choices"]
    assert choice["message"]["content"] == expected_text(contiguous, [8, 2, 9, 7], {**chat, "seed": None})
    stopped = server.ask("/v1/completions", {**body, "stop": expected.split()[2]}).json["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["text"].split() == expected.split()[:2]
    drawn = {**body, "temperature": 1.0, "seed": 3, "n": 3}
    first, second = (server.ask("/v1/completions", drawn).json["choices"] for _ in range(2))
    assert first == second and len({c["text"] for c in first}) > 1
    assert first[0]["text"] == expected_text(contiguous, [1, 2, 3], {**drawn, "n": 1})


def test_paged_text_at_the_last_position_ends_and_a_longer_prompt_is_refused(server: Server) -> None:
    body = {"model": "paged", "prompt": [1] * 60, "max_tokens": 40, "temperature": 0}
    answer = server.ask("/v1/completions", body).json
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 5
    refused = server.ask("/v1/completions", {**body, "prompt": [1] * 65})
    assert refused.status == 400 and "64" in refused.json["error"]["message"]


def test_paged_failing_step_ends_present_texts_only(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "paged", "prompt": [1, 2], "max_tokens": 4, "temperature": 0}
    expected = server.ask("/v1/completions", body).json["choices"][0]["text"]

    def fail(*_: Any) -> Any:
        raise MeasureError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "run", fail)
        with ThreadPoolExecutor(3) as pool:
            assert {a.status for a in pool.map(lambda _: server.ask("/v1/completions", body), range(3))} == {503}
    wait_until_idle(server)
    assert server.ask("/v1/completions", body).json["choices"][0]["text"] == expected


def test_paged_shared_beginnings_are_computed_once(server: Server) -> None:
    prompt = np.random.default_rng(5).integers(1, 30, 33).tolist()
    rows = "rows_total"
    counts = []
    for last in (1, 2):
        before = server.metric(rows, model="paged", version="1")
        server.ask("/v1/completions", {"model": "paged", "prompt": [*prompt, last], "max_tokens": 1, "temperature": 0})
        counts.append(server.metric(rows, model="paged", version="1") - before)
    assert counts == [34, 2]
