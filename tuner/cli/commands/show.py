"""`relax-tune show`: a model's program and tasks, or everything about one task. Measures nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_tune.database.engine import default_url, parse_url, sqlite_path
from relax_tune.database.records import REGIMES, Measurement
from relax_tune.database.records import Target as DeviceTarget
from relax_tune.database.store import MEMORY_URL, MemoryStore, Store, open_store
from relax_tune.errors import DatabaseError, UserError
from relax_tune.ir.core.dtype import dtype
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.source import PACKAGE
from relax_tune.ir.passes.pipeline import PassManager, lower, passes_for
from relax_tune.ir.text.printer import print_text
from relax_tune.tuner.cli.commands.db import one_workload
from relax_tune.tuner.cli.commands.options import Bounds, Json, SettingFlags, Verify, among, print_json, with_settings
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.cli.report.model_view import IMPORTED, program_after, stage_names, task_document, tasks_table
from relax_tune.tuner.cli.report.show import show_task
from relax_tune.tuner.cli.report.task_view import BEST, GENERIC, LIBRARY, OF_VARIANT, SECTIONS, TaskView, recorded_task
from relax_tune.tuner.job.job import Job, device_info, parse_bounds
from relax_tune.tuner.plan.plans import plan_task
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.alternatives import alternatives_here
from relax_tune.tuner.task.extract import extract_tasks
from relax_tune.tuner.task.task import Choices, Task
from relax_tune.tuner.task.unfused_variants import in_parts

OF_MODEL = ("program", "tasks")
OVERVIEW = ("text", "sketches", "times", "dispatch", "trace")
ALL = "all"


SubjectArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|TASK",
        help="A model, as `tune` takes it; or a task on record: its name, or the start of its key.",
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Show this task of MODEL: its name, or the start of its key. [default: the whole model]",
    ),
]
AfterOption = Annotated[
    str | None,
    typer.Option(
        metavar="PASS",
        autocompletion=among(*stage_names()),
        help=f"The program of MODEL after this pass: {', '.join(stage_names())}. [default: {IMPORTED}]",
    ),
]
WhatOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SECTION",
        autocompletion=among(*OF_MODEL, *SECTIONS, ALL),
        help=f"May be repeated. Of a model: {', '.join(OF_MODEL)}. Of a task: {', '.join(SECTIONS)}. Or {ALL}. "
        f"[default: both of a model; {', '.join(OVERVIEW)} of a task; {ALL} with --json]",
    ),
]
OfOption = Annotated[
    str | None,
    typer.Option(
        metavar="VARIANT",
        autocompletion=among(BEST, GENERIC, LIBRARY),
        help=f"Whose trace, loops and source to show of a task: {BEST}, {GENERIC}, {LIBRARY}, a sketch's name or the "
        f"start of a variant's key. [default: {BEST}, or {GENERIC} when nothing tuned is on record]",
    ),
]


@with_settings("show")
def show(
    subject: SubjectArgument,
    *,
    task: TaskOption = None,
    after: AfterOption = None,
    what: WhatOption = None,
    of: OfOption = None,
    settings: SettingFlags,
    bound: Bounds = None,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """Show a model's program and tasks, or all about one task.

    `show MODEL` prints the program, as imported or after a pass, and its tasks. `show MODEL --task NAME` and, for a task
    that was tuned before, `show TASK` print one task: its program, sketches and records for the target. The trace and the
    source of a candidate and the cost model's opinion follow. Nothing is measured.
    """
    if not is_model(subject):
        _refuse(
            {
                "--task": task,
                "--after": after,
                "--bound": bound,
                "--verify": verify,
                **settings.flags(*(n for n in settings.given if n not in ("target", "db"))),
            },
            f"{subject!r} is a task on record",
        )
        sections = _sections(what, SECTIONS, OVERVIEW, json, "a task")
        _show_recorded(subject, sections, of, settings.load(), json)
    elif task is None:
        _refuse(
            settings.flags("target", "db", "shapes", "profile") | {"--of": of},
            f"{subject!r} is a whole model; choose a task with --task",
        )
        sections = _sections(what, OF_MODEL, OF_MODEL, json, "a model without --task")
        _show_model(subject, sections, after, parse_bounds(bound or []), settings.load(), verify, json)
    else:
        _refuse({"--after": after}, "--task shows a task, which is what all passes left; leave one of them out")
        sections = _sections(what, SECTIONS, OVERVIEW, json, "a task")
        _show_model_task(subject, task, sections, of, parse_bounds(bound or []), settings.load(), verify, json)


def is_model(subject: str) -> bool:
    """Return True if the argument names a model: an existing file, a path or a package."""
    return (
        subject.startswith(PACKAGE)
        or os.sep in subject
        or subject.endswith((".gguf", ".onnx", ".pt2", ".relax"))
        or Path(subject).exists()
    )


def _refuse(given: Mapping[str, object], why: str) -> None:
    """Raise UserError for a given option that would have no effect."""
    for option, value in given.items():
        if value:
            raise UserError(f"{option} does not apply: {why}")


def _sections(
    what: Sequence[str] | None, known: Collection[str], default: Sequence[str], json: bool, of: str
) -> tuple[str, ...]:
    """Return the requested sections, in their order. `what` may name several in one, with commas between them."""
    wanted = [name for item in what or () for name in item.split(",")]
    for name in wanted:
        if name != ALL and name not in known:
            raise UserError(f"--what wants {', '.join(known)} or {ALL} of {of}; found {name!r}")
    if ALL in wanted or (json and not wanted):
        return tuple(known)
    return tuple(name for name in known if name in (wanted or default))


# -- a model -----------------------------------------------------------------------------------------------------------


def _show_model(
    model: str,
    sections: Sequence[str],
    after: str | None,
    bounds: Mapping[str, tuple[int, int]],
    settings: Settings,
    verify: bool,
    json: bool,
) -> None:
    module = load_model(model, bounds, settings.cache_dtype, trust=settings.trust_model)
    passes = passes_for(
        settings.qkv, dtype(settings.precision), settings.attention, {}, settings.activations, settings.weights
    )
    document: dict[str, Any] = {"model": model}
    if "program" in sections:
        document |= {
            "after": after or IMPORTED,
            "program": print_text(program_after(module, after or IMPORTED, passes, verify, settings.checks)),
        }
    elif after is not None:
        raise UserError("--after does not apply: it is about the program; add --what program")
    tasks = (
        extract_tasks(lower(module, passes, manager=PassManager(verify), checks=settings.checks), settings.anchors)
        if "tasks" in sections
        else ()
    )
    if json:
        print_json({**document, "tasks": [task_document(t) for t in tasks]} if "tasks" in sections else document)
        return
    console = make_console()
    if "program" in sections:
        say(console, document["program"])
    if "tasks" in sections:
        console.print(tasks_table(tasks))


# -- a task ------------------------------------------------------------------------------------------------------------


def _show_model_task(
    model: str,
    name: str,
    sections: Sequence[str],
    of: str | None,
    bounds: Mapping[str, tuple[int, int]],
    settings: Settings,
    verify: bool,
    json: bool,
) -> None:
    module = load_model(model, bounds, settings.cache_dtype, trust=settings.trust_model)
    store, notes = _records_of(settings.db)
    with contextlib.closing(store):
        job = Job(module, device_info(settings.target, store), store, settings, verify=verify)
        matching = [t for t in job.tasks if t.name == name] or [t for t in job.tasks if t.key.startswith(name)]
        if len(matching) != 1:
            known = ", ".join(f"{t.name} ({t.key[:12]})" for t in matching or job.tasks)
            raise UserError(
                f"--task wants the name of one task of {model}, or the start of its key: {known}; found {name!r}"
            )
        choices = job.choices[matching[0].name]
        records = job.records(choices.task.key, choices.task.regime)
        if not notes and not records:
            notes = _elsewhere(store, choices.task, job.target)
        plan = plan_task(choices, records, predictor=job.predictor)
    again = f"`relax-tune tune {model} --target {settings.target}` measures this task"
    _show_task(TaskView(choices, records, of, plan), sections, job.target, _advised(notes, again), json)


def _show_recorded(name: str, sections: Sequence[str], of: str | None, settings: Settings, json: bool) -> None:
    try:
        store = open_store(settings.db, create=False, read_only=True)
    except DatabaseError as error:
        raise UserError(
            f"{name!r}: wanted a model (a folder, a .gguf, .onnx, .pt2 or .relax file, {PACKAGE}NAME/FOLDER), found no such file; and no "
            f"task of that name can be looked up: {error}"
        ) from None
    with contextlib.closing(store):
        try:
            workload = one_workload(store, name)
        except UserError as error:
            raise UserError(f"{name!r} is no file, so it should be a task on record: {error}") from None
        job = Job(IRModule({}), device_info(settings.target, store), store, settings)
        records = next((found for r in REGIMES if (found := job.records(workload.key, r))), [])
        task = recorded_task(workload, records)
        notes = [] if records else _elsewhere(store, task, job.target)
        choices = Choices(task, job.hardware, job.code_target, alternatives_here(job.hardware.language, job.libraries))
        plan = plan_task(choices, records, predictor=job.predictor)
    again = f"`relax-tune tune MODEL --target {settings.target}` with a model that has this task measures it"
    _show_task(TaskView(choices, records, of, plan), sections, job.target, _advised(notes, again), json)


def _records_of(db: str | None) -> tuple[Store, list[str]]:
    """Open the database; without one, return an empty store and a note."""
    if db != MEMORY_URL:
        path = sqlite_path(parse_url(db or default_url()))
        if path is not None and not path.exists():
            return MemoryStore(), [f"there is no database at {path} yet"]
    return open_store(db, create=False, read_only=True), []


def _elsewhere(store: Store, task: Task, target: DeviceTarget) -> list[str]:
    """Return notes on a target without records: which other targets have records."""
    notes = [f"nothing is on record for {target.kind}, {target.name} in {store.where}"]
    for other in store.targets():
        count = store.count(other.key, task.key)
        if count:
            kind = (
                "another device or driver"
                if other.kind == target.kind
                else f"`--target {other.kind}` shows them if it is here"
            )
            notes.append(f"{count} measurements are on record for {other.kind}, {other.name} ({kind})")
    return notes


def _advised(notes: Sequence[str], again: str) -> list[str]:
    return [*notes, again] if notes else []


def _show_task(view: TaskView, sections: Sequence[str], target: DeviceTarget, notes: Sequence[str], json: bool) -> None:
    if view.of is not None and not OF_VARIANT & set(sections):
        raise UserError(f"--of does not apply: none of {', '.join(sorted(OF_VARIANT))} is shown; add --what")
    document = {
        "task": task_document(view.choices.task),
        "target": {"kind": target.kind, "name": target.name, "key": target.key},
        **_counts(view.records),
        "notes": list(notes),
        **({"variant": view.chosen()} if OF_VARIANT & set(sections) else {}),
        **{name: SECTIONS[name](view) for name in sections},
    }
    if json:
        print_json(document)
    else:
        show_task(make_console(), document)


def _counts(records: Sequence[Measurement]) -> dict[str, int]:
    return {
        "measurements": len(records),
        "candidates": len({r.variant.key for r in records if r.variant.kind == "tuned" and not in_parts(r.variant)}),
    }
