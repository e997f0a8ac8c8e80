"""`relax-tune show`: a model's program and tasks, or everything about one task. Measures nothing.

Tests: `tests/tuner/cli/test_show.py`.
"""

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
from relax_tune.database.sqlite_file import similar_databases
from relax_tune.database.store import MEMORY_URL, MemoryStore, Store, open_store
from relax_tune.errors import DatabaseError, UserError
from relax_tune.ir.core.dtype import dtype
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.source import PACKAGE
from relax_tune.ir.passes.pipeline import PassManager, lower, passes_for
from relax_tune.ir.text.printer import print_text
from relax_tune.tuner.cli.commands.db import one_workload
from relax_tune.tuner.cli.commands.options import Bounds, SettingFlags, Verify, among, with_settings
from relax_tune.tuner.cli.report.model_view import IMPORTED, program_after, stage_names, task_document
from relax_tune.tuner.cli.report.task_view import BEST, GENERIC, LIBRARY, OF_VARIANT, SECTIONS, TaskView, recorded_task
from relax_tune.tuner.cli.report.view import view
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import device_info
from relax_tune.tuner.job.lowered_model import parse_bounds
from relax_tune.tuner.plan.plans import plan_task
from relax_tune.tuner.report.builds import tasks_table
from relax_tune.tuner.report.subject import Section, Subject
from relax_tune.tuner.report.task_sections import task_subject
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.alternatives import alternatives_here
from relax_tune.tuner.task.extract import extract_tasks
from relax_tune.tuner.task.task import Task
from relax_tune.tuner.task.unfused_variants import in_parts
from relax_tune.tuner.task.variants import TaskVariants

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


@view
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
    json: bool = False,
) -> Subject:
    """Show a model's program and tasks, or one task in detail.

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
        return _show_recorded(subject, sections, of, settings.load())
    if task is None:
        _refuse(
            settings.flags("target", "db", "shapes", "profile") | {"--of": of},
            f"{subject!r} is a whole model; choose a task with --task",
        )
        sections = _sections(what, OF_MODEL, OF_MODEL, json, "a model without --task")
        return _show_model(subject, sections, after, parse_bounds(bound or []), settings.load_any(), verify)
    _refuse({"--after": after}, "--task shows a task, which is what all passes left; leave one of them out")
    sections = _sections(what, SECTIONS, OVERVIEW, json, "a task")
    return _show_model_task(subject, task, sections, of, parse_bounds(bound or []), settings, verify)


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
    requested = [name for item in what or () for name in item.split(",")]
    for name in requested:
        if name != ALL and name not in known:
            raise UserError(f"--what expects {', '.join(known)} or {ALL} of {of}; got {name!r}")
    if ALL in requested or (json and not requested):
        return tuple(known)
    return tuple(name for name in known if name in (requested or default))


# -- a model -----------------------------------------------------------------------------------------------------------


def _show_model(
    model: str,
    sections: Sequence[str],
    after: str | None,
    bounds: Mapping[str, tuple[int, int]],
    settings: Settings,
    verify: bool,
) -> Subject:
    module = load_model(model, bounds, **settings.import_options)
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
    shown = [Section("program", texts=(document["program"],))] if "program" in sections else []
    if "tasks" in sections:
        document["tasks"] = [task_document(t) for t in tasks]
        shown.append(Section("tasks", tables=(tasks_table(tasks),)))
    return Subject(f"Model {model}", tuple(shown), document)


# -- a task ------------------------------------------------------------------------------------------------------------


def _show_model_task(
    model: str,
    name: str,
    sections: Sequence[str],
    of: str | None,
    bounds: Mapping[str, tuple[int, int]],
    flags: SettingFlags,
    verify: bool,
) -> Subject:
    module = load_model(model, bounds, **flags.load_any().import_options)
    settings = flags.load()  # a device is chosen for a model that can be read
    store, notes = _records_of(settings.db)
    with contextlib.closing(store):
        job = device_job(module, device_info(settings.target, store), store, settings, verify=verify)
        matching = [t for t in job.tasks if t.name == name] or [t for t in job.tasks if t.key.startswith(name)]
        if len(matching) != 1:
            known = ", ".join(f"{t.name} ({t.key[:12]})" for t in matching or job.tasks)
            raise UserError(
                f"--task expects the name of one task of {model}, or the start of its key: {known}; got {name!r}"
            )
        task_variants = job.task_variants[matching[0].name]
        records = job.records(task_variants.task.key, task_variants.task.regime)
        if not notes and not records:
            notes = _notes_on_other_targets(store, task_variants.task, job.target)
        plan = plan_task(task_variants, records, predictor=job.predictor)
    again = f"`relax-tune tune {model} --target {settings.target}` measures this task"
    return _show_task(TaskView(task_variants, records, of, plan), sections, job.target, _advised(notes, again))


def _show_recorded(name: str, sections: Sequence[str], of: str | None, settings: Settings) -> Subject:
    try:
        store = open_store(settings.db, create=False, read_only=True)
    except DatabaseError as error:
        raise UserError(
            f"{name!r}: expected a model (a folder, a .gguf, .onnx, .pt2 or .relax file, {PACKAGE}NAME/FOLDER), got no such file; and no "
            f"task of that name can be looked up: {error}"
        ) from None
    with contextlib.closing(store):
        try:
            workload = one_workload(store, name)
        except UserError as error:
            raise UserError(f"{name!r} is no file, so it should be a task on record: {error}") from None
        job = device_job(IRModule({}), device_info(settings.target, store), store, settings)
        records = next((known for r in REGIMES if (known := job.records(workload.key, r))), [])
        task = recorded_task(workload, records)
        notes = [] if records else _notes_on_other_targets(store, task, job.target)
        task_variants = TaskVariants(
            task, job.hardware, job.code_target, alternatives_here(job.hardware.language, job.libraries)
        )
        plan = plan_task(task_variants, records, predictor=job.predictor)
    again = f"`relax-tune tune MODEL --target {settings.target}` with a model that has this task measures it"
    return _show_task(TaskView(task_variants, records, of, plan), sections, job.target, _advised(notes, again))


def _records_of(db: str | None) -> tuple[Store, list[str]]:
    """Open the database; without one, return an empty store and a note."""
    if db != MEMORY_URL:
        path = sqlite_path(parse_url(db or default_url()))
        if path is not None and not path.exists():
            like = similar_databases(path)
            meant = f"; did you mean {' or '.join(map(str, like))}?" if like else ""
            return MemoryStore(), [f"there is no database at {path} yet{meant}"]
    return open_store(db, create=False, read_only=True), []


def _notes_on_other_targets(store: Store, task: Task, target: DeviceTarget) -> list[str]:
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


def _show_task(shown: TaskView, sections: Sequence[str], target: DeviceTarget, notes: Sequence[str]) -> Subject:
    if shown.of is not None and not OF_VARIANT & set(sections):
        raise UserError(f"--of does not apply: none of {', '.join(sorted(OF_VARIANT))} is shown; add --what")
    document = {
        "task": task_document(shown.task_variants.task),
        "target": {"kind": target.kind, "name": target.name, "key": target.key},
        **_counts(shown.records),
        "notes": list(notes),
        **({"variant": shown.chosen()} if OF_VARIANT & set(sections) else {}),
        **{name: SECTIONS[name](shown) for name in sections},
    }
    return task_subject(document)


def _counts(records: Sequence[Measurement]) -> dict[str, int]:
    return {
        "measurements": len(records),
        "candidates": len({r.variant.key for r in records if r.variant.kind == "tuned" and not in_parts(r.variant)}),
    }
