"""Hosts as network namespaces joined by veth pairs, with TLS: partitions, loss and delay, a scheduler that restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
from tests.tuner.measure.cluster.certificates import Authority

from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.trust.authority import ROLES

HEAD = "10.177.0.1"
NAMES = ("one", "two")
JOB = """
import json, sys
from tests.tuner.measure.measure_programs import request
from relax_tune.errors import TryAgainLater
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.trust.authority import ROLES
from relax_tune.tuner.measure.cluster.runner import DaskRunner
address, files, batches = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
say = lambda kind, value: print(json.dumps([kind, value]), flush=True)
with DaskRunner(address, "c", tls=TlsFiles(**files), notice=lambda line: say("notice", line)) as runner:
    futures = [runner.submit([request("good", "c", id=f"r{n}")]) for n in range(batches)]
    for future in futures:
        try:
            say("unit", future.result()[0].unit.unit)
        except TryAgainLater as error:
            say("away", str(error))
            break
"""


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)


class Network:
    """A head and two hosts below a bridge in the head; every host has an address of 10.177.0.0/24."""

    def __init__(self, stack: ExitStack) -> None:
        self.mark = f"rt{os.getpid() % 10000}"
        self.running: list[subprocess.Popen[bytes]] = []
        self._stack = stack
        stack.callback(self.end)
        self.make("netns", "add", self.name("head"))
        self.inside("head", "ip", "link", "add", "bridge", "type", "bridge")
        for number, host in enumerate(NAMES, 2):
            self.make("netns", "add", self.name(host))
            self.make(
                "link", "add", f"{self.mark}{host}", "type", "veth", "peer", "name", "eth0", "netns", self.name(host)
            )
            self.make("link", "set", f"{self.mark}{host}", "netns", self.name("head"))
            self.inside("head", "ip", "link", "set", f"{self.mark}{host}", "master", "bridge", "up")
            self.inside(host, "ip", "addr", "add", f"10.177.0.{number}/24", "dev", "eth0")
            self.inside(host, "ip", "link", "set", "eth0", "up")
        self.inside("head", "ip", "addr", "add", f"{HEAD}/24", "dev", "bridge")
        self.inside("head", "ip", "link", "set", "bridge", "up")
        for host in ("head", *NAMES):
            self.inside(host, "ip", "link", "set", "lo", "up")

    def name(self, host: str) -> str:
        return f"{self.mark}-{host}"

    def make(self, *words: str) -> None:
        done = ip(*words)
        if done.returncode:
            pytest.skip(f"this kernel makes no network namespaces and veth pairs here: {done.stderr.strip()}")

    def inside(self, host: str, *command: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self.name(host), *command], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def start(self, host: str, log: Path, *command: str) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        own = {
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True",
        }
        with open(log, "wb") as file:
            words = ["ip", "netns", "exec", self.name(host), sys.executable, *command]
            # a unit ends when its standard input is closed
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env=own, start_new_session=True
            )
        self.running.append(process)
        return process

    def end(self) -> None:
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for host in ("head", *NAMES):
            self.kill(host)
            ip("netns", "del", self.name(host))

    def kill(self, host: str, word: str = "") -> int:
        """Kill the processes of a host whose command line has a word; return their number."""
        count = 0
        for pid in ip("netns", "pids", self.name(host)).stdout.split():
            try:
                if word in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    os.kill(int(pid), signal.SIGKILL)
                    count += 1
            except OSError:
                continue
        return count


class Fleet:
    """A scheduler on the head and a made-up worker on each host."""

    def __init__(self, network: Network, folder: Path, files: Mapping[str, TlsFiles]) -> None:
        self.network, self.folder, self.files = network, folder, files
        self.address = f"tls://{HEAD}:8786"
        self.scheduler = self.start_scheduler()
        for number, host in enumerate(NAMES, 2):
            options = {
                "scheduler": self.address,
                "specs": ["c"],
                "name": host,
                "tolerance": 1.25,
                "folder": str(folder),
            }
            options |= {"host": f"10.177.0.{number}", "tls": asdict(files["worker"])}
            facts = {"unit": f"{network.mark}-{host}", "secs": 0.5}
            again = f"while True: subprocess.run([sys.executable, '-m', {fake!r}, {json.dumps(options)!r}, {json.dumps(facts)!r}])"
            network.start(host, folder / f"{host}.log", "-c", f"import subprocess, sys\n{again}")

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        start = "from relax_tune.tuner.cli.start import main; main()"
        words = [
            "scheduler",
            "--host",
            HEAD,
            "--ca",
            self.files["scheduler"].ca,
            "--certificate",
            self.files["scheduler"].certificate,
            "--key",
            self.files["scheduler"].key,
        ]
        log = self.folder / f"scheduler-{time.monotonic()}.log"
        return self.network.start("head", log, "-c", start, *words)

    def job(self, batches: int) -> tuple[subprocess.Popen[bytes], Path]:
        out = self.folder / f"job-{time.monotonic()}.out"
        arguments = (self.address, json.dumps(asdict(self.files["job"])), str(batches))
        return self.network.start("head", out, "-c", JOB, *arguments), out


fake = "tests.tuner.measure.cluster.fake_unit"


def told(out: Path, kind: str) -> list[str]:
    lines = [line for line in out.read_text().splitlines() if line.startswith('["')]
    return [value for k, value in map(json.loads, lines) if k == kind]


def until(holds: Callable[[], object], secs: float = 180.0) -> None:
    give_up = time.monotonic() + secs
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.1)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    with ExitStack() as stack:
        network = Network(stack)
        ours = Authority(tmp_path, "ca")
        yield Fleet(network, tmp_path, {role: ours.sign(role, role) for role in ROLES})


@pytest.mark.process
@pytest.mark.heavy
def test_partitioned_worker_costs_no_result_and_comes_back(fleet: Fleet) -> None:
    first, out = fleet.job(4)
    assert first.wait(180) == 0, out.read_text()
    units = {f"{fleet.network.mark}-{host}" for host in NAMES}
    job, out = fleet.job(30)
    until(lambda: len(told(out, "unit")) >= 4)
    port = f"{fleet.network.mark}one"
    fleet.network.inside("head", "ip", "link", "set", port, "down")
    assert job.wait(240) == 0, out.read_text()
    assert len(told(out, "unit")) == 30 and told(out, "away") == [], "each batch has one answer"
    assert any("also sent to two" in line for line in told(out, "notice")) or set(told(out, "unit")[8:]) == {
        min(units - {f"{port[:-3]}-one"})
    }
    fleet.network.inside("head", "ip", "link", "set", port, "up")

    def both() -> bool:
        again, found = fleet.job(8)
        return again.wait(180) == 0 and set(told(found, "unit")) == units

    until(both, 300)


@pytest.mark.process
@pytest.mark.heavy
def test_job_goes_on_over_a_lossy_slow_network(fleet: Fleet) -> None:
    network = fleet.network
    shape = ("tc", "qdisc", "add", "dev", f"{network.mark}one", "root", "netem", "delay", "50ms", "20ms", "loss", "5%")
    done = subprocess.run(
        ["ip", "netns", "exec", network.name("head"), *shape], capture_output=True, text=True, timeout=30
    )
    if done.returncode:
        pytest.skip(f"this kernel has no netem: {done.stderr.strip()}")
    job, out = fleet.job(20)
    assert job.wait(240) == 0 and len(told(out, "unit")) == 20, out.read_text()


@pytest.mark.process
@pytest.mark.heavy
def test_scheduler_restarting_with_batches_out_ends_the_job_to_be_tried_again(fleet: Fleet) -> None:
    first, out = fleet.job(4)
    assert first.wait(180) == 0, out.read_text()
    job, out = fleet.job(60)
    until(lambda: len(told(out, "unit")) >= 4)
    assert fleet.network.kill("head", "cluster.scheduler") == 1
    fleet.scheduler.wait()
    job.wait(120)
    assert len(told(out, "away")) == 1, out.read_text()
    (away,) = told(out, "away")
    assert "got the scheduler" in away or "does not answer" in away
    fleet.scheduler = fleet.start_scheduler()

    def again() -> bool:
        later, found = fleet.job(4)
        return later.wait(180) == 0 and len(told(found, "unit")) == 4

    until(again, 300)
