"""`relax-tune tune`: measure missing times, build, save, report."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from relax_tune.database.store import open_store
from relax_tune.errors import UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.program.host_program import parts_of
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.api import TuneResult, tune_result
from relax_tune.tuner.cli.app import NOTHING_MEASURED
from relax_tune.tuner.cli.commands.bench import time_artifacts
from relax_tune.tuner.cli.commands.options import Bounds, Json, Model, SettingFlags, Verify, print_json, with_settings
from relax_tune.tuner.cli.commands.several import tune_command
from relax_tune.tuner.cli.destination import Out, Overwrite, artifact_path, check_destination
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.cli.report.latency import LatencyRow, latency_table
from relax_tune.tuner.cli.report.progress import ProgressView
from relax_tune.tuner.cli.report.quality import show_quality
from relax_tune.tuner.cli.report.table import dispatch_table, task_table
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.job.job import Job, model_key, open_runner, parse_bounds
from relax_tune.tuner.job.progress import TuningSummary
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.cluster.address import check_needed
from relax_tune.tuner.placement.placed_job import names_several
from relax_tune.tuner.quality.activation_loss import with_activation_loss
from relax_tune.tuner.quality.choose import Goal, read_goal, tuned_choice
from relax_tune.tuner.search.registry import check_strategy
from relax_tune.tuner.settings import Policy, Settings

COMPARE_SIZES = (8, 64, 256, 512)
COMPARE_ROUNDS, COMPARE_SECS = 20, 4.0
COMPARED: tuple[Policy, ...] = ("predicted", "library", "generic")


@with_settings("tune")
def tune(
    model: Model,
    *,
    settings: SettingFlags,
    bound: Bounds = None,
    out: Out = None,
    overwrite: Overwrite = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also time the build against its predicted, library and generic forms."),
    ] = False,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """Measure a model's kernels on a device, build its artifact.

    What the database already holds is not measured again: an interrupted job goes on, a finished one measures nothing
    and writes the same artifact.
    """
    chosen, console = settings.load(), make_console(stderr=json)
    _check(chosen, settings, compare)
    path = artifact_path(model, chosen.target, out)
    module = load_model(model, parse_bounds(bound or []), chosen.cache_dtype, trust=chosen.trust_model)
    goal = read_goal(chosen, module)
    check_destination(path, model_key(module), overwrite)
    tell = partial(say, console)
    if names_several(chosen.target):
        return tune_command(module, path, chosen, compare=compare, verify=verify, json=json)
    with (
        contextlib.closing(open_runner(chosen, tell)) as runner,  # no database is made for a device that is not there
        open_store(chosen.db, wait_secs=chosen.wait_secs, notice=tell) as store,
    ):
        job = Job(module, runner.device_info(), store, chosen, verify=verify, notice=tell)
        say(console, f"device: {job.device.kind}, {job.device.name}\ndatabase: {store.where}")
        job, built, work = _tuned(job, goal, runner, console)
        if not any(plan.times for plan in built.plans.values()):
            say(console, _nothing_usable(job))
            raise typer.Exit(NOTHING_MEASURED)
        job.store_plans(built)
        result = tune_result(job, work, built)
        others = {f"all {p}": job.artifact(job.build(p)) for p in COMPARED} if compare else {}
    saved = job.artifact(built).save(path)
    console.print(task_table(result.tasks))
    console.print(dispatch_table(result.tasks))
    show_quality(console, result.quality)
    say(console, _summary(result))
    for name, problem in work.problems:
        say(console, f"note: {name} could not be tuned to the end: {problem}")
    for note in result.notes:
        say(console, f"note: {note}")
    say(console, f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB)")
    latency: tuple[LatencyRow, ...] = ()
    if compare:
        say(console, "comparing builds ...")
        latency = _compare(saved, others, chosen.target, {n: compare_shapes(p) for n, p in _timed(built)})
        console.print(latency_table(latency, "Latency of the whole model, medians"))
    if json:
        print_json({"artifact": str(saved), **result.to_json(), "latency": [row.to_json() for row in latency]})


@contextlib.contextmanager
def _watched(console: Console, job: Job) -> Iterator[None]:
    """Show the progress of a job while it is tuned."""
    with ProgressView([(t.name, len(t.sites)) for t in job.tasks], console) as view:
        job.report = view.report
        yield


def _tuned(job: Job, goal: Goal | None, runner: Runner, console: Console) -> tuple[Job, BuildResult, TuningSummary]:
    """Tune and build a job, or the form of its model that is chosen under a bound."""
    watching = partial(_watched, console)
    if goal is not None:
        (chosen, built), work = tuned_choice(job, goal, runner, partial(say, console), watching)
        return chosen, built, work
    with watching(job):
        work = job.tune(runner)
    return job, with_activation_loss(job, job.tested_build(runner)), work


def _check(chosen: Settings, flags: SettingFlags, compare: bool) -> None:
    files = ("ca", "certificate", "key") if chosen.browser is None else ("ca",)
    check_needed(chosen.scheduler, *(flags.given[name] for name in files))
    if compare and (chosen.scheduler is not None or chosen.browser is not None):
        other = "--scheduler" if chosen.browser is None else "--browser"
        raise UserError(f"--compare times on this machine, found a {other} too; leave one of them out")
    check_strategy(chosen.strategy)


def _summary(result: TuneResult) -> str:
    work, tasks = result.work, len(result.tasks)
    if work.measurements == 0:
        return f"0 new measurements: all that was asked for {tasks} tasks is on record"
    return (
        f"{work.measurements} new measurements of {work.trials} candidates for {tasks} tasks, "
        f"{work.failures} failed, in {work.wall_secs:.0f} s"
    )


def _nothing_usable(job: Job) -> str:
    lines = ["nothing usable was measured; no artifact was written. What failed first, by task:"]
    for name, choices in job.choices.items():
        failure = next(iter(job.store.query(job.target.key, choices.task.key, status="failed")), None)
        why = f"{failure.stage}: {failure.message.splitlines()[0][:200]}" if failure else "nothing on record"
        lines.append(f"  {name}: {why}")
    return "\n".join(lines)


def _timed(built: BuildResult) -> list[tuple[str, Program]]:
    """List the functions whose calls can be timed: straight-line functions that no host program calls."""
    parts = parts_of(built.host_programs)
    return [(n, p) for n, p in built.programs.items() if n not in parts]


def compare_shapes(program: Program) -> list[dict[str, int]]:
    """Choose the shapes at which builds are compared.

    The symbol of the widest range takes 8, 64, 256, 512 as far as its bounds allow, else its bounds. The others take their
    lower bound.
    """
    base = {s.name: max(1, s.lower) for s in program.symbols}
    if not base:
        return [{}]
    top = {s.name: s.upper if s.upper is not None else max(COMPARE_SIZES) for s in program.symbols}
    wide = max(base, key=lambda name: top[name] / base[name])
    sizes = [v for v in COMPARE_SIZES if base[wide] <= v <= top[wide]] or sorted({base[wide], top[wide]})
    return [{**base, wide: value} for value in sizes]


def _compare(
    tuned: Path, others: Mapping[str, Artifact], target: str, shapes: Mapping[str, Sequence[Mapping[str, int]]]
) -> tuple[LatencyRow, ...]:
    """Time the tuned build against others of the same model, made from the same records.

    A process of its own times them, because threads left by tuning would slow some builds more than others.
    shapes: where to time, by function
    """
    with (
        tempfile.TemporaryDirectory(prefix="relax-tune-compare-") as folder,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        paths = {"tuned": tuned} | {name: a.save(Path(folder, f"{name}.rta")) for name, a in others.items()}
        found = [
            pool.submit(time_artifacts, paths, where, COMPARE_ROUNDS, target, COMPARE_SECS, function).result()
            for function, where in shapes.items()
        ]
        return tuple(row for rows in found for row in rows)
