"""`relax-tune tune`: measure missing times, build, save, report.

Tests: `tests/tuner/cli/test_cli_tune.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from relax_tune.database.store import open_store
from relax_tune.errors import UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.program.host_program import parts_of
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.api import TuneResult, tune_result
from relax_tune.tuner.cli.app import NOTHING_MEASURED
from relax_tune.tuner.cli.commands.comparison import compare_builds
from relax_tune.tuner.cli.commands.multi_device import tune_command
from relax_tune.tuner.cli.commands.options import (
    Bounds,
    Json,
    Model,
    RequireMeasured,
    SettingFlags,
    Verify,
    print_json,
    with_settings,
)
from relax_tune.tuner.cli.destination import Out, Overwrite, artifact_path, check_destination
from relax_tune.tuner.cli.report.console import make_console, print_sections, say
from relax_tune.tuner.cli.report.latency import LatencyRow, latency_table
from relax_tune.tuner.cli.report.progress import ProgressView
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.emit.unmeasured import MORE, unmeasured_warning
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import open_runner, target_names
from relax_tune.tuner.job.job import Report
from relax_tune.tuner.job.lowered_model import model_key, parse_bounds
from relax_tune.tuner.job.progress import TuningSummary
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.cluster.address import check_needed
from relax_tune.tuner.quality.activation_loss import with_activation_loss
from relax_tune.tuner.quality.choose import Goal, read_goal, tuned_choice
from relax_tune.tuner.report.builds import build_section
from relax_tune.tuner.report.subject import Section
from relax_tune.tuner.report.texts import percent_text
from relax_tune.tuner.search.registry import check_strategy
from relax_tune.tuner.settings import Policy, Settings
from relax_tune.tuner.task.extract import sizes_near

COMPARE_SIZES = (8, 64, 256, 512)
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
    require_measured: RequireMeasured = False,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """Measure a model's kernels on a device, build its artifact.

    What the database already holds is not measured again: an interrupted job goes on, a finished one measures nothing
    and writes the same artifact.
    """
    chosen, console = settings.load_any(), make_console(stderr=json)
    _check(chosen, settings, compare)
    module = load_model(model, parse_bounds(bound or []), **chosen.import_options)
    chosen = settings.load()  # a device is chosen for a model that can be read
    path = artifact_path(model, chosen.target, out)
    goal = read_goal(chosen, module)
    check_destination(path, model_key(module), overwrite)
    tell = partial(say, console)
    if len(target_names(chosen.target)) > 1:
        return tune_command(module, path, chosen, compare=compare, required=require_measured, verify=verify, json=json)
    with (
        contextlib.closing(open_runner(chosen, tell)) as runner,  # first, so that a missing device creates no database
        open_store(chosen.db, wait_secs=chosen.wait_secs, notice=tell) as store,
    ):
        job = device_job(module, runner.device_info(), store, chosen, verify=verify)
        say(console, f"device: {job.device.kind}, {job.device.name}\ndatabase: {store.where}")
        job, built, work = _tuned(job, goal, runner, console)
        if not any(plan.times for plan in built.plans.values()):
            say(console, _nothing_usable(job))
            raise typer.Exit(NOTHING_MEASURED)
        unmeasured_warning([built.plans], "measured", store, job.device.name, require_measured, MORE)
        job.store_plans(built)
        result = tune_result(job, work, built)
        others = {f"all {p}": job.artifact(job.build(p)) for p in COMPARED} if compare else {}
    saved = job.artifact(built).save(path)
    print_sections(console, build_section(result.tasks, result.quality))
    say(console, _summary(result))
    for note in (*work.notes(), *result.notes):
        say(console, f"note: {note}")
    say(console, f"wrote {saved} ({saved.stat().st_size / 1e6:.1f} MB)")
    latency: tuple[LatencyRow, ...] = ()
    if compare:
        say(console, "comparing builds ...")
        shapes = {n: sizes_near(job.lowered, n, compare_shapes(p)) for n, p in _timed(built)}
        latency = compare_builds(saved, others, chosen.target, {n: s for n, s in shapes.items() if s})
        shown = latency_table(latency, "Latency of the whole model, medians")
        print_sections(console, Section("latency", tables=(shown,)))
    if json:
        print_json({"artifact": str(saved), **result.to_json(), "latency": [row.to_json() for row in latency]})


@contextlib.contextmanager
def watched(console: Console, job: DeviceJob) -> Iterator[Report]:
    """Show the progress of a job while it is tuned, by what is called after every batch."""
    with ProgressView([(t.name, len(t.sites)) for t in job.tasks], console) as view:
        yield view.report


def _tuned(
    job: DeviceJob, goal: Goal | None, runner: Runner, console: Console
) -> tuple[DeviceJob, BuildResult, TuningSummary]:
    """Tune and build a job, or the form of its model that is chosen under a bound."""
    tell = partial(say, console)
    if goal is not None:
        (chosen, built), work = tuned_choice(job, goal, runner, tell, partial(watched, console))
        return chosen, built, work
    with watched(console, job) as report:
        work = job.tune(runner, report, tell)
    return job, with_activation_loss(job, job.tested_build(runner)), work


def _check(chosen: Settings, flags: SettingFlags, compare: bool) -> None:
    files = ("ca", "certificate", "key") if chosen.browser is None else ("ca",)
    check_needed(chosen.scheduler, *(flags.given[name] for name in files))
    if compare and (chosen.scheduler is not None or chosen.browser is not None):
        other = "--scheduler" if chosen.browser is None else "--browser"
        raise UserError(f"--compare times on this machine, got a {other} too; leave one of them out")
    check_strategy(chosen.strategy)


def _summary(result: TuneResult) -> str:
    work, tasks = result.work, len(result.tasks)
    if work.measurements == 0:
        return f"0 new measurements: all that was asked for {tasks} tasks is on record"
    gain = work.expected_gain
    left = (
        ""
        if gain is None
        else f"; as many candidates again are expected to save {percent_text(gain)} of the model's time"
    )
    return (
        f"{work.measurements} new measurements of {work.trials} candidates for {tasks} tasks, "
        f"{work.failures} failed, in {work.wall_secs:.0f} s{left}"
    )


def _nothing_usable(job: DeviceJob) -> str:
    lines = ["nothing usable was measured; no artifact was written. What failed first, by task:"]
    for name, task_variants in job.task_variants.items():
        failure = next(iter(job.store.query(job.target.key, task_variants.task.key, status="failed")), None)
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
