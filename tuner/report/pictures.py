"""The figures of tasks: times over shapes, convergence, the time of a model, regret, failures.

Tests: `tests/tuner/report/test_report.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.errors import RelaxTuneError
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.plan.plans import Shape
from relax_tune.tuner.plan.task_rows import variant_text
from relax_tune.tuner.report.charts import ALL_TASKS, DISPATCHED, FAILED, bars, lines, unit_of
from relax_tune.tuner.report.recorded import RecordedTask, SearchStep, all_tasks, group_of, point_of
from relax_tune.tuner.report.subject import ALL, GROUPS, Anchor, Cell, Facets, Figure, Group, Table, table
from relax_tune.tuner.report.texts import ratio_text, seconds_text

LINES = 7
"""Largest number of lines in a chart; more cannot be distinguished."""
DOTS = 60
"""Largest number of other candidates at a shape that are drawn as dots: quantiles of their times stand for more."""
CLOSE = 1.05
"""Factor on the last time from which a search counts as converged."""
_LONGEST = 300
_FIRST = "The first times are of the generic, library and unfused variants."


def time_over_shape(task: RecordedTask, anchor: str) -> Figure:
    """Make the figure of a task's contenders at every shape. anchor: id of the figure"""
    title = f"Time over shape: {task.name}"
    if not task.shapes:
        return Figure(anchor, title, "No checked time is on record for this task; `relax-tune tune` measures it.")
    contenders = _contenders(task)
    unit, size = unit_of([secs for rows in contenders.values() for secs in rows.values()])
    symbols = len(point_of(task.shapes[0]))
    one = symbols == 1 and all(point_of(s)[0] > 0 for s in task.shapes)

    def place(shape: Shape) -> Any:
        return point_of(shape)[0] if one else task.shape_text(shape)

    drawn = [
        {"x": place(s), "y": secs / size, "series": name, "facets": task.facets_at(s, _group_of_line(task, name, s))}
        for name, rows in contenders.items()
        for s, secs in sorted(rows.items(), key=lambda row: task.shapes.index(row[0]))
    ]
    others: dict[tuple[Shape, Group | None], list[float]] = {}
    for key, times_of_variant in task.medians.items():
        for shape, secs in times_of_variant.items():
            if not any(own.get(shape) == secs for own in contenders.values()):
                others.setdefault((shape, task.group(key)), []).append(secs)
    rest = [
        {"x": place(s), "y": secs / size, "facets": task.facets_at(s, group)}
        for (s, group), times in others.items()
        for secs in _quantiles(times, DOTS)
    ]
    axis = task.name_of(0) if one else ", ".join(task.name_of(a) for a in range(symbols)) or "shape"
    chart = lines(
        drawn,
        x=f"{axis} (size, log scale)" if one else f"{axis} (sizes)",
        y=f"time of a call ({unit}, log scale)",
        series=list(contenders),
        log_x=one,
        log_y=True,
        backdrop=rest,
        order=() if one else [task.shape_text(s) for s in task.shapes],
        thick=DISPATCHED,
    )
    groups = [g for g in GROUPS if any(task.best(s, g) is not None for s in task.shapes)]
    rows: list[list[Cell]] = [
        [
            task.shape_text(s),
            *(_to_variant(seconds_text(task.best(s, g)), task.fastest(s, g), anchor) for g in groups),
            _to_variant(_dispatched_text(task, s), task.dispatched(s), anchor),
            seconds_text(task.dispatched_secs(s)),
            _percent(task.regret(s)),
        ]
        for s in task.shapes
    ]
    numbers = (*(f"best {g}" for g in groups), "its time", "behind the best")
    columns = ("shape", *numbers[:-2], "dispatched", *numbers[-2:])
    facets = [task.facets_at(s) for s in task.shapes]
    values = table(columns, rows, numbers, facets=facets, groups={f"best {g}": g for g in groups})
    whole = replace(task.facets, groups=())
    return Figure(anchor, title, _shape_summary(task, contenders), chart, values, whole)


def _group_of_line(task: RecordedTask, name: str, shape: Shape) -> str | None:
    """Return the kind of variant that a line of `_contenders` has at a shape."""
    return task.group(task.dispatched(shape)) if name == DISPATCHED else name.removeprefix("best ")


def variants_table(task: RecordedTask, anchor: str) -> Table:
    """Return the variants that the figure of a task names, with their times and steps. anchor: id of the figure"""
    rows: list[list[Cell]] = []
    facets = list[Facets]()
    for key in task.named_variants:
        variant, times = task.variants.get(key), task.medians.get(key, {})
        if variant is None and task.plan is not None:
            variant = task.plan[1].get(key)
        if variant is not None:
            timed = ", ".join(f"{task.shape_text(s)}: {seconds_text(times[s])}" for s in task.shapes if s in times)
            place = Anchor(variant_text(variant), _place(key, anchor), True)
            rows.append([place, key[:12], timed or "-", _steps(variant)])
            facets.append(replace(task.facets, groups=(group_of(variant),)))
    caption = "`relax-tune show MODEL --task NAME --of KEY --what source` prints the source of a variant."
    columns = ("variant", "key", "median times", "steps")
    return table(columns, rows, title=f"Variants: {task.name}", caption=caption, facets=facets)


def _steps(variant: VariantRecord) -> str:
    """Return the steps of a schedule as Python."""
    try:
        return Trace.from_json(variant.trace).as_python(variant.values) or "-"
    except (RelaxTuneError, ValueError, KeyError, TypeError):  # several parts, or steps of a later version
        return variant.trace


def _to_variant(text: str, key: str | None, anchor: str) -> Cell:
    return text if key is None else Anchor(text, _place(key, anchor))


def _place(key: str, anchor: str) -> str:
    return f"{anchor}-{key[:12]}"


def _quantiles(values: Sequence[float], most: int) -> list[float]:
    """Return values in order, or at most `most` of them that are spread evenly from the smallest to the largest."""
    ordered = sorted(values)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(n * (len(ordered) - 1) / (most - 1))] for n in range(most)]


def _contenders(task: RecordedTask) -> dict[str, dict[Shape, float]]:
    """Return the lines of a task: what is dispatched, and the best of each kind at each shape, as far as they are known."""
    contenders: dict[str, dict[Shape, float]] = {}
    own = {s: secs for s in task.shapes if (secs := task.dispatched_secs(s)) is not None}
    if own:
        contenders[DISPATCHED] = own
    for group in GROUPS:
        best = {s: secs for s in task.shapes if (secs := task.best(s, group)) is not None}
        if best:
            contenders[f"best {group}"] = best
    return contenders


def _shape_summary(task: RecordedTask, contenders: Mapping[str, Mapping[Shape, float]]) -> str:
    parts = [f"{len(task.medians)} variants have times, at {len(task.shapes)} shapes."]
    if task.plan is None:
        parts.append("No plan is on record, so nothing is dispatched by measurement.")
    elif task.mean_regret is not None:
        used = list(dict.fromkeys(k for s in task.shapes if (k := task.dispatched(s)) is not None))
        parts.append(
            f"{len(used)} of them {'is' if len(used) == 1 else 'are'} dispatched, {_percent(task.mean_regret)} behind the best on record."
        )
    first, last = task.shapes[0], task.shapes[-1]
    tuned = contenders.get("best tuned", {})
    for name in ("best library", "best generic"):
        ends = [s for s in dict.fromkeys((first, last)) if s in tuned and s in contenders.get(name, {})]
        ratios = [f"{ratio_text(contenders[name][s], tuned[s])} as fast at {task.shape_text(s)}" for s in ends]
        if ratios:
            parts.append(f"Against the {name} form, the best tuned kernel is {' and '.join(ratios)}.")
    return " ".join(parts)


def _dispatched_text(task: RecordedTask, shape: Shape) -> str:
    key = task.dispatched(shape)
    if key is None or task.plan is None:
        return "-"
    return variant_text(task.plan[1][key]) if key in task.plan[1] else key[:12]


def convergence(tasks: Sequence[RecordedTask], anchor: str, by: str) -> Figure:
    """Make the figure of how the best times came down. by: `trials` or `seconds`"""
    title = f"Convergence by {by}"
    known = [t for t in tasks if t.convergence]
    if not known:
        searched = any(t.shown_records for t in tasks)
        why = (
            "The records do not say when they were measured, or lack times at some shape, so their order is unknown."
            if searched
            else "This run measured nothing: all it asked for was on record."
        )
        return Figure(anchor, title, why)
    whole = all_tasks(tasks)
    named = {ALL_TASKS: [replace(s, trials=s.trials / len(known)) for s in whole]} if len(known) > 1 and whole else {}
    named |= {t.name: t.convergence for t in known[: LINES - len(named)]}
    about = {t.name: replace(t.facets, groups=()) for t in known}
    drawn = [
        {"x": _along(s, by), "y": s.lag, "series": name, "line": about.get(name, ALL)}
        for name, steps in named.items()
        for s in steps
    ]
    chart = lines(
        drawn,
        x="candidates measured for a task (count)" if by == "trials" else "time of measuring (s)",
        y="time relative to the final time (ratio)",
        thick=ALL_TASKS,
        series=list(named),
        step=True,
        log_y=max(s.lag for steps in named.values() for s in steps) > 4,
    )
    rows = [
        [name, f"{_along(steps[-1], by):,.0f}", f"{_along(_close(steps), by):,.0f}", f"{steps[0].lag:.2f}"]
        for name, steps in ([("all tasks", whole)] if whole else []) + [(t.name, t.convergence) for t in known]
    ]
    facets = ([ALL] if whole else []) + [about[t.name] for t in known]
    numbers = (by, f"{by} to within 5 %", "first time over last")
    left = len(known) - (len(named) - (ALL_TASKS in named))
    summary = _convergence_summary(whole or known[0].convergence, by)
    if left > 0:
        summary += f" The picture shows the {len(known) - left} costliest tasks, the table all {len(known)}."
    return Figure(anchor, title, summary, chart, table(("task", *numbers), rows, numbers, facets=facets))


def _convergence_summary(steps: Sequence[SearchStep], by: str) -> str:
    close, end = _close(steps), steps[-1]
    unit = "candidates" if by == "trials" else "s of measuring"
    if end.trials == 0:
        return "No candidates were measured, only the generic, library and unfused forms."
    if steps[0].lag <= CLOSE:
        return f"{_FIRST} No later candidate was more than 5 % faster, in {_along(end, by):,.0f} {unit}."
    return (
        f"From {steps[0].lag:.2f} times the last time down to within 5 % of it "
        f"after {_along(close, by):,.0f} of {_along(end, by):,.0f} {unit}. {_FIRST}"
    )


def _along(step: SearchStep, by: str) -> float:
    return step.trials if by == "trials" else round(step.secs, 3)


def _close(steps: Sequence[SearchStep]) -> SearchStep:
    return next(s for s in steps if s.lag <= CLOSE)


def model_time(tasks: Sequence[RecordedTask], anchor: str) -> Figure:
    """Make the figure of where the time of a model goes."""
    counted = all(t.calls is not None for t in tasks)
    title = "Where the model's time goes" if counted else "Time of a call of each task"
    timed = [(t, t.secs * (t.calls or 0 if counted else 1)) for t in tasks if t.secs is not None]
    timed.sort(key=lambda pair: (-pair[1], pair[0].name))
    if not timed:
        return Figure(anchor, title, "No task has times for all that is dispatched; `relax-tune tune` measures them.")
    total = sum(secs for _, secs in timed) or 1.0
    unit, size = unit_of([secs for _, secs in timed])
    facets = [t.facets for t, _ in timed]
    drawn = [
        {"name": t.name, "value": 100 * secs / total if counted else secs / size, "facets": t.facets}
        for t, secs in timed
    ]
    x = "share of the time of all tasks (%)" if counted else f"time of a call ({unit})"
    top, secs = timed[0]
    lacking = [t.name for t in tasks if t.secs is None]
    if counted:
        summary = f"{top.name} takes {100 * secs / total:.0f} % of the {seconds_text(total)} that all tasks take in one run of the model."
    else:
        summary = (
            f"{top.name} takes longest, {seconds_text(secs)} a call. How often a model calls a task is not on record: "
            "give the artifact or the model for shares of its time."
        )
    if lacking:
        summary += f" Left out for want of times: {', '.join(lacking)}."
    summary += " Times are means over the timed shapes."
    rows = [
        [t.name, "-" if t.calls is None else str(t.calls), seconds_text(t.secs), seconds_text(s), _percent(s / total) if counted else "-"]
        for t, s in timed
    ]  # fmt: skip
    numbers: tuple[str, ...] = ("calls", "time of a call", "time in a run", "share")
    if not counted:
        rows = [[row[0], row[2]] for row in rows]
        numbers = numbers[1:2]
    values = table(("task", *numbers), rows, numbers, facets=facets)
    return Figure(anchor, title, summary, bars(drawn, x=x, name="task"), values)


def regret(tasks: Sequence[RecordedTask], anchor: str) -> Figure:
    """Make the figure of what the dispatched variants lose to the best on record."""
    title = "Regret against the best on record"
    known = [(t, t.mean_regret) for t in tasks if t.mean_regret is not None]
    if not known:
        return Figure(
            anchor,
            title,
            "No plan with times is on record, so nothing can be compared; `relax-tune tune` stores plans.",
        )
    known.sort(key=lambda pair: (-pair[1], pair[0].name))
    drawn = [{"name": t.name, "value": 100 * lost, "facets": t.facets} for t, lost in known]
    rows = []
    for t, lost in known:
        each = [(r, s) for s in t.shapes if (r := t.regret(s)) is not None]
        worst, where = max(each, key=lambda pair: (pair[0], pair[1]))
        missing = sum(t.dispatched_secs(s) is None for s in t.shapes)
        rows.append([t.name, _percent(lost), _percent(worst), t.shape_text(where), str(missing)])
    best = sum((t.secs or 0.0) * (t.calls or 1) / (1 + lost) for t, lost in known)
    own = sum((t.secs or 0.0) * (t.calls or 1) for t, lost in known)
    whole = own / best - 1 if best > 0 else 0.0
    summary = (
        f"What is dispatched is {_percent(whole)} behind the fastest variants on record, over all tasks by their time. "
        f"The most is lost in {known[0][0].name}, {_percent(known[0][1])}. "
        "A few per cent are noise, or the price of fewer variants."
    )
    numbers = ("mean", "worst", "shapes without a time")
    columns = ("task", "mean", "worst", "worst at", "shapes without a time")
    values = table(columns, rows, numbers, facets=[t.facets for t, _ in known])
    return Figure(anchor, title, summary, bars(drawn, x="time behind the best (%)", name="task"), values)


def failures(tasks: Sequence[RecordedTask], anchor: str) -> Figure:
    """Make the figure of failed measurements by cause."""
    title = "Failures by cause"
    failed = [(t, r) for t in tasks for r in t.failures]
    measured = sum(len(t.shown_records) for t in tasks)
    if not failed:
        return Figure(
            anchor, title, f"None of {measured} measurements failed." if measured else "Nothing was measured."
        )
    stages = Counter(str(r.stage) for _, r in failed)
    drawn = [{"name": stage, "value": count} for stage, count in stages.most_common()]
    rows = []
    for stage, count in stages.most_common():
        own = [(t, r) for t, r in failed if r.stage == stage]
        messages = Counter(_first_line(r) for _, r in own)
        where = Counter(t.name for t, _ in own)
        for message, times in messages.most_common(3):
            named = ", ".join(f"{name} ({n})" for name, n in where.most_common(3))
            rows.append([stage, str(count), str(times), message, named])
    top, most = stages.most_common(1)[0]
    summary = f"{len(failed)} of {measured} measurements failed, most often at the stage `{top}` ({most})."
    columns = ("stage", "failures", "of them", "message", "tasks")
    chart = bars(drawn, x="failed measurements (count)", name="stage", meaning=FAILED)
    return Figure(anchor, title, summary, chart, table(columns, rows, ("failures", "of them")))


def _first_line(record: Measurement) -> str:
    line = next(iter(record.message.splitlines()), "")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _percent(share: float | None) -> str:
    return "-" if share is None or not math.isfinite(share) else f"{100 * share:.1f} %"
