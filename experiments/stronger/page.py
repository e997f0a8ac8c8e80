"""The page of `peers.py`, by class of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.e2e_cases import geomean, ratios
from experiments.stronger.cases import CLASSES, MEANINGS, tolerance_of

# Instructions that decide what a class of weights can gain, as Linux names them.
INSTRUCTIONS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
)  # fmt: skip
Records = Mapping[str, Any]


def instructions(text: str | None = None) -> str:
    """Say which instructions the processor has and lacks. text: of /proc/cpuinfo"""
    found = Path("/proc/cpuinfo").read_text() if text is None else text
    flags = next((x.split(":")[1].split() for x in found.splitlines() if x.startswith("flags")), [])
    has, lacks = ([i for i in INSTRUCTIONS if (i in flags) is wanted] for wanted in (True, False))
    return f"has {', '.join(has) or 'none of these'}; lacks {', '.join(lacks) or 'none of these'}"


def medians(record: Records) -> dict[str, dict[str, float]]:
    """Return milliseconds by case and contender."""
    return {case: {n: v["median_us"] / 1e3 for n, v in row.items()} for case, row in record["times"].items()}


def table(model: str, record: Records, label: str) -> list[str]:
    """Return the times of one class at every case, and ours over the best peer."""
    chosen, rows = CLASSES[label], medians(record)
    lines = [f"| {model}, {label} | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for name in (*chosen.ours, *chosen.peers):
        cells = [f"{row[name]:.3g}" if name in row else "-" for row in rows.values()]
        lines.append(f"| {f'**{name}**' if name in chosen.ours else name} | " + " | ".join(cells) + " |")
    for name in chosen.ours:
        found = ratios(rows, name, chosen.peers)
        cells = [f"{found[case]:.2f}" if case in found else "-" for case in rows]
        lines.append(f"| best peer / {name} | " + " | ".join(cells) + " |")
    best = [
        min((row[n], n) for n in chosen.peers if n in row)[1] if any(n in row for n in chosen.peers) else "-"
        for row in rows.values()
    ]
    return [*lines, "| best peer | " + " | ".join(best) + " |", ""]


def overview(found: Records) -> list[str]:
    """Return ours over the best peer by class and model: geometric mean, least, and where that is."""
    lines = ["| class | ours | " + " | ".join(found) + " |", "|---" * (len(found) + 2) + "|"]
    for label, chosen in CLASSES.items():
        for name in chosen.ours:
            cells = []
            for record in found.values():
                leads = ratios(medians(record), name, chosen.peers)
                least = min(leads, key=leads.__getitem__, default="")
                cells.append(
                    f"{geomean(list(leads.values())):.2f}, least {leads[least]:.2f} at {least}" if leads else "-"
                )
            lines.append(f"| {label} | {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def errors(found: Records) -> list[str]:
    """Return the largest error of each contender by model."""
    lines = ["| error | allowed | " + " | ".join(found) + " |", "|---" * (len(found) + 2) + "|"]
    for chosen in CLASSES.values():
        for name in (*chosen.ours, *chosen.peers):
            own = [max(r["errors"].get(name, {}).values(), default=None) for r in found.values()]
            cells = ["-" if e is None else f"{e:.1e}" for e in own]
            lines.append(f"| {name} | {tolerance_of(name):g} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def missing(found: Records) -> list[str]:
    """Return a line for each contender that could not take part, or not everywhere."""
    lines = [f"* {model}, {name}: {why}" for model, record in found.items() for name, why in record["failed"].items()]
    return lines or ["All took part at every case."]


def page(found: Records, processor: str | None = None) -> list[str]:
    """Return the page of the models' records. processor: text of /proc/cpuinfo, by default of this machine"""
    if not found:
        return ["# Whole models and stronger peers", "", "Nothing was timed."]
    first: Mapping[str, Any] = next(iter(found.values()))
    trials = {m: ", ".join(f"{n} {t['trials']}" for n, t in r["tuning"].items()) for m, r in found.items()}
    told = [f"{model} in {r['rounds']} rounds, trials per task: {trials[model]}" for model, r in found.items()]
    lines = [
        "# Whole models and stronger peers", "",
        f"Written by `experiments/stronger/peers.py`: {'; '.join(told)}. Medians in milliseconds, in turns, two threads. minilm: batch x "
        "length; prefill: tokens; decode: one token after as many. Contenders without times were not measured, or are listed below.", "",
        f"The processor ({first['environment']['cpu']}) {instructions(processor)}.", "",
        "## Times of the best peer over ours", "", *overview(found),
    ]  # fmt: skip
    for label in CLASSES:
        lines += [f"## {label[0].upper()}{label[1:]}", ""]
        for model, record in found.items():
            lines += table(model, record, label)
    lines += ["## Results compared with torch's in float32", ""]
    lines += ["The norm of the difference over that of torch eager's results, the largest over the cases.", ""]
    lines += [*errors(found), "## Not timed", "", *missing(found), "", "## Contenders", ""]
    lines += [f"* {name}: {meaning}" for name, meaning in MEANINGS.items()]
    notes: Sequence[str] = [
        f"* {model}, {name} says: {note}" for model, r in found.items() for name, note in r["notes"].items()
    ]
    lines += ["", *dict.fromkeys(notes), "", "## Tuning of ours", ""]
    lines += ["Figures of the last call, which reuses the records of earlier calls.", ""]
    for model, record in found.items():
        tuned = (f"{n} {t['candidates']} candidates in {t['wall_secs']} s" for n, t in record["tuning"].items())
        lines.append(f"* {model}: {'; '.join(tuned) or 'none'}")
    lines += ["", "Versions: " + ", ".join(f"{p} {v}" for p, v in first["asked"]["versions"].items()) + ".", ""]
    return lines
