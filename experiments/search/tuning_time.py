"""Speed of a model over the seconds of tuning it, from an empty database, and how these seconds are spent.

    python -m experiments.search.tuning_time --work FOLDER --peer-python PYTHON [--only minilm:c:prior,...] [--trials 64]

A run is a model of `end_to_end/e2e.py`, a target, and `prior` or `plain`: with the packaged prior, which chooses half of a task's first
batch, or without. Each run starts from an empty database, and its curve is computed from its records. A task without a record
counts with the kernel that a build without records dispatches: what the prior predicts, or what the rules guess. That kernel is timed
once, after the tuning. From its first record on, a task counts with its best recorded time. A task's time is the geometric mean over
the shapes at which it is timed; the model's time is the sum over the tasks, each times the number of its launches. The clock starts
before the device is opened and before the model is lowered.

Finished runs stay in the folder and are not repeated, so that each can be run separately. The page shows all runs of the folder; a run
of an earlier commit is put there as `runs/MODEL_TARGET_KIND_before.json`. The decoder is exported by `--peer-python`, which has torch
and onnxscript; MiniLM needs none. Writes results/tuning_time.json, .md, .svg.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

from experiments.end_to_end import e2e
from experiments.harness.pages import RESULTS, environment, write_page
from experiments.search.predicted import prepared
from relax_tune.database.store import MemoryStore, open_store
from relax_tune.ir.core.function import IRModule
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.learn.prior import family_of, packaged_prior
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, TimingPolicy
from relax_tune.tuner.plan.plans import plan_task, shape_of
from relax_tune.tuner.plan.predicted import Predictor
from relax_tune.tuner.report.charts import drawn, lines
from relax_tune.tuner.report.recorded import PAUSE_SECS, RecordedTask, shape_of_record
from relax_tune.tuner.report.subject import Figure
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.check import CheckCases

RUNS = tuple(f"{m}:{p}" for m in ("minilm:c", "minilm:opencl", "decode:c") for p in ("plain", "prior"))
PARTS = (0.9, 0.95, 0.98, 0.99)
SAMPLED_SECS = 0.01
# Phases of the device process, and what the job does while that process is idle, by a folder of the outermost frame there.
DEVICE = {"compile": "compiling", "check": "checking", "prepare": "preparing", "time": "timing"}
WORK = {
    "/tuner/search/": "searching",
    "/tuner/learn/": "searching",
    "/tuner/task/check": "reference results",
    "/tuner/task/": "generating code",
    "/ir/passes/": "lowering",
    "/database/": "database",
}
OTHER = "handing over"
# What the runner's thread does while it holds no batch of the device process.
BETWEEN = {"/measure/unit_lock": "waiting for other jobs", "/measure/codec": "encoding"}
KERNELS, UNTIMED = "kernels on record", "untimed launches and flushing"
COLOURS = ("#0b62a8", "#b84700", "#0a7d5a", "#9b3f8f", "#7a6000", "#2f7f93", "#6b6b6b")
Step = tuple[float, float]
"""Seconds since the start, and the model's seconds from then on."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- where the time goes ------------------------------------------------------------------------------------------------


def work_of(frame: FrameType | None, folders: Mapping[str, str] = WORK) -> str:
    """Name the activity of a thread of the job, by its outermost frame in a known folder."""
    found = OTHER
    while frame is not None:
        name = frame.f_code.co_filename
        found = next((what for part, what in folders.items() if part in name), found)
        frame = frame.f_back
    return found


class Watch(threading.Thread):
    """Samples the activities of the device process and the job's thread, a hundred times a second, until it is closed.

    secs: seconds by activity; batches, kernel_secs: from the answers of the runner
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.secs: Counter[str] = Counter()
        self.batches, self.kernel_secs = 0, 0.0
        self._job, self._over = threading.get_ident(), threading.Event()
        self._runner: Any = None

    def of(self, runner: Any) -> Runner:
        """Watch a local runner; its batches are counted."""
        self._runner, submit = runner, runner.submit

        def counted(batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
            done: Future[list[MeasureResult]] = submit(batch)
            done.add_done_callback(self._count)
            return done

        runner.submit = counted
        watched: Runner = runner
        return watched

    def _count(self, done: Future[list[MeasureResult]]) -> None:
        self.batches += 1
        timings = [t for r in done.result() for t in r.timings]
        self.kernel_secs += sum(sum(t.samples_secs) * t.launches_per_sample for t in timings)

    def run(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(SAMPLED_SECS):
            process = getattr(getattr(self._runner, "transport", None), "_process", None)
            step = None if process is None else process.step()
            doing = DEVICE.get(step.phase) if step is not None else None
            now = time.perf_counter()
            self.secs[doing or self._between()] += now - last
            last = now

    def _between(self) -> str:
        """Name the activity of the job while the device process is idle."""
        frames = sys._current_frames()
        doing = work_of(frames.get(self._job))
        serving = getattr(getattr(self._runner, "_thread", None), "ident", None)
        return doing if doing != OTHER or serving is None else work_of(frames.get(serving), BETWEEN)

    def shares(self, wall: float) -> dict[str, float]:
        """End sampling, and return the share of the wall time by activity; the time of measuring is divided by the recorded times."""
        self._over.set()
        self.join()
        found = dict(self.secs)
        timing = found.pop("timing", 0.0)
        kernels = min(self.kernel_secs, timing)
        found |= {KERNELS: kernels, UNTIMED: timing - kernels}
        return {what: secs / wall for what, secs in sorted(found.items(), key=lambda x: -x[1])}


# -- the curve ----------------------------------------------------------------------------------------------------------


def curve(tasks: Sequence[RecordedTask], untuned: Mapping[str, Sequence[float]], begin: float) -> list[Step]:
    """Return the steps of the model's time over the seconds since `begin`, from 0 on.

    tasks: with their anchors as weights, and the number of their launches as calls
    untuned: by task, seconds at each anchor of the kernel that counts until the first record
    """
    best = {t.key: dict(zip(t.anchors, untuned[t.key], strict=True)) for t in tasks}
    of_task = {t.key: t for t in tasks}
    recorded: set[tuple[str, Any]] = set()
    total = {k: _secs(of_task[k], best[k]) for k in best}
    steps: list[Step] = [(0.0, sum(total.values()))]
    events = sorted((r.measured_at, r.id, t.key, r) for t in tasks for r in t.records if r.measured_at > 0)
    for at, _, key, record in events:
        shape = shape_of_record(record)
        secs = of_task[key].medians.get(record.variant.key, {}).get(shape)
        if secs is None or shape not in best[key]:
            continue
        if (key, shape) in recorded and secs >= best[key][shape]:
            continue
        recorded.add((key, shape))
        best[key][shape] = secs
        total[key] = _secs(of_task[key], best[key])
        steps.append((at - begin, sum(total.values())))
    return steps


def _secs(task: RecordedTask, best: Mapping[Any, float]) -> float:
    """Return the seconds of a task in the model: the geometric mean over its anchors, times its launches."""
    return (task.calls or 1) * math.exp(sum(w * math.log(best[s]) for s, w in task.anchors.items()))


def reached(steps: Sequence[Step], part: float) -> float:
    """Return the seconds from which on the speed is at least a part of the final one."""
    slow = [n for n, (_, secs) in enumerate(steps) if steps[-1][1] / secs < part]
    return steps[slow[-1] + 1][0] if slow else 0.0


# -- a run --------------------------------------------------------------------------------------------------------------


def untuned_times(
    job: DeviceJob, prior: bool, runner: Runner, records: Mapping[str, RecordedTask]
) -> dict[str, list[float]]:
    """Time the kernels that a build without records dispatches, by task and anchor.

    A kernel that fails counts with the slowest recorded form there.
    """
    predictor = Predictor(packaged_prior(family_of(job.hardware)) if prior else None)
    fresh = device_job(job.module, job.device, MemoryStore(), job.settings)
    checks, found = CheckCases(), {}
    for task_variants in fresh.task_variants.values():
        task = task_variants.task
        plan = plan_task(task_variants, (), predictor=predictor)
        policy = TimingPolicy(7, 60, 3 * job.settings.timing_secs, 0.1, (), task.regime)
        cases = tuple(checks.case(task, n) for n in range(2))
        programs = {k: task_variants.program(plan.variants[k]).to_json() for k in plan.plan.variants}
        requests = [MeasureRequest(k, p, cases, task.bindings(), policy, 180.0) for k, p in programs.items()]
        answers = runner.submit(requests).result()
        times = {a.id: [sorted(t.samples_secs)[len(t.samples_secs) // 2] for t in a.timings] for a in answers if a.ok}
        own = []
        for number, point in enumerate(task.domain.points):
            row = times.get(plan.plan.choose(point))
            slowest = max(
                (r[s] for r in records[task.key].medians.values() if (s := shape_of(point)) in r), default=1.0
            )
            own.append(row[number] if row else slowest)
        found[task.key] = own
    return found


def recorded(job: DeviceJob) -> list[RecordedTask]:
    """Return the tasks of a job with their records, anchors and launches."""
    found = []
    for t in job.tasks:
        weights = {shape_of(p): w for p, w in zip(t.domain.points, t.domain.weights, strict=True)}
        records = job.records(t.key, t.regime)
        found.append(RecordedTask(t.key, t.name, records, calls=len(t.sites), weights=weights))
    return found


def module_of(model: str, work: Path, python: str | None) -> IRModule:
    if model == "minilm":
        return e2e.imported(model, work)
    if python is None:
        raise SystemExit(f"{model}: expected --peer-python PYTHON, of an environment with torch and onnxscript")
    return prepared(model, work, python)


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tune a model from nothing, and return its curve."""
    model, target, kind = name.split(":")
    module, before = module_of(model, args.work, args.peer_python), environment()
    database = args.work / "runs" / f"{name.replace(':', '_')}.db"
    for path in database.parent.glob(f"{database.name}*"):  # of a run that was cut short
        path.unlink()
    settings = Settings(target=target, trials=args.trials, caches=args.caches, max_minutes=args.minutes)
    with open_store(f"sqlite:///{database}") as store:
        watch, begin = Watch(), time.time()
        watch.start()
        runner = watch.of(open_runner(settings))
        try:
            job = device_job(module, runner.device_info(), store, settings)
            if kind == "plain":
                job.__dict__["predictor"] = Predictor()
            summary = job.tune(runner, lambda p: say(f"  {p.task[:48]:48} {p.trials:4}"))
            wall = time.time() - begin
            shares, batches = watch.shares(wall), watch.batches
            tasks = recorded(job)
            untuned = untuned_times(job, kind == "prior", runner, {t.key: t for t in tasks})
        finally:
            runner.close()
    steps = curve(tasks, untuned, begin)
    gaps = [b[0] - a[0] for a, b in zip(steps, steps[1:])]
    counts = {"tasks": len(tasks), "trials": summary.trials, "compiles": summary.compiles, "batches": batches}
    before["load after"] = environment()["load"]
    return {
        **{
            "untuned_secs": untuned,
            "environment": before,
            "settings": {"trials": args.trials, "caches": args.caches},
            **counts,
        },
        **{
            "failures": summary.failures,
            "wall_secs": wall,
            "shares": shares,
            "paused": max(gaps, default=0) > PAUSE_SECS,
        },
        **{"curve": steps, "start": steps[-1][1] / steps[0][1], "reached": {str(p): reached(steps, p) for p in PARTS}},
    }


# -- the page -----------------------------------------------------------------------------------------------------------


def page(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the page of all runs."""
    lines_ = [
        "# Speed over the time of tuning",
        "",
        "Written by `experiments/search/tuning_time.py`. Every run starts from an empty database; `prior`: tasks without a record count "
        "with what the shipped prior predicts, `plain`: with what the rules guess. Speed is relative to the speed at the end of the run. "
        "Seconds are wall clock, from before the device is opened. `before`: the same run of an earlier commit, named above.",
        "",
        "![Speed over seconds of tuning](tuning_time.svg)",
        "",
        "| run | caches | tasks | candidates | seconds | candidates/s | speed at 0 s | "
        + " | ".join(f"s to {p:.0%}" for p in PARTS)
        + " |",
        "|---" * (7 + len(PARTS)) + "|",
    ]
    for name, r in runs.items():
        cells = [name, r["settings"]["caches"], r["tasks"], r["trials"], f"{r['wall_secs']:.0f}"]
        cells += [f"{r['trials'] / r['wall_secs']:.2f}", f"{r['start']:.2f}"]
        cells += [f"{r['reached'][str(p)]:.0f}" for p in PARTS]
        lines_.append("| " + " | ".join(map(str, cells)) + " |")
    what = list(dict.fromkeys(w for r in runs.values() for w in r["shares"]))
    what.sort(key=lambda w: -sum(r["shares"].get(w, 0.0) for r in runs.values()))
    lines_ += [
        "",
        "## Shares of the wall time",
        "",
        "| run | " + " | ".join(what) + " |",
        "|---" * (1 + len(what)) + "|",
    ]
    for name, r in runs.items():
        lines_.append(f"| {name} | " + " | ".join(f"{r['shares'].get(w, 0.0):.1%}" for w in what) + " |")
    lines_ += [
        "",
        f"`{KERNELS}` are the timed launches; `{UNTIMED}` is the rest of timing: first launches, launches that warm caches, loading of "
        f"inputs, evicting of weights. What follows {', '.join(f'`{w}`' for w in DEVICE.values() if w != 'timing')} is done by the "
        f"job while the device process waits; `{OTHER}` is the rest.",
        "",
    ]
    return lines_


def picture(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the picture of the curves as SVG."""
    rows = []
    for name, r in runs.items():
        end = r["curve"][-1][1]
        known: dict[float, float] = {}
        for secs, time_ in (*r["curve"], (r["wall_secs"], end)):
            known[round(max(secs, 1.0), 1)] = end / time_
        rows += [{"x": x, "y": y, "series": name} for x, y in known.items()]
    axes = {"x": "seconds of tuning (s, log scale)", "y": "speed over that of the end (ratio)"}
    chart = lines(rows, **axes, series=list(runs), step=True, log_x=True)
    svg = drawn(Figure("tuning-time", "Speed over the time of tuning", "", chart))[0]
    shown = {"--ink": "#222222", "--line": "#cccccc"} | {f"--c{n}": c for n, c in enumerate(COLOURS, 1)}
    svg = re.sub(r"var\((--\w+)\)", lambda m: shown[m[1]], svg)
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--only", default=",".join(RUNS), help="model:target:prior or model:target:plain, by commas")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--minutes", type=float, help="limit of each run")
    parser.add_argument("--caches", default="model", choices=("warm", "model"))
    args = parser.parse_args()
    kept = args.work / "runs"
    kept.mkdir(parents=True, exist_ok=True)
    for name in args.only.split(","):
        if not re.fullmatch(r"(minilm|prefill|decode):[^:_]+:(plain|prior)", name):
            parser.error(f"--only: expected minilm, prefill or decode, a target, and plain or prior, got {name!r}")
        path = kept / f"{name.replace(':', '_')}.json"
        if not path.exists():
            say(f"{name}:")
            found = run(name, args)
            path.write_text(json.dumps(found))
    runs = {p.stem.replace("_", ":"): json.loads(p.read_text()) for p in sorted(kept.glob("*.json"))}
    write_page("tuning_time", page(runs), {"runs": runs}, {name: r["environment"] for name, r in runs.items()})
    (RESULTS / "tuning_time.svg").write_text(picture(runs) + "\n")


if __name__ == "__main__":
    main()
