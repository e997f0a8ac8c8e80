"""The guide from nothing to a fleet: its commands, counted and run on one machine with a real server, scheduler and worker."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support import postgres
from tests.tuner.job.job_processes import small_model

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "fleet.md").read_text()
MACHINES = ("desk", "records", "head", "gpu1")
PASSWORDS = {"owner": "one of your own", "tina": "another one"}


def commands() -> list[tuple[str, str]]:
    """(machine, command) in the order of the guide."""
    found, machine = [], ""
    for heading, block in re.findall(r"^## ([^\n]*)$|^```sh\n(.*?)^```", GUIDE, re.M | re.S):
        machine = (re.findall(r"on `(\w+)`", heading) or [machine])[0]
        found += [(machine, line) for line in block.splitlines()]
    return found


def test_guide_states_number_of_commands() -> None:
    assert GUIDE.split("\n\n")[1].startswith("Eighteen commands") and len(commands()) == 18


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Machines:
    """The four machines: a folder each, with stand-ins for `sudo` and `systemctl` before other programs."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder, self.port = folder, free_port()
        self.database_port = server.rpartition(":")[2].strip("/")
        self.running: list[subprocess.Popen[bytes]] = []
        for name in (*MACHINES, "tools", "etc"):
            (folder / name).mkdir()
        for name in MACHINES[1:]:
            (folder / name / "fleet").symlink_to(folder / "desk" / "fleet")
        self.environment = os.environ | {
            "HOME": str(folder),
            "PATH": os.pathsep.join([str(folder / "tools"), os.environ["PATH"]]),
            "PGHOSTADDR": "127.0.0.1",
            "PGPORT": self.database_port,
            "RELAX_TUNE_CACHE": str(folder / "cache"),
            "RELAX_TUNE_TRIALS": "1",
            "RELAX_TUNE_EFFORT": "quick",
        }
        pgpass = folder / ".pgpass"
        pgpass.write_text("".join(f"*:*:*:{name}:{password}\n" for name, password in PASSWORDS.items()))
        pgpass.chmod(0o600)
        self.tool("relax-tune", f'exec {sys.executable} -m relax_tune "$@"')
        as_server = f"env -u PGHOSTADDR PGHOST={folder} {' '.join(postgres.user_prefix())}"
        self.tool("sudo", f'[ "$1 $2" = "-u postgres" ] || exit 9; shift 2; cd /; exec {as_server} "$@"')
        data = "$(sudo -u postgres psql -Atc 'SHOW data_directory')"
        control = postgres.tool("pg_ctl")
        restart = f'sudo -u postgres {control} -D "{data}" -w -l {folder}/socket.log restart'
        self.tool("systemctl", f'[ "$*" = "restart postgresql" ] || exit 9; {restart} > /dev/null')

    def tool(self, name: str, script: str) -> None:
        path = self.folder / "tools" / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def local(self, command: str) -> str:
        """A command with the addresses of this machine."""
        command = command.replace("10.0.0.1:8786", f"127.0.0.1:{self.port}")
        return command.replace("--host 10.0.0.1", f"--host 127.0.0.1 --port {self.port}").replace(
            "/etc/postgresql", str(self.folder / "etc")
        )

    def run(self, machine: str, command: str, check: bool = True) -> str:
        done = subprocess.run(
            ["bash", "-c", self.local(command)],
            cwd=self.folder / machine,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def start(self, machine: str, command: str) -> None:
        """Start a command that runs until interrupted."""
        with open(self.folder / f"{machine}.log", "wb") as log:
            self.running.append(
                subprocess.Popen(
                    ["bash", "-c", f"exec {self.local(command)}"],
                    cwd=self.folder / machine,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def wait(self, machine: str, command: str, text: str) -> None:
        """Repeat a command until it prints a text."""
        give_up = time.monotonic() + 120
        while text not in (printed := self.run(machine, command, check=False)):
            logs = [path.read_text() for path in self.folder.glob("*.log")]
            assert time.monotonic() < give_up, f"{command}\n{printed}\n{logs}"
            time.sleep(0.5)


@pytest.fixture
def machines() -> Iterator[Machines]:
    if (why := postgres.missing()) is not None or (why := None if shutil.which("psql") else "psql is not installed"):
        pytest.skip(why)
    with (
        postgres.open_folder() as folder,
        postgres.server(f"unix_socket_directories={folder}", superuser="postgres") as url,
    ):
        given = Machines(folder, url)
        try:
            yield given
        finally:
            for process in given.running:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)


@pytest.mark.process
@pytest.mark.postgres
@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.heavy
def test_commands_of_the_guide_lead_to_a_tuned_model(machines: Machines) -> None:
    pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
    small_model(machines.folder / "desk").rename(machines.folder / "desk" / "model.onnx")
    np.savez(machines.folder / "desk" / "inputs.npz", x=np.ones((7, 16), np.float32))
    (access,) = re.findall(r"`(hostssl .*?)`", GUIDE)
    workers = next(command for _, command in commands() if command.startswith("relax-tune workers"))
    for machine, command in commands():
        if command.startswith("systemctl"):
            place = machines.run("records", "sudo -u postgres psql -Atc 'SHOW hba_file'").strip()
            Path(place).write_text(f"local all all peer\n{access.replace('10.0.0.0/8', '127.0.0.1/32')}\n")
        if not command.startswith(("relax-tune scheduler", "relax-tune worker ")):
            machines.run(machine, command)
            continue
        name = {"head": "head.lan", "gpu1": "gpu1.lan"}[machine]
        for file in ("ca.pem", f"{name}.pem", f"{name}.key"):
            shutil.copy(machines.folder / "desk" / "fleet" / file, machines.folder / machine)
        machines.start(machine, command)
        machines.wait("desk", workers, "lends devices" if machine == "head" else " lent")
    with np.load(machines.folder / "desk" / "outputs.npz") as outputs:
        assert outputs["output0"].shape == (7, 12) and np.allclose(outputs["output0"].sum(1), 1)
