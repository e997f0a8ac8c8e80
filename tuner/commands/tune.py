"""`relax-tune tune`: measure what is missing, build, save, report."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from relax_tune.database.records import Measurement
from relax_tune.database.store import open_store
from relax_tune.errors import UserError
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program import Program
from relax_tune.runtime.vm import Executor
from relax_tune.tuner.build import BuildResult
from relax_tune.tuner.cli import NOTHING_MEASURED
from relax_tune.tuner.commands.options import (
    Bounds,
    Database,
    Effort,
    Json,
    Model,
    Out,
    Target,
    artifact_path,
    find_model,
    print_json,
)
from relax_tune.tuner.job import Job, load_model, open_runner, parse_bounds
from relax_tune.tuner.loop import TuneResult
from relax_tune.tuner.report.console import make_console, say
from relax_tune.tuner.report.latency import LatencyRow, compare_latency, latency_table
from relax_tune.tuner.report.progress import ProgressView
from relax_tune.tuner.report.table import TaskRow, dispatch_table, task_rows, task_table
from relax_tune.tuner.search.registry import STRATEGIES
from relax_tune.tuner.settings import load_settings

COMPARE_SIZES = (8, 64, 256, 512)
COMPARE_ROUNDS, COMPARE_SECS = 20, 4.0


def tune(
    model: Model,
    target: Target = None,
    db: Database = None,
    bound: Bounds = None,
    effort: Effort = None,
    trials: Annotated[int | None, typer.Option(help="Candidates per task, instead of the effort's number.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every random choice. [default: 0]")] = None,
    strategy: Annotated[
        str | None, typer.Option(help=f"Search strategy: {', '.join(STRATEGIES)}. [default: evolution]")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Measure on the workers of this Dask scheduler.")
    ] = None,
    out: Out = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also time the build against its all-library and all-generic forms.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure kernels for a model on a device, then build its artifact.

    What the database already holds is not measured again: an interrupted job goes on, a finished one measures nothing
    and writes the same artifact.
    """
    settings = load_settings(
        {
            "target": target,
            "db": db,
            "effort": effort,
            "trials": trials,
            "seed": seed,
            "strategy": strategy,
            "scheduler": scheduler,
        }
    )
    if compare and settings.scheduler is not None:
        raise UserError("--compare times on this machine, found a --scheduler too; leave one of them out")
    if settings.strategy not in STRATEGIES:
        raise UserError(f"--strategy wants one of {', '.join(STRATEGIES)}; found {settings.strategy!r}")
    path = artifact_path(model, settings.target, out)
    console = make_console(stderr=json)
    module = load_model(find_model(model), parse_bounds(bound or []))
    with open_store(settings.db) as store:
        with contextlib.closing(open_runner(settings)) as runner:
            job = Job(module, runner.device_info(), store, settings)
            say(console, f"device: {job.device.kind}, {job.device.name}")
            say(console, f"database: {store.where}")
            with ProgressView([(t.name, len(t.sites)) for t in job.tasks], console) as view:
                job.report = view.report
                result = job.tune(runner)
        built = job.build()
        records = {name: store.query(job.target.key, c.task.key) for name, c in job.choices.items()}
    if not any(plan.times for plan in built.plans.values()):
        say(console, _nothing_usable(records))
        raise typer.Exit(NOTHING_MEASURED)
    saved = job.artifact(built).save(path)
    rows = task_rows(job.choices, built.plans, records)
    console.print(task_table(rows))
    console.print(dispatch_table(rows))
    say(console, _summary(job, result))
    for name, problem in result.problems:
        say(console, f"note: {name} could not be tuned to the end: {problem}")
    for note in built.notes:
        say(console, f"note: {note}")
    say(console, f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB)")
    latency: tuple[LatencyRow, ...] = ()
    if compare:
        latency = _compare(job, built, console)
        console.print(latency_table(latency, "Latency of the whole model, medians"))
    if json:
        print_json(_document(str(saved), job, result, rows, latency, built))


def _summary(job: Job, result: TuneResult) -> str:
    if result.measurements == 0:
        return f"0 new measurements: all that was asked for {len(job.tasks)} tasks is on record"
    return (
        f"{result.measurements} new measurements of {result.trials} candidates for {len(job.tasks)} tasks, "
        f"{result.failures} failed, in {result.wall_secs:.0f} s"
    )


def _nothing_usable(records: Mapping[str, Sequence[Measurement]]) -> str:
    lines = ["nothing usable was measured; no artifact was written. What failed first, by task:"]
    for name, found in records.items():
        failure = next((r for r in found if r.status == "failed"), None)
        why = f"{failure.stage}: {failure.message.splitlines()[0][:200]}" if failure else "nothing on record"
        lines.append(f"  {name}: {why}")
    return "\n".join(lines)


def compare_shapes(program: Program) -> list[dict[str, int]]:
    """Where builds are compared: the symbol of the widest range takes 8, 64, 256, 512 as far as its bounds allow, or its
    bounds; the others take their lower bound."""
    base = {s.name: max(1, s.lower) for s in program.symbols}
    if not base:
        return [{}]
    top = {s.name: s.upper if s.upper is not None else max(COMPARE_SIZES) for s in program.symbols}
    wide = max(base, key=lambda name: top[name] / base[name])
    sizes = [v for v in COMPARE_SIZES if base[wide] <= v <= top[wide]] or sorted({base[wide], top[wide]})
    return [{**base, wide: value} for value in sizes]


def _compare(job: Job, tuned: BuildResult, console: Console) -> tuple[LatencyRow, ...]:
    """The tuned build against two builds of the same model from the same records."""
    builds = {"tuned": tuned, "all library": job.build("library"), "all generic": job.build("generic")}
    say(console, "comparing builds ...")
    with contextlib.ExitStack() as stack:
        device = open_device(job.settings.target)
        stack.callback(device.close)
        contenders = {}
        for name, built in builds.items():
            used = {b.name for b in built.program.buffers if b.role == "const"}
            constants = {n: a for n, a in job.lowered.module.constants.items() if n in used}
            executor = Executor(built.program, device, constants)
            stack.callback(executor.close)
            contenders[name] = (built.program, executor.run)
        return compare_latency(contenders, compare_shapes(tuned.program), COMPARE_ROUNDS, COMPARE_SECS)


def _document(
    path: str,
    job: Job,
    result: TuneResult,
    rows: Sequence[TaskRow],
    latency: Sequence[LatencyRow],
    built: BuildResult,
) -> dict[str, Any]:
    return {
        "artifact": path,
        "target": {"kind": job.device.kind, "name": job.device.name, "key": job.target.key},
        "measurements": result.measurements,
        "trials": result.trials,
        "failures": result.failures,
        "wall_secs": result.wall_secs,
        "tasks": [row.to_json() for row in rows],
        "latency": [row.to_json() for row in latency],
        "problems": [{"task": name, "why": problem} for name, problem in result.problems],
        "notes": list(built.notes),
    }
