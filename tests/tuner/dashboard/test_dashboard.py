"""`relax-tune dashboard`: who gets in, what pages show, and that nothing is written."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.tuner.dashboard.asking import ask
from tests.tuner.report.tuned_database import ESCAPED, HOSTILE, JOB, add_hostile, check_accessible
from typer.testing import CliRunner

from relax_tune.database.jobs.queue import JobQueue, open_queue
from relax_tune.database.records import JobRecord, Measurement, PlanRecord, Target, VariantRecord, Workload
from relax_tune.errors import UserError
from relax_tune.tuner.cli.app import app as command
from relax_tune.tuner.dashboard.app import make_app
from relax_tune.tuner.dashboard.guard import HEADERS, App, Guard, authorised, check_binding, cookie_of, token_for
from relax_tune.tuner.dashboard.pages import Pages
from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.report.sections import Limits
from relax_tune.tuner.report.subject import Subject

TOKEN = "0123456789abcdef-secret"
RUN = "abcdef@host:1:1:0123456789abcdef"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder whose database `r.db` has a device, a task with a plan, a run and a hostile job."""
    with open_queue(f"sqlite:///{tmp_path / 'r.db'}", create=True) as queue:
        key = queue.add_target(Target("c", "paper", (("compiler", "none"),), reference=(("add", 1e-3),)))
        queue.add_workload(Workload("w", "text", 1, "softmax"))
        variant = VariantRecord("tuned", "tiles", "[]", '{"T": 8}')
        queue.add_measurements(
            Measurement(
                f"m{n}",
                "w",
                key,
                variant,
                {"s0": n},
                samples_secs=(1e-6 * n,),
                checked=True,
                measured_at=float(n),
                job=RUN,
                worker="gpu1/c",
            )
            for n in (1, 2, 4)
        )
        parts = {"kind": "tuned", "sketch": "tiles", "trace": "[]", "parameters": variant.parameters}
        plan = {
            "entries": [{"tests": [], "variant": variant.key}],
            "variants": {variant.key: parts},
            "model": "m" * 32,
            "set": "s",
        }
        queue.add_plans([PlanRecord("w", key, 1, json.dumps(plan))])
        queue.put_job(JobRecord(RUN, '{"target": "c", "seen_at": 5}', "done"))
    add_hostile(tmp_path)
    return tmp_path


@contextmanager
def opened(place: Path, token: str | None = None, **more: object) -> Iterator[tuple[App, JobQueue]]:
    pytest.importorskip("starlette", reason="Starlette is not installed (extra dashboard)")
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    with open_queue(f"sqlite:///{place / 'r.db'}", read_only=True) as store:
        yield make_app(Pages(store, **more), token), store  # type: ignore[arg-type]


def test_pages_of_every_kind_are_accessible_and_harmless(place: Path) -> None:
    units = [LentDevice("tcp://1", "c", HOSTILE, "h", "u", "id", "paper", {"add": 1e-3}, 1.5, "slow", 0.0)]
    with opened(place, lent=lambda: units) as (app, store):
        (target,) = store.targets()
        paths = {"/", f"/jobs/{JOB}", f"/runs/{RUN}", f"/models/{'m' * 32}", f"/devices/{target.key}", "/fleet"}
        front = ask(app, "/").text
        assert {link for link in check_accessible(front).links if link.startswith("/")} >= paths - {f"/runs/{RUN}"}
        for path in sorted(paths):
            answer = ask(app, path)
            assert answer.status == 200, path
            found = check_accessible(answer.text)
            assert set(found.loaded) == {"/static/icon.svg", "/static/style.css", "/static/refresh.js"}
            assert found.tags.count("script") == 1, "the page's own, which is a file"
            assert HOSTILE not in answer.text and "\x1b" not in answer.text and "\u202e" not in answer.text
            assert {name.lower(): answer.headers[name.lower()] for name in HEADERS} == {
                n.lower(): v for n, v in HEADERS.items()
            }
            assert "'unsafe" not in answer.headers["content-security-policy"]
        job = ask(app, f"/jobs/{JOB}").text
        assert ESCAPED in job and "3 of 8" in job and "line of" in job
        assert 'value="3" max="8"' in front and "running" in front
        assert "quarantined: slow" in ask(app, "/fleet").text
        for name in ("refresh.js", "style.css", "icon.svg"):
            assert ask(app, f"/static/{name}").status == 200


def test_device_page_beyond_the_limit_reads_counts_and_links_to_tasks(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(place, limits=Limits(records=5)) as (app, store):
        (target,) = store.targets()
        total = store.count(target.key)
        with monkeypatch.context() as patch:
            patch.setattr(type(store), "query", None)
            page = ask(app, f"/devices/{target.key}").text
        links = [link for link in check_accessible(page).links if "/tasks/" in link]
        assert f"{total:,} measurements would be slow" in page and "Regret" not in page
        assert sorted(links) == [f"/devices/{target.key}/tasks/{key}" for key in ("hostile", "w")]
        task = ask(app, links[-1]).text
        assert "Time over shape: softmax" in task and "Regret" in task
        assert ask(app, f"/devices/{target.key}/tasks/none").status == 404


def test_unknown_pages_are_not_found_and_other_methods_refused(place: Path) -> None:
    with opened(place) as (app, _):
        for path in (
            "/jobs/none",
            "/runs/none",
            "/models/none",
            "/devices/none",
            "/fleet",
            "/nowhere",
            "/static/../app.py",
            "/static/none",
        ):
            assert ask(app, path).status == 404, path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            answer = ask(app, "/", method)
            assert answer.status == 405 and answer.headers["allow"] == "GET, HEAD"
        assert ask(app, "/", "HEAD").status == 200


def test_pages_write_nothing(place: Path) -> None:
    def content() -> str:
        return hashlib.sha256((place / "r.db").read_bytes()).hexdigest()

    with opened(place) as (app, store):
        before = content()
        (target,) = store.targets()
        for path in ("/", f"/jobs/{JOB}", f"/devices/{target.key}", "/metrics"):
            assert ask(app, path).status == 200
        assert content() == before and store.read_only


def test_token_is_wanted_on_every_path_and_not_shown(place: Path) -> None:
    basic = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
    with opened(place, TOKEN) as (app, _):
        for path in ("/", "/metrics", f"/jobs/{JOB}", "/static/style.css", "/nowhere"):
            refused = ask(app, path)
            assert refused.status == 401 and refused.headers["www-authenticate"].startswith("Basic ")
            assert "content-security-policy" in refused.headers and TOKEN not in refused.text
        for header in (f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Basic {basic}"):
            answer = ask(app, "/", host="records.lan", authorization=header)
            assert answer.status == 200 and TOKEN not in answer.text
        wrong = base64.b64encode(b"anyone:wrong").decode()
        for header in (
            "Bearer wrong",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            "Basic !",
            f"Basic {wrong}",
            TOKEN,
            f"Digest {TOKEN}",
        ):
            assert ask(app, "/", authorization=header).status == 401, header


def test_server_without_token_answers_to_names_of_loopback_alone(place: Path) -> None:
    with opened(place) as (app, _):
        for host in ("127.0.0.1:8788", "localhost", "[::1]:8788"):
            assert ask(app, "/static/style.css", host=host).status == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "", "[", "127.0.0.1@evil.example:80"):
            assert ask(app, "/static/style.css", host=host).status == 421, host


def test_printed_address_is_exchanged_for_a_cookie_once(place: Path) -> None:
    """The address leaves the browser's bar, and the cookie is for this server, this site and no scripts."""
    with opened(place, TOKEN) as (app, _):
        answer = ask(app, f"/jobs/{JOB}?token={TOKEN}")
        assert (
            answer.status == 303 and answer.headers["location"] == f"/jobs/{JOB}" and TOKEN not in str(answer.headers)
        )
        cookie, *attributes = answer.headers["set-cookie"].split("; ")
        assert cookie == "=".join(cookie_of(TOKEN)) and {"HttpOnly", "SameSite=Strict"} <= set(attributes)
        for path in ("/", f"/jobs/{JOB}", "/metrics", "/static/style.css"):
            assert ask(app, path, cookie=f"other=1; {cookie}").status == 200, path
        name, value = cookie.split("=")
        for wrong in (
            f"{name}={TOKEN}",
            f"{name}={value[:-1]}",
            f"{name}={value}x",
            f"x={value}",
            f"{name}=",
            "=",
            "é=é",
            "a b; ;=",
            value,
        ):
            assert ask(app, "/", cookie=wrong).status == 401, wrong
        assert ask(app, "/", cookie="=".join(cookie_of(TOKEN + "x"))).status == 401
        for query in (
            "token=",
            f"token={TOKEN}x",
            f"token={TOKEN[:-1]}",
            f"token={TOKEN}&token={TOKEN}",
            f"TOKEN={TOKEN}",
            "&" * 99,
            "%ff=%ff",
            "é",
        ):
            assert ask(app, f"/?{query}").status == 401, query
        assert ask(app, f"//evil.example/x?token={TOKEN}").headers["location"] == "/evil.example/x"
        assert ask(app, f"/?token={TOKEN}", method="POST").status == 405


def test_token_is_generated_unless_given_or_declined() -> None:
    first, second = token_for(None, False), token_for(None, False)
    assert first != second and first[0] and first[1] == f"?token={first[0]}" and len(first[0]) >= 43
    assert token_for(TOKEN, False) == (TOKEN, "") and token_for(None, True) == (None, "")
    with pytest.raises(UserError, match="--no-token"):
        token_for(TOKEN, True)


def test_binding_beyond_loopback_wants_a_long_token() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "records.lan"):
        with pytest.raises(UserError, match="token is required"):
            check_binding(host, None)
        check_binding(host, TOKEN)
    for host in ("127.0.0.1", "::1", "localhost"):
        check_binding(host, None)
    for token in ("", "short", "with a blank in it ...", "x" * 15, "é" * 20):
        with pytest.raises(UserError, match="at least 16"):
            check_binding("127.0.0.1", token)


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_tune.tuner.dashboard import guard

    compared = []
    true = guard.hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or true(a, b))
    assert authorised(f"Bearer {TOKEN}", TOKEN) and not authorised("Bearer é", TOKEN)
    assert compared == [(TOKEN.encode(), TOKEN.encode()), ("é".encode(), TOKEN.encode())]


def test_dashboard_refuses_open_ports_and_readable_tokens(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAX_TUNE_DASHBOARD_TOKEN", raising=False)
    monkeypatch.chdir(place)

    def refused(*arguments: str) -> str:
        done = CliRunner().invoke(command, ["dashboard", "--db", "r.db", *arguments])
        assert done.exit_code == 2, done.output
        return done.stderr

    assert "token is required" in refused("--host", "0.0.0.0")
    assert "token is required" in refused("--host", "0.0.0.0", "--no-token")
    file = place / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    told = refused("--host", "0.0.0.0", "--token-file", "token")
    assert "chmod 600" in told and TOKEN not in told
    file.chmod(0o600)
    file.write_text("short")
    assert "at least 16" in refused("--token-file", "token")
    file.write_text(TOKEN)
    assert "got both" in refused("--token-file", "token", "--no-token")
    file.write_text(f"{TOKEN}\n{TOKEN}\n")
    told = refused("--token-file", "token")
    assert "one line" in told and TOKEN not in told
    assert "no such file" in refused("--token-file", "none").lower()
    assert "--port expects" in refused("--port", "70000")


def test_metrics_are_in_the_form_of_prometheus(place: Path) -> None:
    parser = pytest.importorskip(
        "prometheus_client.parser", reason="prometheus-client is not installed (extra dashboard)"
    )
    with opened(place) as (app, store):
        answer = ask(app, "/metrics")
        (target,) = store.targets()
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (
            s.name,
            s.labels.get("state") or s.labels.get("result") or s.labels.get("job") or s.labels.get("worker", ""),
        ): s.value
        for family in parser.text_string_to_metric_families(answer.text)
        for s in family.samples
    }
    assert found["relax_tune_jobs", "running"] == 1 and found["relax_tune_jobs", "queued"] == 0
    assert found["relax_tune_job_candidates", JOB] == 3 and found["relax_tune_job_candidates_planned", JOB] == 8
    assert found["relax_tune_measurements", "ok"] == 5 and found["relax_tune_measurements", "compile"] == 1
    assert found["relax_tune_unit_last_measured_seconds", "gpu1/c"] == 4
    assert target.key in answer.text and "\x1b" not in answer.text


def test_page_in_the_making_keeps_no_other_route_waiting(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(self: Pages) -> Subject:
        begun.set()
        assert go_on.wait(60)
        return Subject("made late", ())

    monkeypatch.setattr(Pages, "overview", slow)
    with opened(place) as (app, _), ThreadPoolExecutor(2) as others:
        front = others.submit(ask, app, "/")
        assert begun.wait(60)
        other = others.submit(ask, app, f"/jobs/{JOB}")
        try:
            assert other.result(60).status == 200 and not front.done()
        finally:
            go_on.set()
        assert "made late" in front.result(60).text


def test_altered_database_gives_metrics_in_printable_words(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sqlite3.connect(place / "r.db") as raw:
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute("UPDATE tallies SET place = ? WHERE rowid = (SELECT min(rowid) FROM tallies)", ("\x1b[31m",))
    raw.close()
    with opened(place) as (app, _):
        answer = ask(app, "/metrics")
        assert answer.status == 503 and "refers to place" in answer.text and "db check" in answer.text
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "\x1b" not in "".join(told) + answer.text


def test_guard_closes_pages_to_framing_and_scripts_of_others() -> None:
    async def hollow(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

    headers = ask(Guard(hollow, None), "/").headers  # type: ignore[arg-type]
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert (
        policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'" and policy["script-src"] == "'self'"
    )
    assert headers["cache-control"] == "no-store" and headers["referrer-policy"] == "no-referrer"


@pytest.mark.process
@pytest.mark.slow
def test_another_user_of_the_machine_reads_nothing_by_default(place: Path) -> None:
    """A request without the printed token is refused; `--no-token` says who can read the pages."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra dashboard)")
    code = "from relax_tune.tuner.cli.start import main; main()"
    environment = {name: value for name, value in os.environ.items() if name != "RELAX_TUNE_DASHBOARD_TOKEN"}

    def status(address: str) -> int:
        try:
            with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(address, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    for more in ([], ["--no-token"]):
        words = ["dashboard", "--db", "r.db", "--port", "0", *more]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words], cwd=place, env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            said = ""
            while not (address := re.search(r"(http://127\.0\.0\.1:\d+/)(\?token=\S+)?;", said)):
                line = process.stderr.readline()
                assert line, said
                said = said.rstrip("\n") + line if "http" in said else said + line
            assert status(address[1]) == (200 if more else 401)
            assert status(address[1] + (address[2] or "")) == 200 and bool(address[2]) != bool(more)
            assert ("every user" in said) == bool(more)
        finally:
            process.kill()
            process.communicate()


@pytest.mark.process
@pytest.mark.slow
def test_dashboard_serves_until_interrupted_and_logs_no_token(place: Path) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra dashboard)")
    pytest.importorskip("pythonjsonlogger", reason="python-json-logger is not installed (extra dashboard)")
    code = "from relax_tune.tuner.cli.start import main; main()"
    words = ("dashboard", "--db", "r.db", "--port", "0", "--logs", "json")
    environment = {**os.environ, "RELAX_TUNE_DASHBOARD_TOKEN": TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=place,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        address = re.search(r"http://127\.0\.0\.1:\d+/", first["message"])
        assert (
            address is not None
            and first["logger"] == "relax_tune.dashboard"
            and first["level"] == "INFO"
            and first["time"]
        )
        for header, status in ((f"Bearer {TOKEN}", 200), (f"Bearer {TOKEN}wrong", 401)):
            request = urllib.request.Request(address[0] + "?token=" + TOKEN, headers={"Authorization": header})
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    got, server = answer.status, answer.headers["server"]
            except urllib.error.HTTPError as error:
                got, server = error.code, error.headers["server"]
            assert got == status and server is None
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, rest
    assert TOKEN not in out + rest + first["message"]
    assert all(json.loads(line)["message"] for line in rest.splitlines())
