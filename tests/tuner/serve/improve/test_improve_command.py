"""`relax-tune serve --improve` as a process: a model of generic loops gets tuned kernels while requests run, also over kills."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tuner.serve.improve.test_improver import BODIES
from tests.tuner.serve.served import Files, slow
from tests.tuner.serve.test_serve_command import Process, command
from typer.testing import CliRunner

from relax_tune.ir.frontend.text import save_text
from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.serve.improve.sizes import ServedSizes

pytestmark = [pytest.mark.ccompiler, pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def arguments(files: Files, tmp_path: Path) -> list[str]:
    """Arguments of a server of `net.rta`, in generic loops, next to which improvements are written."""
    path = shutil.copy(files.artifact("slow"), tmp_path / "net.rta")
    source = save_text(slow(), tmp_path / "slow.relax")
    more = ["--improve-from", str(source), "--improve-secs", "2", "--db", str(tmp_path / "records.db")]
    return [str(path), "--improve", *more, "--record-shapes", str(tmp_path / "sizes")]


@contextmanager
def traffic(process: Process) -> Iterator[list[Any]]:
    """Requests until the end of the context, or until the server has gone; the answers, and the errors."""
    answers, ended = list[Any](), threading.Event()

    def send() -> None:
        number = 0
        while not ended.is_set():
            try:
                answer = process.ask("/v2/models/net/infer", BODIES[number % 2])
            except OSError as error:
                answers.append(error)
                return
            (output,) = answer.json["outputs"]
            answers.append(answer.status == 200 and np.allclose(output["data"], output["shape"][0], rtol=1e-3))
            number += 1

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        thread.join()


def reached(process: Process, phase: str, swaps: int = 0) -> dict[str, Any]:
    """Wait until the improvement is in a phase, with so many swaps."""
    end = time.monotonic() + 240
    while True:
        (state,) = process.ask("/improvement").json["models"]
        if state["phase"] == phase and state["swaps"] >= swaps:
            return dict(state)
        assert time.monotonic() < end, (state, process.lines)
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def test_server_tunes_swaps_and_serves_the_improvement_after_a_restart(arguments: list[str], tmp_path: Path) -> None:
    with command(arguments) as process, traffic(process) as answers:
        state = reached(process, "recording", swaps=1)
        # it goes back if other processes of the machine slow calls down meanwhile
        confirmed = state["returns"] == 0
        assert not confirmed or state["gain"] > 0.02, state
        metrics = process.ask("/metrics").body.decode()
        swaps = state["swaps"] + state["returns"]
        assert f'relax_tune_serve_swaps_total{{model="net",version="1"}} {swaps}.0' in metrics, process.lines
        process.child.send_signal(signal.SIGTERM)
        process.child.wait(30)
    assert [a for a in answers if a is True] and not [a for a in answers if a is False]
    assert any("runs another artifact" in line for line in process.lines), process.lines
    assert (tmp_path / "net.improved.rta").exists() == confirmed and not (tmp_path / "net.candidate.rta").exists()
    assert sum(ServedSizes.read(tmp_path / "sizes" / "net.1.shapes.json").counts().values()) > 200
    with command(arguments) as process:
        (state,) = process.ask("/improvement").json["models"]
        assert state["artifact"].endswith("net.improved.rta" if confirmed else "net.rta")
        assert state["calls"] == 0 and state["sizes"] >= 1
        assert process.ask("/v2/models/net/infer", BODIES[0]).status == 200


@pytest.mark.parametrize("phase", ["tuning", "swapping", "watching"])
def test_server_killed_in_a_round_leaves_whole_files_and_serves_again(
    arguments: list[str], tmp_path: Path, phase: str
) -> None:
    with command(arguments) as process, traffic(process) as answers:
        if phase != "tuning":
            reached(process, "tuning")
        # the swap takes milliseconds: the first phase after tuning that is visible
        reached(process, phase) if phase != "swapping" else after_tuning(process)
        tuning = children(process.child.pid)
        process.child.kill()
        start = time.monotonic()
        process.child.wait()
    assert answers and False not in answers
    for path in tmp_path.glob("net*.rta"):
        load_artifact(path)
    with command([a for a in arguments if a != "--improve"]) as process:
        assert process.ask("/v2/models/net/infer", BODIES[0]).status == 200
        assert time.monotonic() - start < 60
    with command(arguments) as process:
        assert process.ask("/v2/models/net/infer", BODIES[0]).status == 200
        end = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in tuning):  # it ends with its server
            assert time.monotonic() < end
            time.sleep(0.05)


def after_tuning(process: Process) -> None:
    while process.ask("/improvement").json["models"][0]["phase"] == "tuning":
        time.sleep(0.001)


@pytest.mark.parametrize(
    "more, subject",
    [
        (["--improve"], "--improve-from"),
        (["--improve", "--require-signed", "key.pub"], "--require-signed"),
        (["--improve-secs", "0"], "--improve-secs"),
        (["--improve-from", "x=model"], "--improve-from"),
    ],
)
def test_command_refuses_wrong_options(files: Files, more: list[str], subject: str) -> None:
    done = CliRunner().invoke(app, ["serve", str(files.artifact("slow")), f"other={files.artifact('dense')}", *more])
    assert done.exit_code == 2 and subject in done.output
