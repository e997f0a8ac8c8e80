"""Queue jobs for several services, and kill processes at random: services, processes of jobs, their devices, database sessions.

`python -m experiments.fleet.job_service --jobs 200 --services 5 [--db postgresql://...]` (`make test-jobs`) prints one JSON line, and fails
unless each job is done once and no candidate was measured twice. Jobs are real ones, of a few small models.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from sqlalchemy import text
from tests.tuner.job.job_processes import small_model, work_done

import relax_tune as rt
from relax_tune.database.jobs.queue import JobQueue, open_queue
from relax_tune.database.store import open_store

PROCESSES = ("service", "job", "device")


def start_service(folder: Path, db: str, number: int, clock: str) -> subprocess.Popen[bytes]:
    """Start a service in a process group; its output is appended to a file. clock: hours by which its clock is off"""
    off = folder / f"clock{clock}"
    off.mkdir(exist_ok=True)
    shift = f"import time\nreal = time.time\ntime.time = lambda: real() + 3600 * {float(clock or 0)}\n"
    (off / "sitecustomize.py").write_text(shift)  # for the service and all that it starts
    paths = os.pathsep.join([str(off), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from relax_tune.tuner.cli.start import main; main()", "jobs", "work"]
    command += ["--db", db, "--files", str(folder / "files"), "--device", "c", "--hold-secs", "30"]
    own = {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "RELAX_TUNE_CACHE": str(folder / "cache"),
    }
    with open(folder / f"service-{number}.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=own, cwd=folder, start_new_session=True)


def victim(services: list[subprocess.Popen[bytes]], kind: str, dice: random.Random) -> int | None:
    """Choose a process of this kind."""
    if kind == "service":
        return dice.choice(services).pid
    word = "service.child" if kind == "job" else "device_process.start"
    found = []
    for service in services:
        try:
            below = psutil.Process(service.pid).children(recursive=True)
            found += [p.pid for p in below if any(word in part for part in p.cmdline())]
        except psutil.Error:
            continue
    return dice.choice(found) if found else None


def cut_sessions(queue: JobQueue) -> bool:
    """End every session of a PostgreSQL database but our own."""
    if queue._engine.dialect.name != "postgresql":
        return False
    with queue._engine.begin() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
    return True


def main() -> None:
    """Run the experiment in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--services", type=int, default=5)
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--kill-secs", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--db")
    parser.add_argument("--clocks", default="", help="hours that clocks of services are off, such as +1,-1,+0")
    given = parser.parse_args()
    clocks = given.clocks.split(",")
    dice, killed = random.Random(given.seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="relax-tune-jobs-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        db = given.db or f"sqlite:///{folder / 'q.db'}"
        models = []
        for number in range(given.models):
            (folder / str(number)).mkdir()
            models.append(small_model(folder / str(number), number, 24 + number))
        began = time.monotonic()
        for number in range(given.jobs):
            rt.submit(
                models[number % given.models],
                db=db,
                files=str(folder / "files"),
                target="c",
                effort="quick",
                trials=2,
                seed=number // given.models,
                bounds={"n": (1, 8)},
                attempts=20,
                self_test=False,
            )
        submitted = time.monotonic() - began
        services = [start_service(folder, db, n, clocks[n % len(clocks)]) for n in range(given.services)]
        try:
            with open_queue(db) as queue:
                next_kill = time.monotonic() + given.kill_secs
                while any(not job.ended for job in queue.submitted()):
                    time.sleep(0.5)
                    for n, service in enumerate(services):
                        if service.poll() is not None:
                            services[n] = start_service(folder, db, n, clocks[n % len(clocks)])
                    if time.monotonic() < next_kill:
                        continue
                    next_kill += dice.uniform(0, 2 * given.kill_secs)
                    kind = dice.choice((*PROCESSES, "sessions"))
                    if kind == "sessions":
                        killed[kind] += cut_sessions(queue)
                    elif (pid := victim(services, kind, dice)) is not None:
                        os.kill(pid, signal.SIGKILL)
                        killed[kind] += 1
                jobs = queue.submitted()
        finally:
            for service in services:
                service.terminate()
            for service in services:
                service.wait()
        said = "".join(path.read_text() for path in folder.glob("service-*.log"))
        done = Counter(line.split()[1].rstrip(":") for line in said.splitlines() if line.endswith(": done"))
        with open_store(db, read_only=True) as store:
            trials = work_done(store).trials
        found = {
            "jobs": len(jobs),
            "states": Counter(job.state for job in jobs),
            "runs": sum(job.runs for job in jobs),
            "losses": sum(job.losses for job in jobs),
            "killed": killed,
            "most_said_done": max(done.values(), default=0),
            "candidates": len(trials),
            "measured_twice": sum(n > 1 for n in trials.values()),
            "submit_secs": round(submitted, 1),
            "wall_secs": round(time.monotonic() - began, 1),
        }
        print(json.dumps(found))
        whole = set(found["states"]) == {"done"} and found["most_said_done"] == 1 and not found["measured_twice"]
        sys.exit(
            0 if whole else f"expected each job done once: see {[j.message for j in jobs if j.state != 'done'][:5]}"
        )


if __name__ == "__main__":
    main()
