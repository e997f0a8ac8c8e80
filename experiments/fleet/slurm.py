"""Run the recipes of `deploy/slurm` on a one-node SLURM that this script starts, and write the transcript (`make test-slurm`).

It needs root, Debian's packages slurm-wlm and munge, and dask-jobqueue. SLURM's daemons have separate ports, keys and folders, and end
with the script. Parts: workers through dask-jobqueue; a job array of `relax-tune worker`, with one task requeued while its batch runs;
an array of `relax-tune jobs work`, with one task requeued too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.tuner.job.job_processes import small_model, work_done

from experiments.harness.pages import ROOT, environment, write_page
from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.store import open_store
from relax_tune.errors import DatabaseError
from relax_tune.tuner.measure.cluster.client import SchedulerConnection

# Other work on this machine changes the reference times.
TOLERANCE = "1000"
RECIPES = ROOT / "deploy" / "slurm"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo")
CONFIG = """ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/run/munge.socket
SlurmctldPort=16817
SlurmdPort=16818
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=5
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Transcript:
    """The commands that were run and their output, as a page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)

    def plain(self, text: str) -> str:
        """Return a text without this machine's folders."""
        text = text.replace(str(self.folder), "$WORK").replace(str(ROOT), "$RELAX_TUNE")
        text = re.sub(r"(PATH=\$RELAX_TUNE[^:\s]*):\S+", r"\1:$PATH", text)
        return text.replace(f"{Path.home()}/", "~/")

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command in the folder; return its output."""
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=600)
        shown = self.plain(" ".join(command))
        out = self.plain(done.stdout + done.stderr).rstrip()
        self.say(f"```console\n$ {shown}\n{out}\n```" if out else f"```console\n$ {shown}\n```")
        if check and done.returncode:
            raise SystemExit(f"{shown}: exit code {done.returncode}")
        return done.stdout


def until(holds: Callable[[], bool], what: str, secs: float = 240.0) -> None:
    """Wait until something holds."""
    give_up = time.monotonic() + secs
    while not holds():
        if time.monotonic() > give_up:
            raise SystemExit(f"expected {what} within {secs:g} s")
        time.sleep(0.3)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """Start munged, slurmctld and slurmd, and end them."""
    for name in ("run", "key", "state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "key" / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    (folder / "key").chmod(0o700)
    host = os.uname().nodename
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder))
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munged = ["munged", "--force", "--foreground", f"--key-file={key}", f"--socket={folder}/run/munge.socket"]
    munged += [f"--pid-file={folder}/run/munged.pid", f"--seed-file={folder}/key/seed"]
    running = []
    try:
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", host]):
            with open(folder / f"{command[0]}.log", "wb") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
            time.sleep(1.5)
        idle = ["sinfo", "-h", "-o", "%T"]
        until(lambda: subprocess.run(idle, capture_output=True, text=True).stdout.strip() == "idle", "an idle node", 60)
        yield
    finally:
        subprocess.run(["scancel", "-u", "root"], capture_output=True)
        time.sleep(8)  # KillWait and a little more
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def running_tasks() -> list[str]:
    """List running tasks as SLURM names them."""
    done = subprocess.run(["squeue", "-h", "-t", "R", "-o", "%i"], capture_output=True, text=True)
    return done.stdout.split()


def has_records(path: Path) -> bool:
    """Tell whether a database has a measurement."""
    try:
        with open_store(str(path), create=False, read_only=True) as store:
            return any(store.count(target.key) for target in store.targets())
    except DatabaseError:  # not made yet
        return False


def tune_through(say: Transcript, address: str, out: str, disturb: Callable[[], None] | None = None) -> None:
    """Tune through a scheduler while an event happens, and show the outcome."""
    command = [
        "relax-tune",
        "tune",
        "small.onnx",
        "--target",
        "c",
        "--effort",
        "quick",
        "--trials",
        "8",
        "--bound",
        "n=1:8",
    ]
    command += ["--db", f"{out}.db", "--scheduler", address, "--out", f"{out}.rta", "--wait-secs", "400"]
    with open(say.folder / f"{out}.log", "wb") as log:
        process = subprocess.Popen(command, cwd=say.folder, stdout=log, stderr=log)
    if disturb is not None:
        try:
            until(lambda: process.poll() is not None or has_records(say.folder / f"{out}.db"), "records")
        except SystemExit as error:
            process.kill()
            raise SystemExit(f"{error}; tune said: {(say.folder / f'{out}.log').read_text()[-2000:]}") from None
        disturb()
    code = process.wait(600)
    text = (say.folder / f"{out}.log").read_text()
    notes = [
        line
        for line in text.splitlines()
        if line.startswith(("device", "worker", "wrote", "waiting")) or "new measure" in line
    ]
    say.say("```console\n$ " + " ".join(command) + "\n" + "\n".join(notes) + f"\n```\nexit code {code}")
    if code:
        raise SystemExit(text)
    with open_store(str(say.folder / f"{out}.db"), read_only=True) as store:
        trials = work_done(store).trials
        (target,) = store.targets()
        units = {(u.worker.partition("#")[0], u.measurements) for u in store.units(target.key)}
    say.say(
        f"{len(trials)} candidates, {sum(n > 1 for n in trials.values())} of them measured twice; records by worker: {sorted(units)}"
    )
    if any(n > 1 for n in trials.values()):
        raise SystemExit("expected no candidate measured twice")


def lent(address: str) -> int:
    """Count the units that a scheduler lists."""
    connection = SchedulerConnection(address, None, 30.0)
    try:
        return len(connection.devices())
    finally:
        connection.close()


def through_jobqueue(say: Transcript, prologue: str) -> None:
    """Workers through dask-jobqueue."""
    say.say("\n## Workers through dask-jobqueue\n")
    command = [
        sys.executable,
        str(RECIPES / "fleet.py"),
        "--device",
        "c",
        "--jobs",
        "1",
        "--port",
        "18786",
        "--memory",
        "1GB",
    ]
    command += [
        "--sbatch=--requeue",
        "--tolerance",
        TOLERANCE,
        "--prologue",
        prologue,
        "--logs",
        str(say.folder / "slurm-logs"),
    ]
    with open(say.folder / "fleet.log", "wb") as log:
        fleet = subprocess.Popen(command, cwd=say.folder, stdout=log, stderr=log)
    try:
        address = "tls://127.0.0.1:18786"
        until(lambda: "SBATCH" in (say.folder / "fleet.log").read_text() or fleet.poll() is not None, "the fleet", 60)
        script = say.plain((say.folder / "fleet.log").read_text())
        say.say(
            "```console\n$ python deploy/slurm/fleet.py --device c --jobs 1 --sbatch=--requeue ...\n"
            + script.strip()
            + "\n```"
        )
        until(lambda: lent(address) == 1, "a worker from SLURM")
        say.run("squeue")
        say.run("relax-tune", "workers", address)

        def requeue() -> None:
            (task,) = running_tasks()
            say.run("scontrol", "requeue", task)

        tune_through(say, address, "jobqueue", requeue)
        say.run("squeue")
    finally:
        fleet.send_signal(signal.SIGTERM)
        fleet.wait(60)
    until(lambda: not running_tasks(), "no task left", 60)


def through_array(say: Transcript, environment: str) -> None:
    """A job array of workers, one requeued."""
    say.say("\n## A job array of workers, one requeued while it measures\n")
    with open(say.folder / "scheduler.log", "wb") as log:
        scheduler = subprocess.Popen(
            ["relax-tune", "scheduler", "--port", "18787"], cwd=say.folder, stdout=log, stderr=log
        )
    address = "tls://127.0.0.1:18787"
    try:
        script = str(RECIPES / "workers.sbatch")
        words = [script, "--tolerance", TOLERANCE]
        # one unit here, so two tasks would contend for it: the second waits for the lock, as the transcript shows
        number = re.findall(
            r"\d+", say.run("sbatch", "--array=0-0", f"--export=ALL,SCHEDULER={address}{environment}", *words)
        )[-1]
        until(lambda: lent(address) == 1, "a worker from SLURM")
        say.run("squeue")
        tune_through(say, address, "array", lambda: say.run("scontrol", "requeue", f"{number}_0") and None)
        say.run("scontrol", "-o", "show", "job", f"{number}_0")
        say.run("scancel", number)
        until(lambda: not running_tasks(), "no task left", 60)
    finally:
        scheduler.terminate()
        scheduler.wait(30)


def services(say: Transcript, environment: str) -> None:
    """A job array of services, one requeued."""
    say.say("\n## A job array of services for submitted jobs, one requeued\n")
    for n in range(4):
        (say.folder / f"m{n}").mkdir()
        small_model(say.folder / f"m{n}", n, 24 + n)
    models = [f"m{n}/small.onnx" for n in range(4)]
    submit = [
        "relax-tune",
        "jobs",
        "submit",
        *models,
        "--db",
        "jobs.db",
        "--target",
        "c",
        "--effort",
        "quick",
        "--trials",
        "3",
    ]
    say.run(*submit, "--bound", "n=1:8")
    export = f"--export=ALL,RELAX_TUNE_DB=sqlite:///{say.folder}/jobs.db{environment}"
    number = re.findall(r"\d+", say.run("sbatch", "--array=0-1", export, str(RECIPES / "service.sbatch")))[-1]
    with open_queue(str(say.folder / "jobs.db")) as queue:
        until(
            lambda: sum(j.state == "running" and bool(j.values("progress")) for j in queue.submitted()) == 2,
            "two services at work",
        )
        say.run("squeue")
        say.run("scontrol", "requeue", f"{number}_1")
        until(lambda: all(j.ended for j in queue.submitted()), "all jobs ended")
        say.run("relax-tune", "jobs", "list", "--db", "jobs.db")
        found = queue.submitted()
    say.say(
        f"states {sorted(j.state for j in found)}, runs {[j.runs for j in found]}, losses {[j.losses for j in found]}"
    )
    if any(j.state != "done" for j in found):
        raise SystemExit([j.message for j in found])
    with open_store(str(say.folder / "jobs.db"), read_only=True) as store:
        trials = work_done(store).trials
    say.say(f"{len(trials)} candidates, {sum(n > 1 for n in trials.values())} of them measured twice")


def main() -> None:
    """Run all parts; write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write the transcript")
    given = parser.parse_args()
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        raise SystemExit(f"expected root and the packages slurm-wlm and munge, got no {', '.join(missing) or 'root'}")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in ("TERM", "COLUMNS"):
        os.environ.pop(name, None)
    os.environ["COLUMNS"] = "150"
    before = environment()
    with tempfile.TemporaryDirectory(prefix="relax-tune-slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(
            folder / "tmp"
        )  # the lock of this machine's unit lies there: other work is not waited for
        say = Transcript(folder)
        small_model(folder)
        prologue = f"export PATH={os.environ['PATH']} PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
        say.say(
            "# SLURM\n\nWhat `python -m experiments.fleet.slurm` did on a one-node SLURM from Debian's packages (`make test-slurm`).\n"
        )
        with slurm(folder):
            say.run("sinfo", "--version")
            say.run("sinfo")
            try:
                through_jobqueue(say, prologue)
                through_array(say, "")
                services(say, "")
            finally:
                if given.out:
                    page = "\n".join(say.lines).splitlines()
                    write_page(given.out.stem, page, None, before, given.out.parent, quiet=True)


if __name__ == "__main__":
    main()
