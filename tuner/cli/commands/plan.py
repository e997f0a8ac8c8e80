"""`relax-tune plan`: the dispatched variants of an artifact or of a model's stored plans, and whether they still fit.

Tests: `tests/tuner/plan/test_stored_plans.py`, `tests/tuner/cli/test_quality.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from relax_tune.database.store import open_store
from relax_tune.errors import UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.atomic_write import reason, write_whole
from relax_tune.runtime.device.quirks import quirks_of
from relax_tune.runtime.program.placement import explain_placement
from relax_tune.runtime.program.plan import explain
from relax_tune.runtime.program.plan_c import plans_in_c
from relax_tune.tuner.cli.commands.options import Bounds, Json, SettingFlags, print_json, with_settings
from relax_tune.tuner.cli.report.console import make_console, print_sections, say
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import device_info
from relax_tune.tuner.job.lowered_model import parse_bounds
from relax_tune.tuner.plan.drift import ALLOWED, SHAPES, Drift, drift, model_regret
from relax_tune.tuner.plan.task_rows import task_rows
from relax_tune.tuner.report.builds import dispatch_table, quality_section, read_quality
from relax_tune.tuner.report.subject import Section, table
from relax_tune.tuner.task.extract import extract_tasks

UNMEASURED = 0.1
"""Share of calls at shapes far from timed ones, from which a task is worth tuning again."""


SubjectArgument = Annotated[
    str, typer.Argument(metavar="ARTIFACT|MODEL", help="An .rta file, or a model whose plans `tune` has stored.")
]
COption = Annotated[
    Path | None,
    typer.Option(
        "--c",
        metavar="FILE.c",
        help="Write all plans of an artifact there as C: for each of its programs one function without branches, from the values of "
        "its symbols to the variant of every call. [default: nowhere]",
    ),
]
CheckOption = Annotated[
    bool,
    typer.Option(
        "--check",
        help=f"Predict, from the times on record, what the current plans lose at the shapes that are served; says what to tune again "
        f"from {ALLOWED:.0%} of the model's time on.",
    ),
]
RestoreOption = Annotated[
    str | None,
    typer.Option(
        "--restore", metavar="SET", help="Make earlier plans the current ones again. [default: change nothing]"
    ),
]


@with_settings("plan")
def plan(
    subject: SubjectArgument,
    *,
    c: COption = None,
    check: CheckOption = False,
    restore: RestoreOption = None,
    settings: SettingFlags,
    bound: Bounds = None,
    json: Json = False,
) -> None:
    """Show which kernel runs for which shapes; check against use.

    Of an artifact: for each call its variants, each with the condition under which it is dispatched; the first that holds counts.
    Of a model: the sets of plans stored for it, which of them is the current one, and what that dispatches. `build --policy stored`
    builds with the current set.
    """
    console = make_console(stderr=json)
    if subject.endswith(".rta"):
        if check or restore is not None:
            raise UserError(
                f"--check and --restore want a MODEL, got the artifact {subject}; give the model it was built from"
            )
        _of_artifact(Path(subject), c, console, json)
        return
    if c is not None:
        raise UserError(f"--c expects an ARTIFACT, a file that ends in .rta; got {subject!r:.80}; build one first")
    if check and restore is not None:
        raise UserError(
            "--check looks at the current plans and --restore changes them, got both; leave one of them out"
        )
    module = load_model(subject, parse_bounds(bound or []), **settings.load_any().import_options)
    chosen = settings.load()  # a device is chosen for a model that can be read
    with open_store(chosen.db, create=restore is None, read_only=restore is None) as store:
        job = device_job(module, device_info(chosen.target, store), store, chosen)
        if restore is not None:
            _restore(job, restore)
            say(
                console,
                f"the plans {restore} are the current ones again; `relax-tune build --policy stored` builds with them",
            )
        for quirk in quirks_of(job.device.kind, job.device.fingerprint):
            if quirk.ranks_nothing:
                say(console, f"{job.device.name}: {quirk.changes} ({quirk.symptom})")
        document = _show_sets(job, console)
        if check:
            document |= _check(job, _tuning(subject, settings, bound or []), console)
    if json:
        print_json(document)


def _of_artifact(path: Path, c: Path | None, console: Console, json: bool) -> None:
    loaded = load_artifact(path)
    quality = read_quality(loaded)
    if c is None:
        print_sections(console, quality_section(quality, whole=True))
        if loaded.placement.parts:
            say(console, explain_placement(loaded.placement))
        for program in loaded.programs:
            say(console, f"{program.name}\n{explain(program)}" if len(loaded.programs) > 1 else explain(program))
    else:
        if c.exists() and not c.is_file():
            raise UserError(f"--c {c}: expected the name of a file to write, got something else; give another")
        try:
            c.parent.mkdir(parents=True, exist_ok=True)
            write_whole(c, memoryview(plans_in_c(loaded.programs).encode()))
        except (OSError, ValueError) as error:
            raise UserError(f"--c {c}: expected to write it, got: {reason(error)}") from None
        say(console, f"wrote {c}")
    if json:
        plans = {p.name: {"calls": len(p.calls), "plans": explain(p).splitlines()} for p in loaded.programs}
        where = loaded.placement.fields()
        chosen = {} if quality is None else {"quality": quality}
        print_json({"artifact": str(path), **where, **chosen, "programs": plans, "c": None if c is None else str(c)})


def _restore(job: DeviceJob, name: str) -> None:
    plan_sets = {s.name: s for s in job.plan_sets()}
    if name not in plan_sets:
        known = ", ".join(plan_sets) or "none"
        raise UserError(
            f"--restore {name:.40}: expected a set of plans stored for this model and device, which are {known}"
        )
    job.store.put_plans(job.target.key, {w: r.entries for w, r in plan_sets[name].records.items()})


def _show_sets(job: DeviceJob, console: Console) -> dict[str, Any]:
    current = job.current_plans()
    names = [s.name + (f" (from {' '.join(o[:8] for o in s.origins)})" if s.origins else "") for s in job.plan_sets()]
    say(console, f"sets of plans stored, the current one last: {' '.join(names)}")
    built = job.build("stored")
    records = {name: job.records(c.task.key, c.task.regime) for name, c in job.task_variants.items()}
    rows = task_rows(job.task_variants, built.plans, records)
    print_sections(console, Section("dispatch", tables=(dispatch_table(rows),)))
    versions = {name: current.records[c.task.key].version for name, c in job.task_variants.items()}
    return {"sets": names, "current": current.name, "versions": versions, "tasks": [row.to_json() for row in rows]}


def _tuning(model: str, settings: SettingFlags, bounds: Sequence[str]) -> str:
    """Return the command that tunes the model under the given settings and bounds."""
    options = [(flag, str(value)) for flag, value in settings.flags().items() if value]
    options += [("--bound", bound) for bound in bounds]
    return shlex.join(["relax-tune", "tune", model, *(part for option in options for part in option)])


def _check(job: DeviceJob, command: str, console: Console) -> dict[str, Any]:
    """Report the loss of the current plans: a table, and a sentence that names the next `command`."""
    current = job.current_plans()
    domains = {t.name: t.domain for t in extract_tasks(job.lowered, SHAPES, profile=job.profile)}
    drifts: dict[str, Drift] = {}
    for name, task_variants in job.task_variants.items():
        key = task_variants.task.key
        drifts[name] = drift(
            task_variants, job.records(key, task_variants.task.regime), current.plan(key), domains[name]
        )
    regret = model_regret(drifts, {name: len(c.task.sites) for name, c in job.task_variants.items()})
    again = [n for n, d in drifts.items() if d.unmeasured > UNMEASURED or (regret > ALLOWED and d.regret > ALLOWED)]
    where = "as served" if job.profile is not None else "evenly over the declared ranges"
    numbers = ("predicted loss", "not measured")
    rows = [[name, f"{d.regret:.1%}", f"{d.unmeasured:.0%}"] for name, d in drifts.items()]
    losses = table(("task", *numbers), rows, numbers, f"Plans {current.name} at the shapes {where}")
    print_sections(console, Section("losses", tables=(losses,)))
    say(console, f"predicted loss of the model: {regret:.1%} of its time (allowed: {ALLOWED:.0%})")
    if again:
        say(console, f"worth tuning again: {', '.join(again)}; run `{command}`")
    else:
        say(console, "nothing to tune again")
    tasks = {n: {"loss": d.regret, "unmeasured": d.unmeasured} for n, d in drifts.items()}
    return {"loss": regret, "allowed": ALLOWED, "drift": tasks, "tune_again": again}
