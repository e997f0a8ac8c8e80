"""The routes in the form of OpenAI's API: results of the Python API, streams, errors, clients that leave."""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tuner.serve.served import Files, Server, running

import relax_tune as rt

pytestmark = pytest.mark.ccompiler
TEXTS = ["the cat sat on the mat", "a dog", "rain falls slowly", "the mat"]
PROMPT = "w1 w2 w3"


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[Server]:
    names = ("encoder", "decoder", "dense")
    folders = [f"{name}={files.folder(name)}" for name in names[:2]]
    with running([str(files.artifact(n)) for n in names], folders, token="a-token-of-some-length") as opened:
        yield opened


@pytest.fixture(scope="module")
def vectors(files: Files) -> Any:
    with rt.SentenceEncoder(files.folder("encoder"), files.artifact("encoder")) as encoder:
        return encoder.encode(TEXTS)


def tokens_of(server: Server, prompt: list[int], count: int, **options: Any) -> list[int]:
    (row,) = rt.generate(server.models["decoder"], [prompt], max_new_tokens=count, **options)
    return [int(t) for t in row[len(prompt) :]]


def words(tokens: list[int]) -> str:
    return "".join(f" w{t}" for t in tokens)


def test_embeddings_equal_the_results_of_the_encoder(server: Server, vectors: Any) -> None:
    answer = server.ask("/v1/embeddings", {"model": "encoder", "input": TEXTS}).json
    assert [d["index"] for d in answer["data"]] == [0, 1, 2, 3] and answer["model"] == "encoder"
    np.testing.assert_allclose([d["embedding"] for d in answer["data"]], vectors, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > len(TEXTS)
    single = server.ask("/v1/embeddings", {"model": "encoder:1", "input": TEXTS[1], "encoding_format": "base64"}).json
    packed = np.frombuffer(base64.b64decode(single["data"][0]["embedding"]), np.float32)
    np.testing.assert_allclose(packed, vectors[1], atol=1e-5)


def test_embeddings_of_concurrent_clients_equal_single_ones(server: Server, vectors: Any) -> None:
    def send(number: int) -> Any:
        return server.ask("/v1/embeddings", {"model": "encoder", "input": TEXTS[number % 4]}).json["data"][0][
            "embedding"
        ]

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(send, range(32)))
    np.testing.assert_allclose(results, [vectors[n % 4] for n in range(32)], atol=1e-5)


def test_completion_equals_the_text_of_generate(server: Server) -> None:
    body = {"model": "decoder", "prompt": [PROMPT, "w5"], "max_tokens": 6, "temperature": 0}
    answer = server.ask("/v1/completions", body).json
    expected = [words(tokens_of(server, ids, 6)) for ids in ([1, 2, 3], [5])]
    assert [c["text"] for c in answer["choices"]] == expected
    assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    echoed = server.ask("/v1/completions", {**body, "prompt": PROMPT, "echo": True}).json
    assert echoed["choices"][0]["text"] == PROMPT + expected[0]
    ids = server.ask("/v1/completions", {**body, "prompt": [1, 2, 3]}).json
    assert ids["choices"][0]["text"] == expected[0]


def test_stop_string_ends_a_text(server: Server) -> None:
    tokens = tokens_of(server, [1, 2, 3], 6)
    body = {"model": "decoder", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stop": f"w{tokens[2]}"}
    (choice,) = server.ask("/v1/completions", body).json["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"].strip() == words(tokens[:2]).strip()


def test_sampling_follows_the_seed(server: Server) -> None:
    body = {"model": "decoder", "prompt": PROMPT, "max_tokens": 5, "seed": 3, "n": 2, "top_p": 0.9}
    first, second = (server.ask("/v1/completions", body).json["choices"] for _ in range(2))
    assert first == second and len(first) == 2
    options = {"do_sample": True, "seed": 3, "top_p": 0.9, "top_k": 0}
    assert first[0]["text"] == words(tokens_of(server, [1, 2, 3], 5, **options))


def events(server: Server, path: str, body: Any) -> list[Any]:
    answer = server.ask(path, {**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.body.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@pytest.mark.parametrize("chat", [False, True])
def test_stream_is_the_answer_in_parts(server: Server, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    given = {"messages": [{"role": "user", "content": "w1 w2"}]} if chat else {"prompt": [PROMPT, "w4 w5"]}
    body = {"model": "decoder", "max_tokens": 5, "temperature": 0, **given}
    whole = server.ask(path, body).json
    parts = events(server, path, {**body, "stream_options": {"include_usage": True}})
    assert parts[-1]["usage"] == whole["usage"] and parts[-1]["choices"] == []
    assert len({p["id"] for p in parts}) == 1
    for expected in whole["choices"]:
        mine = [c for p in parts for c in p["choices"] if c["index"] == expected["index"]]
        text = "".join(c["delta"].get("content", "") if chat else c["text"] for c in mine)
        assert text == (expected["message"]["content"] if chat else expected["text"])
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [expected["finish_reason"]]
        assert len(mine) > 3
    if chat:
        assert parts[0]["choices"][0]["delta"]["role"] == "assistant"


def test_chat_follows_the_template_of_the_folder(server: Server, files: Files) -> None:
    messages = [
        {"role": "system", "content": " w1 "},
        {"role": "user", "content": [{"type": "text", "text": "w2"}, {"type": "text", "text": " w3"}]},
    ]
    body = {"model": "decoder", "messages": messages, "max_tokens": 4, "temperature": 0}
    (choice,) = server.ask("/v1/chat/completions", body).json["choices"]
    expected = tokens_of(server, [8, 1, 9, 2, 3, 9, 7], 4)
    assert choice["message"] == {"role": "assistant", "content": words(expected)}
    refused = server.ask("/v1/chat/completions", {**body, "messages": [{"role": "tool", "content": "x"}]})
    assert refused.status == 400 and "no tools" in refused.json["error"]["message"]


@pytest.mark.torch
def test_template_renders_as_transformers_does(files: Files) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    pytest.importorskip("jinja2")
    from relax_tune.tuner.serve.texts import ChatTemplate

    folder = files.folder("decoder")
    messages = [{"role": "system", "content": " w1 "}, {"role": "user", "content": "w2 w3"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(folder).render(messages) == expected


def test_template_cannot_reach_python(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    from relax_tune.tuner.serve.tensors import RequestError
    from relax_tune.tuner.serve.texts import ChatTemplate

    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ):
        (tmp_path / "chat_template.jinja").write_text(source)
        with pytest.raises(RequestError, match="messages"):
            ChatTemplate(tmp_path).render([{"role": "user", "content": "x"}])


WRONG: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "an unknown model": ("embeddings", {"model": "absent", "input": "a"}, 404, "absent"),
    "no model": ("embeddings", {"input": "a"}, 400, "model"),
    "no texts": ("embeddings", {"model": "encoder", "input": []}, 400, "input"),
    "texts of another kind": ("embeddings", {"model": "encoder", "input": [1.5]}, 400, "input"),
    "a text that is too long": ("embeddings", {"model": "encoder", "input": "cat " * 99}, 400, "32"),
    "tokens that are too many": ("embeddings", {"model": "encoder", "input": [2] * 33}, 400, "32"),
    "a token beyond the table": ("embeddings", {"model": "encoder", "input": [999]}, 400, "999"),
    "another form": ("embeddings", {"model": "encoder", "input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    "other dimensions": ("embeddings", {"model": "encoder", "input": "a", "dimensions": 8}, 400, "dimensions"),
    "a decoder": ("embeddings", {"model": "decoder", "input": "a"}, 400, "encoder"),
    "an encoder": ("completions", {"model": "encoder", "prompt": "a"}, 400, "decoder"),
    "no prompt": ("completions", {"model": "decoder"}, 400, "prompt"),
    "an empty prompt": ("completions", {"model": "decoder", "prompt": ""}, 400, "token"),
    "a prompt that is too long": ("completions", {"model": "decoder", "prompt": "w1 " * 99}, 400, "prompt"),
    "a prompt beyond a bound": ("completions", {"model": "decoder", "prompt": "w1 " * 20}, 400, "16"),
    "a token of no word": ("completions", {"model": "decoder", "prompt": [9999]}, 400, "9999"),
    "another temperature": ("completions", {"model": "decoder", "prompt": "w1", "temperature": 3}, 400, "temperature"),
    "a negative count": ("completions", {"model": "decoder", "prompt": "w1", "max_tokens": -1}, 400, "max_new_tokens"),
    "too many texts": ("completions", {"model": "decoder", "prompt": "w1", "n": 999}, 400, "n:"),
    "logprobs": ("completions", {"model": "decoder", "prompt": "w1", "logprobs": 2}, 400, "logprobs"),
    "penalties": ("completions", {"model": "decoder", "prompt": "w1", "presence_penalty": 1}, 400, "presence_penalty"),
    "stops of another kind": ("completions", {"model": "decoder", "prompt": "w1", "stop": 3}, 400, "stop"),
    "a stream of another kind": ("completions", {"model": "decoder", "prompt": "w1", "stream": "yes"}, 400, "stream"),
    "no messages": ("chat/completions", {"model": "decoder", "messages": []}, 400, "messages"),
    "an image": ("chat/completions", {"model": "decoder", "messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "content"),
    "tools": ("chat/completions", {"model": "decoder", "messages": [{"role": "user", "content": "w1"}], "tools": [{}]}, 400, "tools"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_request_is_answered_in_the_form_of_openai(server: Server, name: str) -> None:
    path, body, status, reason = WRONG[name]
    answer = server.ask(f"/v1/{path}", body)
    assert answer.status == status, answer.body
    assert reason in answer.json["error"]["message"] and answer.json["error"]["type"] == "invalid_request_error"


def test_stream_of_a_refused_prompt_is_an_error(server: Server) -> None:
    body = {"model": "decoder", "prompt": [9999], "stream": True}
    answer = server.ask("/v1/completions", body)
    assert answer.status == 400 and "9999" in answer.json["error"]["message"]
    assert server.serving.active == 0


def test_disconnecting_client_ends_the_stream(server: Server) -> None:
    body = {"model": "decoder", "prompt": "w1", "max_tokens": 30, "temperature": 0, "n": 1, "stream": True}
    labels = {"model": "decoder", "version": "1"}
    before = server.metric("requests_total", endpoint="completions", status="499", **labels)
    for _ in range(8):  # a stream may end before its client is gone
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        headers = {"Authorization": f"Bearer {server.token}"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.read(20)
        connection.sock and connection.sock.close()
        response.close()
        connection.close()
    end = time.monotonic() + 30
    while server.serving.active:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert server.metric("requests_total", endpoint="completions", status="499", **labels) > before
    assert server.ask("/v1/completions", {**body, "stream": False}).status == 200


# Clients that others wrote.


def test_openai_client_embeds_completes_and_streams(server: Server, vectors: Any) -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed (extra dev)")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.token, max_retries=0)
    assert [m.id for m in client.models.list()] == ["decoder", "dense", "encoder"]
    embedded = client.embeddings.create(model="encoder", input=TEXTS)
    np.testing.assert_allclose([d.embedding for d in embedded.data], vectors, atol=1e-5)
    options = {"model": "decoder", "max_tokens": 5, "temperature": 0}
    expected = words(tokens_of(server, [1, 2, 3], 5))
    assert client.completions.create(prompt=PROMPT, **options).choices[0].text == expected
    parts = list(client.completions.create(prompt=PROMPT, stream=True, **options))
    assert "".join(p.choices[0].text for p in parts) == expected and len(parts) == 5
    messages = [{"role": "user", "content": "w1 w2"}]
    whole = client.chat.completions.create(messages=messages, **options).choices[0].message.content
    stream = client.chat.completions.create(messages=messages, stream=True, **options)
    assert "".join(p.choices[0].delta.content or "" for p in stream) == whole
    with pytest.raises(openai.NotFoundError, match="absent"):
        client.embeddings.create(model="absent", input="a")
    with pytest.raises(openai.BadRequestError, match="32"):
        client.embeddings.create(model="encoder", input="cat " * 99)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_triton_client_infers_with_json_and_bytes(server: Server, files: Files) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed (extra dev)")
    client = triton.InferenceServerClient(server.url.removeprefix("http://"), concurrency=8)
    bearer = lambda: {"Authorization": f"Bearer {server.token}"}  # the client writes into it
    assert client.is_server_live() and client.is_server_ready()
    assert client.get_model_metadata("encoder", headers=bearer())["inputs"][0]["shape"] == [-1, -1]
    assert client.is_model_ready("encoder", headers=bearer()) and not client.is_model_ready("absent", headers=bearer())
    ids = np.array([[2, 5, 7, 3], [2, 4, 4, 3]], np.int64)
    (expected,) = server.models["encoder"].run([ids, np.ones_like(ids)])

    def inputs(binary: bool) -> list[Any]:
        made = [triton.InferInput(name, ids.shape, "INT64") for name in ("input_ids", "attention_mask")]
        for given, array in zip(made, (ids, np.ones_like(ids))):
            given.set_data_from_numpy(array, binary_data=binary)
        return made

    for binary_in in (False, True):
        for binary_out in (False, True):
            outputs = [triton.InferRequestedOutput("sentence_embedding", binary_data=binary_out)]
            result = client.infer("encoder", inputs(binary_in), outputs=outputs, headers=bearer(), request_id="9")
            np.testing.assert_allclose(result.as_numpy("sentence_embedding"), expected, atol=1e-5)
            assert result.get_response()["id"] == "9"
    waiting = [client.async_infer("encoder", inputs(True), headers=bearer()) for _ in range(16)]
    for request in waiting:
        np.testing.assert_allclose(request.get_result().as_numpy("sentence_embedding"), expected, atol=1e-5)
    with pytest.raises(triton.InferenceServerException, match="input_ids"):
        client.infer("encoder", inputs(True)[1:], headers=bearer())
    client.close()
