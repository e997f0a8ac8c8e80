"""A runner on a page: who is let in, what a page may say, and what its end costs. The page speaks over a real WebSocket."""

from __future__ import annotations

import json
import math
import re
import socket
import ssl
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("tornado", reason="tornado is not installed (extra browser)")

from tests.support.tuner_models import feed_forward
from tests.tuner.measure.browser.fake_page import AGENT, FACTS, LIMITS, FakePage, Frame, frame
from tests.tuner.measure.browser.tabs import Tabs, runner_of
from tests.tuner.measure.measure_programs import LIMIT_SECS, check, program, request

from relax_tune.errors import FleetUnavailable, MeasureError, UserError
from relax_tune.ir.frontend.text import save_text
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.measure.browser import device
from relax_tune.tuner.measure.browser.address import parse_place, self_signed_certificate, server_tls
from relax_tune.tuner.measure.browser.protocol import CHUNK, MOST_JSON, Refusal, read_message, read_ready
from relax_tune.tuner.measure.browser.runner import BrowserRunner
from relax_tune.tuner.measure.browser.tokens import Tokens
from relax_tune.tuner.measure.messages import MeasureRequest

good = partial(request, "good", "webgpu")


@pytest.fixture
def tabs() -> Tabs:
    return Tabs()


@pytest.fixture
def runner(tabs: Tabs) -> Iterator[BrowserRunner]:
    with runner_of(tabs) as opened:
        yield opened


def measured(runner: BrowserRunner, *batch: MeasureRequest) -> list[str]:
    return [result.stage or "ok" for result in runner.submit(batch).result(LIMIT_SECS)]


def test_device_is_named_by_adapter_and_browser(runner: BrowserRunner) -> None:
    info = runner.device_info()
    fingerprint, limits = dict(info.fingerprint), dict(info.limits)
    assert (info.kind, info.name) == ("webgpu", "acme road in Chrome 140")
    assert fingerprint["agent"] == AGENT and fingerprint["platform"] == "browser"
    assert fingerprint["timer"] == "timestamp-query" and fingerprint["adapter"] == "GPU"
    assert limits["max_group_size"] == 256 and limits["warp"] == 32
    assert "wgpu" not in fingerprint, "no native device has this fingerprint"


def test_times_of_page_are_per_launch(runner: BrowserRunner) -> None:
    (result,) = runner.submit([good()]).result(LIMIT_SECS)
    for timing in result.timings:
        assert timing.launches_per_sample > 64, "a browser's coarse timer takes many launches a sample"
        assert timing.samples_secs == pytest.approx([2e-6] * len(timing.samples_secs))


def test_arrays_travel_once(tabs: Tabs, runner: BrowserRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_LEAST_CACHED", 1024)
    monkeypatch.setattr(device, "_MOST_CACHED", 2)
    assert measured(runner, good()) == ["ok"]
    asked = tabs.pages[0].asked
    first = asked.count("write")
    assert "forget" in asked and "again" not in asked, "two arrays are kept, of three"
    monkeypatch.setattr(device, "_MOST_CACHED", 64)
    for _ in range(2):
        asked.clear()
        assert measured(runner, good()) == ["ok"]
    assert asked.count("again") == 3 and asked.count("write") + asked.count("again") == first - 1


# Tokens.


def test_token_is_good_once_and_expires() -> None:
    now = [0.0]
    tokens = Tokens(lambda: now[0])
    first, second = tokens.issue(10), tokens.issue(10)
    assert len(first) >= 43 and first != second
    tokens.redeem(first)
    with pytest.raises(Refusal, match="used already; open the address"):
        tokens.redeem(first)
    now[0] = 11
    with pytest.raises(Refusal, match="got one that is expired"):
        tokens.redeem(second)
    with pytest.raises(Refusal, match="unknown to this job"):
        tokens.redeem("guess")
    lasting = tokens.issue(None)
    now[0] = 1e9
    tokens.expire(lasting, 5)
    assert tokens.good(lasting)
    now[0] += 6
    assert not tokens.good(lasting)


def test_expired_token_is_not_made_valid_again() -> None:
    """The token of a page that was cut off is limited once more when its connection closes."""
    tokens = Tokens()
    token = tokens.issue(None)
    tokens.expire(token, 0)
    tokens.expire(token, 600)
    with pytest.raises(Refusal, match="expired"):
        tokens.redeem(token)


def test_wrong_and_replayed_tokens_are_refused_and_lose_nothing(tabs: Tabs, runner: BrowserRunner) -> None:
    running = runner.submit([good(id=str(number)) for number in range(4)])
    for token, why in (("wrong", "unknown to this job"), (None, "used already")):
        stranger = FakePage(tabs.addresses[0], token=token)
        assert stranger.ended.result(LIMIT_SECS) == (
            f"expected the token of a new address, got one that is {why}; open the address that the job prints now"
        )
        assert not stranger.asked
    assert [result.ok for result in running.result(LIMIT_SECS)] == [True] * 4
    assert len(tabs.addresses) == 1 and not tabs.pages[0].ended.done()


@pytest.mark.parametrize(
    "first",
    [
        json.dumps({"kind": "ready"}),
        "no json",
        "[]",
        json.dumps({"kind": "join", "protocol": 0, "token": "x"}),
        json.dumps({"kind": "join", "protocol": 1, "token": 7}),
        json.dumps({"kind": "join", "protocol": 1, "token": "x" * 201}),
        b"\xff\xff\xff\xff{}",
    ],
)
def test_first_message_other_than_join_is_refused(tabs: Tabs, runner: BrowserRunner, first: Frame) -> None:
    class Rude(FakePage):
        def _write(self, what: Frame) -> None:
            super()._write(first)

    assert Rude(tabs.addresses[0]).ended.result(LIMIT_SECS).startswith("expected ")
    assert measured(runner, good()) == ["ok"]


def test_pages_of_other_sites_reach_nothing(tabs: Tabs, runner: BrowserRunner) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example", "Origin": "http://evil.example"}):
        stranger = FakePage(tabs.addresses[0], headers=headers)
        with pytest.raises(Exception, match="403"):
            stranger.ended.result(LIMIT_SECS)
    assert measured(runner, good()) == ["ok"]


def idle_connection(address: str) -> socket.socket:
    """A connection that says nothing, and does not answer when it is closed."""
    host, port = address.partition("://")[2].partition("/")[0].split(":")
    lines = [
        "GET /measure HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "", "",
    ]  # fmt: skip
    connection = socket.create_connection((host, int(port)))
    connection.sendall("\r\n".join(lines).encode())
    assert connection.recv(12) == b"HTTP/1.1 101"
    return connection


def test_idle_connections_keep_no_page_out() -> None:
    idle: list[socket.socket] = []

    def opening(address: str) -> FakePage:
        idle.extend(idle_connection(address) for _ in range(60))
        return FakePage(address)

    with runner_of(Tabs(opening)) as runner:
        assert measured(runner, good()) == ["ok"]
    for connection in idle:
        connection.close()


def test_silent_connections_are_closed_and_keep_no_page_out() -> None:
    silent: list[socket.socket] = []

    def opening(address: str) -> FakePage:
        host, port = address.partition("://")[2].partition("/")[0].split(":")
        silent.extend(socket.create_connection((host, int(port))) for _ in range(200))
        return FakePage(address)

    with runner_of(Tabs(opening)) as runner:
        assert measured(runner, good()) == ["ok"]
        silent.extend(socket.create_connection(silent[0].getpeername()) for _ in range(200))
        assert measured(runner, good()) == ["ok"]
        for connection in silent:
            connection.settimeout(0.01)
        assert sum(is_open(connection) for connection in silent) <= 64
    for connection in silent:
        connection.close()


def is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


# What a page says.


def lie_once(kind: str, answer: Callable[[Mapping[str, Any]], Frame]) -> Callable[..., Frame | None]:
    """A page's way of answering: the first ask of a kind gets a lie, in whichever tab it comes."""
    told: list[str] = []

    def answering(message: Mapping[str, Any], data: bytes, page: FakePage) -> Frame | None:
        if message["kind"] == kind and not told and (kind != "run" or message["timed"]):
            told.append(kind)
            return answer(message)
        return None

    return answering


LIES: dict[str, tuple[str, Callable[[Mapping[str, Any]], Frame]]] = {
    "nan": ("run", lambda m: frame({"kind": "times", "id": m["id"], "secs": [math.nan]})),
    "negative": ("run", lambda m: frame({"kind": "times", "id": m["id"], "secs": [-1e-6]})),
    "more than passed": ("run", lambda m: frame({"kind": "times", "id": m["id"], "secs": [1e6]})),
    "too many": ("run", lambda m: frame({"kind": "times", "id": m["id"], "secs": [1e-6] * 2})),
    "text": ("run", lambda m: frame({"kind": "times", "id": m["id"], "secs": ["1"]})),
    "other id": ("alloc", lambda m: frame({"kind": "done", "id": m["id"] + 1})),
    "other kind": ("read", lambda m: frame({"kind": "done", "id": m["id"]})),
    "short array": ("read", lambda m: frame({"kind": "data", "id": m["id"]}, b"\0" * (m["bytes"] - 1))),
    "oversized array": ("read", lambda m: frame({"kind": "data", "id": m["id"]}, b"\0" * (CHUNK + 1))),
    "oversized text": ("alloc", lambda m: frame({"kind": "done", "id": m["id"], "more": "x" * MOST_JSON})),
    "two readies": ("alloc", lambda m: frame(FACTS)),
    "unknown": ("alloc", lambda m: frame({"kind": "launch", "id": m["id"]})),
}


@pytest.mark.parametrize("name", LIES)
def test_lying_page_is_cut_off_and_costs_no_candidate(name: str) -> None:
    answering = lie_once(*LIES[name])
    tabs = Tabs(lambda address: FakePage(address, answering=answering))
    with runner_of(tabs) as runner:
        assert measured(runner, good()) == ["ok"]
        back = FakePage(tabs.addresses[0], token=tabs.pages[0].returning)
        assert "got one that is expired" in back.ended.result(LIMIT_SECS)
    assert len(tabs.pages) == 2
    sentence = tabs.pages[0].ended.result(LIMIT_SECS)
    assert sentence.startswith("expected ")
    assert "was disconnected: expected" in " ".join(tabs.notices)


def test_frame_beyond_all_limits_costs_no_candidate() -> None:
    answering = lie_once("alloc", lambda m: b"\0" * (8 * CHUNK))
    tabs = Tabs(lambda address: FakePage(address, answering=answering))
    with runner_of(tabs) as runner:
        assert measured(runner, good()) == ["ok"]
    assert "is no longer reached, or broke the rules of WebSocket" in " ".join(tabs.notices)


def test_unasked_answer_cuts_the_page_off(tabs: Tabs, runner: BrowserRunner) -> None:
    tabs.pages[0].welcome.result(LIMIT_SECS)
    tabs.pages[0].say(frame({"kind": "done", "id": 1}))
    assert "got an answer from the page without a request" in tabs.pages[0].ended.result(LIMIT_SECS)
    assert measured(runner, good()) == ["ok"]


@pytest.mark.parametrize(
    "change",
    [
        {"adapter": None},
        {"adapter": {**FACTS["adapter"], "vendor": "x" * 201}},
        {"limits": {**LIMITS, "maxComputeWorkgroupSizeX": -1}},
        {"limits": {**LIMITS, "maxComputeWorkgroupSizeX": True}},
        {"limits": {}},
        {"timer": "sundial"},
        {"agent": ""},
        {"agent": "x" * 601},
    ],
)
def test_malformed_description_of_device_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"expected .* from the page, got"):
        read_ready({**FACTS, **change})


def test_description_has_no_control_characters_and_names_software() -> None:
    adapter = {**FACTS["adapter"], "description": "SwiftShader \x1b[2J"}
    info = read_ready({**FACTS, "adapter": adapter, "agent": "Mozilla/5.0 Firefox/133.0"})
    assert info.name == r"SwiftShader \x1b[2J in Firefox 133" and dict(info.fingerprint)["adapter"] == "CPU"


def test_malformed_frames_are_refused() -> None:
    for bad in (b"", b"\0", struct.pack("<I", 9) + b"{}", "{", '{"kind":1}', "[" * 5000):
        with pytest.raises(Refusal, match="expected"):
            read_message(bad)


# Ends.


def test_closed_tab_loses_nothing_and_next_page_goes_on(tabs: Tabs, runner: BrowserRunner) -> None:
    asked = threading.Event()

    def answering(message: Mapping[str, Any], data: bytes, page: FakePage) -> Frame | None:
        if message["kind"] == "run" and page is tabs.pages[0]:
            asked.set()
        return None

    tabs.pages[0]._answering = answering
    running = runner.submit([good(id=str(number)) for number in range(6)])
    assert asked.wait(LIMIT_SECS)
    tabs.pages[0].close()
    results = running.result(LIMIT_SECS)
    assert [(result.id, result.ok) for result in results] == [(str(number), True) for number in range(6)]
    assert len(tabs.pages) == 2
    assert "the page was closed, or hidden; the job waits for it, or for a new one: open http://" in tabs.notices[-2]


def test_page_comes_back_by_token_and_replay_is_refused(tabs: Tabs, runner: BrowserRunner) -> None:
    tabs.opening = None
    first = tabs.pages[0]
    first.welcome.result(LIMIT_SECS)
    first.close(4001)
    again = FakePage(tabs.addresses[0], token=first.returning)
    assert measured(runner, good()) == ["ok"] and again.asked
    replayed = FakePage(tabs.addresses[0], token=first.returning)
    assert "used already" in replayed.ended.result(LIMIT_SECS)


def test_second_tab_of_same_page_replaces_first(tabs: Tabs, runner: BrowserRunner) -> None:
    tabs.pages[0].welcome.result(LIMIT_SECS)
    twin = FakePage(tabs.addresses[0], token=tabs.pages[0].returning)
    assert tabs.pages[0].ended.result(LIMIT_SECS) == "the page was opened in another tab, which continues"
    assert measured(runner, good()) == ["ok"] and twin.asked


def test_page_of_another_device_is_refused(tabs: Tabs, runner: BrowserRunner) -> None:
    facts = iter([{**FACTS, "agent": AGENT.replace("140", "141")}, FACTS])
    tabs.opening = lambda address: FakePage(address, next(facts))
    tabs.pages[0].welcome.result(LIMIT_SECS)
    tabs.pages[0].close()
    assert measured(runner, good()) == ["ok"]
    assert (
        tabs.pages[1]
        .ended.result(LIMIT_SECS)
        .startswith("This job measures only on the device and browser that joined")
    )
    assert not tabs.pages[1].asked and tabs.pages[2].asked


def test_connection_lost_twice_in_one_candidate_is_a_crash() -> None:
    subject = program("good", "webgpu", name="closes")
    (found,) = subject.kernels
    closing = replace(
        subject, kernels=(replace(found, source=found.source.replace("if (i < n) {", "if (i < n) { /* closes */")),)
    )
    batch = [MeasureRequest("closes", closing.to_json(), (check(subject, 100, 5),), (), good().policy), good()]
    tabs = Tabs()
    with runner_of(tabs) as runner:
        results = runner.submit(batch).result(LIMIT_SECS)
    assert [(result.id, result.stage) for result in results] == [("closes", "crash"), ("good", None)]
    assert "the page is no longer reached" in results[0].message and len(tabs.pages) >= 2


def test_endless_kernel_closes_device_at_deadline(tabs: Tabs, runner: BrowserRunner) -> None:
    batch = [request("hang", "webgpu", deadline_secs=1.0), good()]
    results = runner.submit(batch).result(LIMIT_SECS)
    assert [(result.id, result.stage) for result in results] == [("hang", "timeout"), ("good", None)]
    assert "within 1 s, got phase 'check' still running: the page's device was closed" in results[0].message
    assert tabs.pages[0].abandoned == 1 and len(tabs.pages) == 1, "the tab made a new device"


def test_slow_transfers_are_no_hang(tabs: Tabs, runner: BrowserRunner) -> None:
    def slow(message: Mapping[str, Any], data: bytes, page: FakePage) -> None:
        time.sleep(0.1)

    tabs.pages[0]._answering = slow
    brief = replace(good(deadline_secs=1.0), timings=(), checks=good().checks[:1])
    assert measured(runner, brief) == ["ok"]


def test_job_without_page_names_awaited_address(tabs: Tabs) -> None:
    tabs.opening = None
    with pytest.raises(FleetUnavailable, match=r"http://127.0.0.1:\d+ within 0.3 s, got none; .*--wait-secs"):
        BrowserRunner("127.0.0.1:0", wait_secs=0.3, notice=tabs.notice)
    assert len(tabs.addresses) == 1


def test_closed_runner_ends_page_and_pending_futures(tabs: Tabs) -> None:
    with runner_of(tabs) as runner:
        pending = [runner.submit([request("hang", "webgpu", id=str(number))]) for number in range(2)]
    for future in pending:
        with pytest.raises(MeasureError, match="closed"):
            future.result(LIMIT_SECS)
    assert tabs.pages[0].ended.result(LIMIT_SECS) == "The job has ended. This page can be closed."


# Addresses.


@pytest.mark.parametrize(
    "text", ["", "8790", "localhost", "localhost:x", "localhost:70000", "http://localhost:1", ":1"]
)
def test_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--browser expects HOST:PORT such as 127.0.0.1:8790, got"):
        parse_place(text)


def test_address_of_all_interfaces_is_refused() -> None:
    for text in ("0.0.0.0:8790", "[::]:8790"):
        with pytest.raises(UserError, match="address under which the browser"):
            parse_place(text)


def test_page_is_served_over_tls_where_a_certificate_is_given(tabs: Tabs, tmp_path: Path) -> None:
    pem = tmp_path / "server.pem"
    pem.write_bytes(self_signed_certificate("127.0.0.1")[0])
    with runner_of(tabs, certificate=str(pem), key=str(pem)) as runner:
        assert runner.url.startswith("https://127.0.0.1:") and measured(runner, good()) == ["ok"]
        context = ssl.create_default_context(cafile=pem)
        with urllib.request.urlopen(runner.url, context=context) as answer:
            assert "connect-src 'self' ws://127.0.0.1" in answer.headers["content-security-policy"]
            assert b"<h1>Measuring kernels</h1>" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{runner.url}/static/measure.html", context=context)


def test_address_beyond_loopback_gets_new_certificate(tmp_path: Path) -> None:
    place = parse_place("192.0.2.7:8790")
    context, digest = server_tls(place, None, None)
    assert context is not None and re.fullmatch("([0-9A-F]{2}:){31}[0-9A-F]{2}", digest)
    assert place.url(8790) == "https://192.0.2.7:8790"
    assert server_tls(parse_place("localhost:1"), None, None) == (None, "")
    with pytest.raises(UserError, match="expected --certificate and --key together for --browser"):
        server_tls(place, str(tmp_path / "a.pem"), None)
    with pytest.raises(UserError, match="cannot be used: No such file"):
        server_tls(place, str(tmp_path / "a.pem"), str(tmp_path / "a.key"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--target", "c"), "--browser expects --target webgpu and no --scheduler, got 'c'"),
        (("--target", "webgpu", "--scheduler", "tcp://127.0.0.1:1"), "got 'webgpu' and a scheduler"),
        (("--target", "webgpu", "--compare"), "--compare times on this machine, got a --browser too"),
        (("--target", "webgpu", "--ca", "ca.pem"), "expected a --scheduler for --ca"),
        (("--target", "webgpu", "--certificate", "a.pem"), "expected --certificate and --key together for --browser"),
    ],
)
def test_options_beside_browser_are_refused(more: tuple[str, ...], message: str, tmp_path: Path) -> None:
    save_text(feed_forward(), tmp_path / "model.relax")
    asked = ["tune", str(tmp_path / "model.relax"), "--browser", "127.0.0.1:0", "--out", str(tmp_path / "m.rta"), *more]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2 and message in done.stderr, done.output


def test_taken_port_is_refused(tabs: Tabs, runner: BrowserRunner) -> None:
    with pytest.raises(UserError, match="cannot listen there: Address already in use"):
        BrowserRunner(runner.url.partition("://")[2])
