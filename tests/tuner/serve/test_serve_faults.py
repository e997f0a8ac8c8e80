"""The server under hostile and slow clients, many connections, few file descriptors, and bodies of any content."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.effort import examples
from tests.tuner.serve.served import TYPES, Files, Server, ask, infer_body, running, tensor
from tests.tuner.serve.test_serve_command import command

from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.serve.connections import TimedConnection
from relax_tune.tuner.serve.tensors import HEADER, RequestError, read_request

pytestmark = [pytest.mark.ccompiler]
ONE_ROW = infer_body(tensor("x", "FP32", np.ones((1, 4))))
PATH = "/v2/models/dense/infer"


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[Server]:
    with running([str(files.artifact("dense")), str(files.artifact("types"))], body_secs=0.5) as opened:
        yield opened


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedConnection, "head_secs", 0.5)
    monkeypatch.setattr(TimedConnection, "read_secs", 0.5)


def connected(server: Server, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    client.sendall(sent)
    return client


def answers(server: Server) -> bool:
    return server.ask(PATH, ONE_ROW).status == 200


def is_closed(client: socket.socket) -> bool:
    """Whether the server closes a connection, within the socket's timeout."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("sent", [b"", b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\n"], ids=["nothing", "half a head"])
def test_connection_without_a_head_is_closed(server: Server, short_times: None, sent: bytes) -> None:
    with connected(server, sent) as client:
        assert is_closed(client)


def test_trickling_heads_leave_the_server_responsive(server: Server, short_times: None) -> None:
    ended = threading.Event()
    closed = [0]

    def trickle() -> None:
        with connected(server, b"GET /v2 HTTP/1.1\r\nX: ") as client, contextlib.suppress(OSError):
            while not ended.is_set():
                client.sendall(b"y")
                time.sleep(0.02)
            return
        closed[0] += 1

    threads = [threading.Thread(target=trickle) for _ in range(20)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    while closed[0] < len(threads):
        assert answers(server) and time.monotonic() < end
    ended.set()
    for thread in threads:
        thread.join()


def test_trickling_head_after_an_answer_is_closed(server: Server, short_times: None) -> None:
    with connected(server, b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as client:
        assert b" 200 " in client.recv(1 << 16)
        with contextlib.suppress(OSError):
            for _ in range(200):
                client.sendall(b"G")
                time.sleep(0.02)
        assert is_closed(client)


def test_slow_bodies_free_places_of_requests(server: Server) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{{".encode()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server, head)) for _ in range(256)]
        end = time.monotonic() + 20
        while server.serving.active < 200:
            assert time.monotonic() < end
            time.sleep(0.01)
        start = time.monotonic()
        while not answers(server):
            time.sleep(0.05)
        assert time.monotonic() - start < 15
        assert b" 408 " in clients[0].recv(1 << 16)


def test_large_body_at_the_least_rate_is_read(server: Server) -> None:
    body = json.dumps({**ONE_ROW, "id": "x"}).encode() + b" " * (3 << 20)
    with connected(
        server, f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    ) as client:
        for at in range(0, len(body), 1 << 19):
            client.sendall(body[at : at + (1 << 19)])
            time.sleep(0.15)  # 1 s in all, beyond `body_secs`
        assert b" 200 " in client.recv(1 << 16)


def test_connection_of_a_client_without_reads_is_closed(server: Server, short_times: None) -> None:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30)
    client.connect(("127.0.0.1", server.port))
    with client, contextlib.suppress(OSError):
        while True:  # until the server has closed the connection
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100)
    assert answers(server) and server.serving.active == 0


def test_hundreds_of_idle_connections_leave_the_server_responsive(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(400)]
        assert answers(server)
        for client in clients[::50]:
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b" 200 " in client.recv(1 << 16)
    assert answers(server)


@pytest.mark.process
@pytest.mark.slow
def test_server_without_file_descriptors_recovers(files: Files) -> None:
    limit = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 80)); "
        "sys.argv = ['relax-tune', *sys.argv[1:]]; runpy.run_module('relax_tune', run_name='__main__')"
    )
    with command([str(files.artifact("dense")), "--no-token"], ["-c", limit]) as process:
        clients = [socket.create_connection(("127.0.0.1", process.port), timeout=30) for _ in range(120)]
        time.sleep(0.5)
        for client in clients:
            client.close()
        start = time.monotonic()
        assert ask(process.port, PATH, ONE_ROW).status == 200
        assert time.monotonic() - start < 20


@given(data=st.binary(max_size=400))
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_connection_of_any_bytes_harms_no_other(server: Server, data: bytes) -> None:
    with connected(server) as client, contextlib.suppress(OSError):
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        is_closed(client)
    assert server.ask("/v2/health/live").status == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from([*TYPES, "x", ""]) | JSON,
        "datatype": st.sampled_from(["FP32", "INT64", "BOOL", "BYTES", "BF16"]) | JSON,
        "shape": st.lists(st.integers(-2, 1 << 40), max_size=3) | JSON,
        "data": st.lists(st.integers(-(1 << 70), 1 << 70) | st.floats() | st.lists(st.floats(), max_size=3), max_size=5)
        | JSON,
        "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-5, 1 << 65)}) | JSON,
    },
)
REQUESTS = (
    st.fixed_dictionaries(
        {"inputs": st.lists(TENSORS, max_size=9) | JSON},
        optional={
            "id": JSON,
            "parameters": st.fixed_dictionaries({}, optional={"timeout": JSON, "binary_data_output": JSON}) | JSON,
            "outputs": st.lists(st.fixed_dictionaries({}, optional={"name": JSON, "parameters": JSON}), max_size=3)
            | JSON,
        },
    )
    | JSON
)
LENGTHS = st.none() | st.integers(-5, 500).map(str) | st.text(max_size=6)


@given(document=REQUESTS, rest=st.binary(max_size=80), length=LENGTHS, cut=st.integers(0, 40))
@settings(
    max_examples=examples(1000), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_body_of_any_content_is_read_or_refused(
    files: Files, document: Any, rest: bytes, length: str | None, cut: int
) -> None:
    specs = load_artifact(files.artifact("types")).inputs
    text = json.dumps(document).encode()
    for body, header in ((text + rest, str(len(text))), (text[: len(text) - cut], length), (text + rest, length)):
        with contextlib.suppress(RequestError):
            read_request(body, header, specs)


@given(document=REQUESTS, rest=st.binary(max_size=80), binary=st.booleans(), path=st.sampled_from(["dense", "types"]))
@settings(max_examples=examples(500), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_request_of_any_content_is_answered_with_a_reason(
    server: Server, document: Any, rest: bytes, binary: bool, path: str
) -> None:
    text = json.dumps(document).encode()
    headers = {HEADER: str(len(text))} if binary else {}
    answer = server.ask(f"/v2/models/{path}/infer", text + rest if binary else text, headers=headers)
    assert answer.status == 200 or (400 <= answer.status < 500 and answer.json["error"]), answer


@given(
    document=JSON | st.fixed_dictionaries({"model": st.just("dense"), "input": JSON, "messages": JSON, "prompt": JSON})
)
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_openai_request_of_any_content_is_answered_with_a_reason(server: Server, document: Any) -> None:
    for path in ("/v1/embeddings", "/v1/completions", "/v1/chat/completions"):
        answer = server.ask(path, document if document is not None else b"null")
        assert 400 <= answer.status < 500 and answer.json["error"]["message"], answer
