"""Kill processes of a fleet at random: scheduler, workers, their supervisors and devices, services and jobs.

    python -m experiments.fleet.random_kills --kills 30 --jobs 5 --workers 3 --seed 0

Jobs are submitted to a PostgreSQL server of their own, run by services, and measured by workers through a scheduler; commands that end are
started again, as systemd does. The same jobs run once more without kills. Checks: no traceback, no failed job, no process that is left
after all commands were told to end, no locked unit, no used port, no temporary file, no damaged or doubled record, and the same candidates
of each function as without kills. With three trials a function, no candidate is chosen by records of other jobs, whose order the kills
change. Writes `results/random_kills.md` and `.json`; the exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout
from tests.support import postgres
from tests.tuner.job.job_processes import JobProcess, small_model, work_done

import relax_tune as rt
from experiments.harness.pages import environment, write_page
from relax_tune.database.jobs.queue import JobQueue, open_queue
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.store import open_store
from relax_tune.errors import MeasureError, TryAgainLater
from relax_tune.tuner.measure.cluster.processes import free_port

KINDS = {
    "scheduler": "measure.cluster.scheduler",
    "worker": "measure.cluster.worker",
    "device": "device_process.start",
    "job": "service.child",
}
"""Killed processes by a part of their command line; `supervisor` and `service` are commands themselves."""
TRIALS, LAYERS = 3, 5
"""Trials of a function, and hidden layers of a model. Four trials or more begin with candidates that were fast in earlier jobs."""
Candidate = tuple[str, str]
"""Workload and variant."""


@dataclass
class Command:
    """A command that is started again whenever it ends."""

    kind: str
    folder: Path
    arguments: tuple[str, ...]
    runs: list[JobProcess] = field(default_factory=list)

    def tend(self) -> None:
        """Start the command, unless it runs."""
        if not self.runs or self.runs[-1].process.poll() is not None:
            self.runs.append(JobProcess(self.folder, *self.arguments, log=f"{self.kind}{len(self.runs)}"))

    def processes(self, kind: str) -> list[int]:
        """Return the processes of a kind among those that the command started."""
        if kind in ("supervisor", "service"):
            is_kind = (self.kind == "service") == (kind == "service")
            return [self.runs[-1].process.pid] if is_kind else []
        return [pid for pid, command in self.alive().items() if KINDS[kind] in command]

    def alive(self) -> dict[int, str]:
        """Return the command lines of all processes that were started below the command, by id: their variables name its folder."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.folder) in value for value in process.environ().values()):
                    found[process.pid] = " ".join(process.cmdline())
        return found


class Fleet:
    """A scheduler, workers and services, each with a temporary folder of its own, so that they share no unit."""

    def __init__(self, folder: Path, db: str, workers: int, services: int) -> None:
        self.port = free_port("127.0.0.1", 0)
        address = f"tls://127.0.0.1:{self.port}"
        work = ("jobs", "work", "--db", db, "--files", str(folder / "files"), "--scheduler", address)
        every = {"scheduler": ("scheduler", "--port", str(self.port))}
        for n in range(workers):
            every[f"worker-{n}"] = ("worker", address, "--device", "c", "--name", f"w{n}", "--tolerance", "1e6")
        for n in range(services):
            every[f"service-{n}"] = (*work, "--wait-secs", "120", "--hold-secs", "20")
        self.commands = []
        for name, arguments in every.items():
            (folder / name).mkdir()
            self.commands.append(Command(name.split("-")[0], folder / name, arguments))

    def tend(self) -> None:
        for command in self.commands:
            command.tend()

    def kill(self, dice: random.Random) -> str | None:
        """Kill a process; return its kind, or None if there is none of the chosen kind."""
        kind = dice.choice(("supervisor", "service", *KINDS))
        pids = [pid for command in self.commands for pid in command.processes(kind)]
        if not pids:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(sorted(pids)), signal.SIGKILL)
        return kind

    def end(self) -> list[str]:
        """End all commands; return what they left behind."""
        runs = [command.runs[-1] for command in reversed(self.commands)]
        for run in runs:
            run.process.terminate()
        problems = []
        for command, run in zip(reversed(self.commands), runs, strict=True):
            try:
                code = run.wait(60)
            except Exception:
                problems.append(f"{command.kind}: it does not end at SIGTERM")
            else:
                problems += [f"{command.kind}: exit code {code}"] if code not in (0, 130, 143, -15) else []
        for command in self.commands:
            give_up = time.monotonic() + 30
            while (left := command.alive()) and time.monotonic() < give_up:
                time.sleep(0.2)
            problems += [f"{command.kind}: the process {line[:200]} is left" for line in left.values()]
            problems += _left_files(command)
        try:
            free_port("127.0.0.1", self.port)
        except MeasureError as error:
            problems.append(str(error))
        return problems

    def kill_all(self) -> None:
        """Kill whatever is left."""
        for command in self.commands:
            for pid in command.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def tracebacks(self) -> list[str]:
        """Return the ends of the outputs with a traceback."""
        texts = {f"{c.kind}{n}": r.said() + r.output.read_text() for c in self.commands for n, r in enumerate(c.runs)}
        return [
            f"{name}: {text[text.index('Traceback') :][-1500:]}" for name, text in texts.items() if "Traceback" in text
        ]


def _left_files(command: Command) -> Iterator[str]:
    temporary = command.folder / "tmp"
    for path in sorted(temporary.iterdir()):
        if path.name.startswith("relax-tune-unit-"):
            with contextlib.suppress(Timeout):
                if path.suffix == ".lock":
                    FileLock(path).acquire(timeout=0)
                continue
        yield f"{command.kind}: {path.name} is left in its temporary folder"


@dataclass(frozen=True)
class Outcome:
    """Result of a run of all jobs. candidates: times that each was tried; shapes: number of (workload, variant, shape)"""

    candidates: Counter[Candidate]
    shapes: int
    jobs: list[SubmittedJob]
    killed: Counter[str]
    problems: list[str]
    secs: float

    @property
    def twice(self) -> int:
        """Number of candidates that were tried more than once."""
        return sum(count > 1 for count in self.candidates.values())


def submit(folder: Path, db: str, jobs: int) -> None:
    for number in range(jobs):
        (folder / f"model-{number}").mkdir()
        model = small_model(folder / f"model-{number}", number, 24 + LAYERS * number, LAYERS)
        rt.submit(
            model, db=db, files=str(folder / "files"), target="c", effort="quick", trials=TRIALS, strategy="random",
            seed=0, bounds={"n": (1, 16)}, attempts=100, self_test=False,
        )  # fmt: skip


def run(db: str, given: argparse.Namespace, kills: int) -> Outcome:
    """Run all jobs, and kill at most this many processes meanwhile."""
    dice, killed, began = random.Random(given.seed), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="relax-tune-kills-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        submit(folder, db, given.jobs)
        fleet = Fleet(folder, db, given.workers, given.services)
        problems = []
        with contextlib.ExitStack() as stack:
            stack.callback(fleet.kill_all)
            queue = stack.enter_context(open_queue(db))
            next_kill = time.monotonic() + given.kill_secs
            while open_jobs := _open_jobs(queue):
                fleet.tend()
                time.sleep(0.2)
                if time.monotonic() > next_kill and sum(killed.values()) < kills:
                    next_kill = time.monotonic() + dice.uniform(0.2, 2 * given.kill_secs)
                    if (kind := fleet.kill(dice)) is not None:
                        killed[kind] += 1
                        print(
                            f"{time.monotonic() - began:.0f} s: killed a {kind}; {open_jobs} jobs are open", flush=True
                        )
                if time.monotonic() - began > given.most_secs:
                    problems.append(f"after {given.most_secs:g} s {open_jobs} jobs are open")
                    break
            fleet.tend()
            time.sleep(2)
            jobs = queue.submitted()
            logs = {job.id: "".join(part for _, _, part in queue.log(job.id)) for job in jobs}
            problems += fleet.end()
        problems += [f"job {j.name}: {j.state}: {j.message:.300}" for j in jobs if j.state != "done"]
        problems += [
            f"log of job {id}: {t[t.index('Traceback') :][-1500:]}" for id, t in logs.items() if "Traceback" in t
        ]
        problems += fleet.tracebacks()
        with open_store(db, read_only=True) as store:
            done = work_done(store)
    return Outcome(done.trials, len(done.points), jobs, killed, problems, time.monotonic() - began)


def _open_jobs(queue: JobQueue) -> int:
    while True:
        with contextlib.suppress(TryAgainLater):
            return sum(not job.ended for job in queue.submitted())


def lacking(run: Outcome, other: Outcome) -> list[Candidate]:
    """Return the candidates of a run that the other one did not measure."""
    return sorted(run.candidates.keys() - other.candidates.keys())


def functions(run: Outcome) -> int:
    return len({workload for workload, _ in run.candidates})


def page(calm: Outcome, struck: Outcome, problems: list[str], given: argparse.Namespace) -> list[str]:
    killed = ", ".join(f"{count} {kind}" for kind, count in sorted(struck.killed.items()))
    return [
        "# Random kills in a fleet",
        "",
        f"{given.jobs} submitted jobs, {given.workers} workers of one scheduler, {given.services} services, PostgreSQL; "
        f"`python -m experiments.fleet.random_kills --seed {given.seed}`. `supervisor` is the command `scheduler` or `worker`, whose "
        "child is the `scheduler` or `worker`; `device` is a device process of a worker.",
        "",
        "| | without kills | with kills |",
        "|---|---|---|",
        f"| processes killed | 0 | {sum(struck.killed.values())}: {killed} |",
        f"| jobs done | {sum(j.state == 'done' for j in calm.jobs)} | {sum(j.state == 'done' for j in struck.jobs)} |",
        f"| runs of jobs | {sum(j.runs for j in calm.jobs)} | {sum(j.runs for j in struck.jobs)} |",
        f"| functions | {functions(calm)} | {functions(struck)} |",
        f"| candidates on record | {len(calm.candidates)} | {len(struck.candidates)} |",
        f"| candidates that the other run lacks | {len(lacking(calm, struck))} | {len(lacking(struck, calm))} |",
        f"| times at shapes on record | {calm.shapes} | {struck.shapes} |",
        f"| candidates measured twice | {calm.twice} | {struck.twice} |",
        f"| time | {calm.secs:.0f} s | {struck.secs:.0f} s |",
        "",
        *([f"* {problem}" for problem in problems] or ["No check failed."]),
    ]


def main() -> int:
    """Run the experiment in temporary folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--services", type=int, default=2)
    parser.add_argument("--kill-secs", type=float, default=5.0, help="mean time between two kills")
    parser.add_argument("--most-secs", type=float, default=3000.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    facts: dict[str, Any] = environment()
    outcomes = []
    for kills in (given.kills, 0):
        with postgres.server() as url:
            outcomes.append(run(url + "postgres", given, kills))
    struck, calm = outcomes
    problems = [*(f"without kills: {p}" for p in calm.problems), *struck.problems]
    for one, other, where in ((calm, struck, "with"), (struck, calm, "without")):
        problems += [f"{workload} {variant}: not measured {where} kills" for workload, variant in lacking(one, other)]
    problems += [f"{n} candidates were measured twice" for n in (calm.twice, struck.twice) if n]
    record = {
        "seed": given.seed,
        "killed": struck.killed,
        "problems": problems,
        "candidates": len(struck.candidates),
    }
    write_page("random_kills", page(calm, struck, problems, given), record, facts)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
