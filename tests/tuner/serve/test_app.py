"""The Open Inference Protocol over HTTP: tensors, errors, limits, batches of concurrent requests."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.tuner.serve.served import TYPES, Files, Server, infer_body, running, tensor, text_body

from relax_tune.errors import UserError

pytestmark = pytest.mark.ccompiler
IDS = [[2, 5, 7, 3], [2, 4, 4, 3]]
INFER = "/v2/models/encoder/infer"


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[Server]:
    artifacts = [str(files.artifact(n)) for n in ("encoder", "dense", "types", "mixing", "picking")]
    second = f"encoder:2={files.artifact('other')}"
    folder = files.folder("encoder")
    with running([*artifacts, second], [f"encoder={folder}"], ["picking=b"]) as opened:
        yield opened


def test_metadata_names_types_and_symbolic_dims(server: Server) -> None:
    assert server.ask("/v2").json["extensions"] == ["binary_tensor_data"]
    answer = server.ask("/v2/models/encoder/versions/1").json
    assert answer["versions"] == ["1", "2"] and answer["platform"] == "relax_tune_c"
    assert answer["inputs"][0] == {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}
    assert answer["outputs"] == [{"name": "sentence_embedding", "datatype": "FP32", "shape": [-1, 32]}]
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/encoder/ready",
        "/v2/models/encoder/versions/2/ready",
    ):
        assert server.ask(path).status == 200
    for path in (
        "/v2/models/absent",
        "/v2/models/encoder/versions/3",
        "/v2/models/encoder/versions/x/ready",
        "/nothing",
    ):
        answer_ = server.ask(path)
        assert answer_.status == 404 and answer_.json["error"]


def test_json_request_gives_the_results_of_the_model(server: Server) -> None:
    (expected,) = server.models["encoder"].run([np.array(IDS), np.ones((2, 4), np.int64)])
    body = text_body(IDS)
    flat = text_body(IDS)
    for given in flat["inputs"]:
        given["data"] = np.ravel(given["data"]).tolist()
    for sent in (body, flat):
        answer = server.ask("/v2/models/encoder/versions/1/infer", {**sent, "id": "7"})
        assert answer.status == 200 and (answer.json["id"], answer.json["model_version"]) == ("7", "1")
        (output,) = answer.json["outputs"]
        assert (output["datatype"], output["shape"]) == ("FP32", [2, 32])
        np.testing.assert_allclose(np.reshape(output["data"], (2, 32)), expected, atol=1e-5)


def test_each_version_is_another_model_and_the_last_is_the_default(server: Server) -> None:
    results = {}
    for path in ("", "/versions/1", "/versions/2"):
        results[path] = server.ask(f"/v2/models/encoder{path}/infer", text_body(IDS)).json
    assert [results[p]["model_version"] for p in results] == ["2", "1", "2"]
    assert results[""]["outputs"] == results["/versions/2"]["outputs"] != results["/versions/1"]["outputs"]


def elements(name: str) -> np.ndarray[Any, Any]:
    dtype = TYPES[name][1].numpy
    values = [[0, 1], [1, 0], [1, 1]] if name == "flags" else [[0, 1], [3, 50], [7, 2]]
    return np.array(values).astype(dtype)


@pytest.mark.parametrize("binary", [False, True])
def test_tensors_of_every_type_pass_as_json_and_as_bytes(server: Server, binary: bool) -> None:
    inputs, parts = [], []
    for name, (datatype, _) in TYPES.items():
        array = elements(name)
        given = tensor(name, datatype, array.astype(np.float64) if datatype == "BF16" else array)
        if binary:
            del given["data"]
            parts.append(array.tobytes())
            given["parameters"] = {"binary_data_size": len(parts[-1])}
        inputs.append(given)
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": binary}}).encode()
    header = {"Inference-Header-Content-Length": str(len(text))} if binary else {}
    answer = server.ask("/v2/models/types/infer", b"".join([text, *parts]), headers=header)
    assert answer.status == 200, answer.body
    size = int(answer.headers["inference-header-content-length"]) if binary else len(answer.body)
    outputs, rest = json.loads(answer.body[:size])["outputs"], answer.body[size:]
    assert len(outputs) == len(TYPES)
    for output, (name, (datatype, dtype)) in zip(outputs, TYPES.items(), strict=True):
        expected = elements(name).astype(np.int64) if name == "flags" else elements(name) + elements(name)
        assert output["datatype"] == ("INT64" if name == "flags" else datatype)
        if binary:
            count = output["parameters"]["binary_data_size"]
            actual = np.frombuffer(rest[:count], np.int64 if name == "flags" else dtype.numpy).reshape(3, 2)
            rest = rest[count:]
        else:
            actual = np.reshape(output["data"], (3, 2))
        np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))
    assert rest == b""


def test_outputs_are_chosen_by_name(server: Server) -> None:
    tensors = [tensor(n, d, elements(n).astype(float) if d == "BF16" else elements(n)) for n, (d, _) in TYPES.items()]
    names = [o["name"] for o in server.ask("/v2/models/types").json["outputs"]]
    outputs = [{"name": names[4]}, {"name": names[0], "parameters": {"binary_data": True}}]
    answer = server.ask("/v2/models/types/infer", infer_body(*tensors, outputs=outputs))
    size = int(answer.headers["inference-header-content-length"])
    assert [o["name"] for o in json.loads(answer.body[:size])["outputs"]] == [names[4], names[0]]
    assert len(answer.body) == size + 6 * 8
    wrong = server.ask("/v2/models/types/infer", infer_body(*tensors, outputs=[{"name": "absent"}]))
    assert wrong.status == 400 and "absent" in wrong.json["error"]


def changed(**fields: Any) -> dict[str, Any]:
    """The body of a good request with another first input."""
    body = text_body(IDS)
    body["inputs"][0] = {k: v for k, v in {**body["inputs"][0], **fields}.items() if v is not None}
    return body


MALFORMED: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "JSON"),
    "no object": (b"[]", "object"),
    "deep JSON": (b"[" * 100_000, "JSON"),
    "bytes": (b"\xff\xfe\x00", "JSON"),
    "no inputs": ({}, "inputs"),
    "inputs of another kind": ({"inputs": 3}, "inputs"),
    "an input of another kind": ({"inputs": [3]}, "inputs[0]"),
    "an unknown input": (changed(name="ids"), "input_ids"),
    "a missing input": ({"inputs": text_body(IDS)["inputs"][:1]}, "attention_mask"),
    "an input twice": ({"inputs": text_body(IDS)["inputs"][:1] * 2}, "twice"),
    "another datatype": (changed(datatype="FP32"), "INT64"),
    "no datatype": (changed(datatype=None), "INT64"),
    "another rank": (changed(shape=[8]), "2 dims"),
    "a negative dim": (changed(shape=[2, -4]), "shape"),
    "a huge dim": (changed(shape=[2, 1 << 60]), "shape"),
    "a dim of another kind": (changed(shape=[2, True]), "shape"),
    "too few elements": (changed(data=[1, 2]), "[2, 4]"),
    "lists of unequal length": (changed(data=[[1, 2, 3], [1]]), "unequal"),
    "texts": (changed(data=[["a", "b", "c", "d"]] * 2), "INT64"),
    "fractions": (changed(data=[[1.5, 2, 3, 4]] * 2), "INT64"),
    "truth values": (changed(data=[[True] * 4] * 2), "INT64"),
    "null": (changed(data=[[None] * 4] * 2), "INT64"),
    "an integer beyond its type": (changed(data=[[1 << 63, 2, 3, 4]] * 2), "9223372036854775808"),
    "no data": (changed(data=None), "data"),
    "dims that differ": (changed(shape=[2, 3], data=[[1, 2, 3]] * 2), "dim"),
    "beyond a bound": (text_body([[1] * 33]), "32"),
    "an index beyond the table": (text_body([[999]]), "999"),
    "no rows": (changed(shape=[0, 4], data=[]), "dim"),
    "binary_data_size without bytes": (changed(data=None, parameters={"binary_data_size": 64}), "64 bytes"),
    "another binary_data_size": (changed(data=None, parameters={"binary_data_size": 63}), "64"),
    "data and binary_data_size": (changed(parameters={"binary_data_size": 64}), "both"),
    "shared memory": (changed(parameters={"shared_memory_region": "x"}), "shared_memory_region"),
    "another timeout": ({**text_body(IDS), "parameters": {"timeout": "soon"}}, "timeout"),
    "another id": ({**text_body(IDS), "id": 7}, "id"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_request_is_answered_with_the_reason(server: Server, name: str) -> None:
    body, reason = MALFORMED[name]
    answer = server.ask(INFER, body)
    assert answer.status == 400 and reason in answer.json["error"], answer.body
    assert server.ask(INFER, text_body(IDS)).status == 200


@pytest.mark.parametrize("length", ["-1", "x", "999999", "1" * 5000])
def test_malformed_header_length_is_refused(server: Server, length: str) -> None:
    answer = server.ask(INFER, text_body(IDS), headers={"Inference-Header-Content-Length": length})
    assert answer.status == 400 and "Inference-Header" in answer.json["error"]


def test_bools_as_bytes_are_0_or_1(server: Server) -> None:
    tensors = [tensor(n, d, elements(n).astype(float) if d == "BF16" else elements(n)) for n, (d, _) in TYPES.items()]
    del tensors[0]["data"]
    tensors[0]["parameters"] = {"binary_data_size": 6}
    text = json.dumps(infer_body(*tensors)).encode()
    for last, status in ((1, 200), (2, 400)):
        header = {"Inference-Header-Content-Length": str(len(text))}
        assert (
            server.ask("/v2/models/types/infer", text + bytes([0, 1, 0, 0, 1, last]), headers=header).status == status
        )


def test_infinite_results_are_refused_as_json_and_pass_as_bytes(server: Server) -> None:
    x = np.full((1, 4), 3e38, np.float32)
    body = infer_body(tensor("x", "FP32", x))
    answer = server.ask("/v2/models/mixing/infer", body)
    assert answer.status == 400 and "binary_data" in answer.json["error"]
    answer = server.ask("/v2/models/mixing/infer", {**body, "parameters": {"binary_data_output": True}})
    assert answer.status == 200 and np.isinf(np.frombuffer(answer.body[-16:], np.float32)).all()


def test_methods_encodings_and_pages_of_other_sites_are_refused(server: Server) -> None:
    assert server.ask(INFER, text_body(IDS), method="PUT").status == 405
    assert server.ask(INFER).status == 405
    large = bytes(8 << 20)  # the client sees the answer although its body is not used
    assert server.ask("/v2/models/absent/infer", large).status == 404
    packed = gzip.compress(json.dumps(text_body(IDS)).encode())
    assert server.ask(INFER, packed, headers={"Content-Encoding": "gzip"}).status == 415
    for headers in ({"Origin": "https://example.com"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "example.com"}):
        assert server.ask(INFER, text_body(IDS), headers=headers).status in (403, 421)
    assert server.ask(INFER, text_body(IDS), headers={"Origin": server.url}).status == 200


def test_only_proved_declared_and_masked_rows_are_joined(server: Server, files: Files) -> None:
    functions = {m.labels: m.functions[m.name].joining for m in server.serving.repository.models}
    joined = {labels: None if j is None else j.padded for labels, j in functions.items() if j is not None}
    assert joined == {
        ("encoder", "1"): 1,
        ("encoder", "2"): 1,
        ("dense", "1"): None,
        ("types", "1"): None,
        ("picking", "1"): None,
    }
    assert functions["mixing", "1"] is None
    with (
        pytest.raises(UserError, match="independent rows along b"),
        running([str(files.artifact("mixing"))], rows=["b"]),
    ):
        pass
    with pytest.raises(UserError, match="symbols"), running([str(files.artifact("dense"))], rows=["rows"]):
        pass


def free_batches(server: Server, name: str, version: int = 1) -> None:
    """Let all shapes seem to cost the same, so that whatever waits runs together."""
    times = server.serving.repository.by_name[name][version].functions[name].times
    for _ in range(30):
        for rows in times.rows:
            for length in times.lengths:
                times.add(rows, length, 2e-3)


def together(count: int, send: Any) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(send, range(count)))


def test_concurrent_requests_get_the_results_of_single_calls(server: Server) -> None:
    """Texts of many lengths and two models at once, some of them wrong."""
    generator = np.random.default_rng(3)
    texts = [
        generator.integers(1, 16, (int(generator.integers(1, 3)), int(generator.integers(1, 33)))) for _ in range(48)
    ]
    free_batches(server, "encoder")
    free_batches(server, "dense")
    rows = [generator.standard_normal((int(generator.integers(1, 4)), 4)).astype(np.float32) for _ in range(48)]
    before = server.metric("batch_requests_count", model="encoder", version="1")

    def send(number: int) -> Any:
        text = server.ask("/v2/models/encoder/versions/1/infer", text_body(texts[number]))
        wrong = server.ask(INFER, text_body([[999]])) if number % 3 == 0 else None
        dense = server.ask("/v2/models/dense/infer", infer_body(tensor("x", "FP32", rows[number])))
        return text, wrong, dense

    answers = together(48, send)
    for ids, x, (text, wrong, dense) in zip(texts, rows, answers, strict=True):
        (expected,) = server.models["encoder"].run([ids, np.ones_like(ids)])
        np.testing.assert_allclose(np.reshape(text.json["outputs"][0]["data"], expected.shape), expected, atol=1e-5)
        assert wrong is None or wrong.status == 400
        (expected,) = server.models["dense"].run([x])
        np.testing.assert_allclose(np.reshape(dense.json["outputs"][0]["data"], expected.shape), expected, atol=1e-4)
    assert server.metric("batch_requests_count", model="encoder", version="1") - before < 48, "some ran together"


def test_failure_in_a_batch_fails_one_request_only(server: Server) -> None:
    free_batches(server, "picking")
    path = "/v2/models/picking/infer"
    answers = together(24, lambda n: server.ask(path, infer_body(tensor("ids", "INT64", [2 if n % 4 else 3]))))
    assert [a.status for a in answers] == [200 if n % 4 else 400 for n in range(24)]
    assert all(a.json["outputs"][0]["data"] == [8, 9] for a in answers if a.status == 200)


def test_metrics_count_requests_and_batches(server: Server) -> None:
    server.ask(INFER, text_body(IDS))
    text = server.ask("/metrics").body.decode()
    assert 'relax_tune_serve_requests_total{endpoint="infer",model="encoder",status="200",version="2"}' in text
    for name in (
        "request_seconds_bucket",
        "batch_requests_sum",
        "device_seconds_total",
        "waiting",
        "active",
        "rows_total",
    ):
        assert f"relax_tune_serve_{name}" in text


def test_token_is_required_but_for_health(files: Files) -> None:
    with running([str(files.artifact("dense"))], token="a-token-of-some-length") as guarded:
        body = infer_body(tensor("x", "FP32", np.ones((1, 4))))
        assert guarded.ask("/v2/models/dense/infer", body).status == 200
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
            assert guarded.ask("/v2/models/dense/infer", body, headers=headers).status == 401
            assert guarded.ask("/metrics", headers=headers).status == 401
            assert (
                guarded.ask("/v2/models/dense/infer?token=a-token-of-some-length", body, headers=headers).status == 401
            )
            assert guarded.ask("/v2/health/ready", headers=headers).status == 200


# ServerLimits, on a model that takes a while.


def long_body(rows: int, **more: Any) -> tuple[bytes, dict[str, str]]:
    text = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [rows, 512], "parameters": {"binary_data_size": rows * 2048}}
            ],
            **more,
        }
    ).encode()
    return text + bytes(rows * 2048), {"Inference-Header-Content-Length": str(len(text))}


@pytest.fixture(scope="module")
def limited(files: Files) -> Iterator[tuple[Server, int]]:
    """A server that takes two requests at a time, and rows that take it about a second."""
    with running([str(files.artifact("slow"))], active=2, body_bytes=64 << 20, bound_secs=0.01) as opened:
        body, headers = long_body(256)
        start = time.monotonic()
        assert opened.ask("/v2/models/slow/infer", body, headers=headers).status == 200
        secs = time.monotonic() - start
        yield opened, int(min(max(256 / secs, 64), 16384))


def wait_for(condition: Any, secs: float = 30) -> None:
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_too_large_body_is_refused_before_reading(limited: tuple[Server, int]) -> None:
    server, _ = limited
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("POST", "/v2/models/slow/infer")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    chunks = (bytes(1 << 20) for _ in range(100))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(
            "POST", "/v2/models/slow/infer", chunks, encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
        )
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has answered and closed while the client still writes
    connection.close()
    wait_for(lambda: server.serving.active == 0)


def test_requests_beyond_the_limit_are_refused_for_now(limited: tuple[Server, int]) -> None:
    server, rows = limited
    body, headers = long_body(rows)
    with ThreadPoolExecutor(2) as pool:
        running_ = [pool.submit(server.ask, "/v2/models/slow/infer", body, None, headers) for _ in range(2)]
        wait_for(lambda: server.serving.active == 2)
        answer = server.ask("/v2/models/slow/infer", body, headers=headers)
        assert answer.status == 503 and answer.headers["retry-after"] == "1" and "limit" in answer.json["error"]
        assert server.ask("/v2/health/live").status == 200
        assert [r.result().status for r in running_] == [200, 200]


def test_expired_request_does_not_run(limited: tuple[Server, int]) -> None:
    server, rows = limited
    body, headers = long_body(rows)
    short, short_headers = long_body(1, parameters={"timeout": 50_000})
    labels = {"model": "slow", "version": "1"}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.ask, "/v2/models/slow/infer", body, None, headers)
        wait_for(lambda: server.serving.active == 1)
        time.sleep(0.1)
        before = server.metric("rows_total", **labels)
        answer = server.ask("/v2/models/slow/infer", short, headers=short_headers)
        assert answer.status == 504
        assert first.result().status == 200
    wait_for(lambda: server.metric("rows_total", **labels) == before + rows)
    assert server.metric("waiting", **labels) == 0


def test_disconnecting_client_removes_the_waiting_request(limited: tuple[Server, int]) -> None:
    server, rows = limited
    body, headers = long_body(rows)
    labels = {"model": "slow", "version": "1"}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.ask, "/v2/models/slow/infer", body, None, headers)
        wait_for(lambda: server.serving.active == 1)
        time.sleep(0.1)
        before = server.metric("rows_total", **labels)
        short, short_headers = long_body(1)
        leaving = socket.create_connection(("127.0.0.1", server.port))
        lines = [f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(short)}"]
        lines += [f"{k}: {v}" for k, v in short_headers.items()]
        leaving.sendall("\r\n".join([*lines, "", ""]).encode() + short)
        wait_for(lambda: server.metric("waiting", **labels) == 1)
        leaving.close()
        wait_for(lambda: server.metric("waiting", **labels) == 0)
        assert not first.done()
        assert first.result().status == 200
    wait_for(lambda: server.metric("rows_total", **labels) == before + rows)
    assert server.metric("requests_total", endpoint="infer", status="499", **labels) == 1


def test_slow_body_is_given_up(files: Files) -> None:
    with running([str(files.artifact("dense"))], timeout_secs=0.3) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.putrequest("POST", "/v2/models/dense/infer")
        connection.putheader("Content-Length", "100")
        connection.endheaders()
        connection.send(b"{")
        assert connection.getresponse().status == 408
        connection.close()
