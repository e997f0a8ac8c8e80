"""The page of campaigns of an importer: `python -m tests.fuzz.importers.results build/fuzz/onnx7.json build/fuzz/onnx8.json`.

The name of a file of totals ends with the seed of its campaign. Programs that differed from the oracles are tried again, with the
present importer and judge, before the page is written. With `--importer torch` the campaigns are of programs of torch.export.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from experiments.harness.pages import environment, write_page
from tests.fuzz.importers.run import Totals, Trials, fingerprint, one, trials_of

PAGES: Mapping[str, tuple[str, str, str]] = {
    "onnx": (
        "onnx_programs", "Random ONNX programs",
        "programs that\n`onnx.reference` and ONNX Runtime without graph optimisations run, imported, interpreted and compared at two "
        "calls. An\nelement on which these two disagree does not count.",
    ),
    "torch": (
        "torch_programs", "Random programs of torch.export",
        "programs that torch runs\nand exports, imported, interpreted and compared at up to three calls, with torch and with the exported "
        "program as torch runs it.",
    ),
}  # fmt: skip
"""Name of the page, its title, and what was compared, by importer."""


def tried_again(trials: Trials, seed: int, totals: Totals) -> list[tuple[int, str]]:
    """Try the findings of a campaign again, and count what they are now; return those that still differ."""
    left = []
    for number, _ in totals.findings:
        outcome = one(trials, seed, number, None)
        kind = "no program" if outcome is None else outcome.kind or "agrees"
        totals.elements[f"tried again: {kind}"] += 1
        if outcome is not None and outcome.is_finding:
            left.append((number, outcome.why))
    return left


def merged(parts: Mapping[int, Totals]) -> Totals:
    whole = Totals()
    for totals in parts.values():
        whole.secs += totals.secs
        for name in ("kinds", "operators", "elements", "refusals", "sources"):
            counter: Counter[str] = getattr(whole, name)
            counter.update(getattr(totals, name))
    return whole


def page(parts: Mapping[int, Totals], importer: str) -> list[str]:
    """Return the lines of the page of results."""
    trials = trials_of(importer)
    _, title, compared = PAGES[importer]
    left = {seed: tried_again(trials, seed, totals) for seed, totals in parts.items()}
    whole = merged(parts)
    kinds, elements = whole.kinds, whole.elements
    never = [op for d, op in trials.operators() if not whole.operators[f"{d}.{op}" if d else op]]
    again = {k.partition(": ")[2]: n for k, n in elements.items() if k.startswith("tried again")}
    rows = [
        ("programs", sum(kinds.values())), ("of these agreed with the oracles", kinds["agrees"]),
        ("differed when they were first tried", kinds["wrong"] + kinds["crash"]), ("refused at import", kinds["refused import"]),
        ("refused at a call", kinds["refused call"]), ("wrongly tied dims, refused", kinds["refused as wrongly tied"]),
        ("no oracle, an oracle died or no program", kinds["no oracle"] + kinds["an oracle died"] + kinds["no program"]),
        ("no answer in time", kinds["no answer"]), ("built for c at -O3, too", elements["built for c"]),
        ("could not be built", kinds["not built"]), ("elements judged", elements["judged"]),
        ("elements on which the oracles disagree", elements["disagreements"]),
        ("elements that rounding decides", elements["unsure"]), ("operators", len(whole.operators)),
    ]  # fmt: skip
    seeds = ", ".join(map(str, parts))
    command = "python -m tests.fuzz.importers.run" + (f" --importer {importer}" if importer != "onnx" else "")
    lines = [f"# {title}", "", f"`{command} --seed N`, seeds {seeds}: {compared}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {count:,} |" for name, count in rows]
    lines += [
        "",
        f"Those that differed were tried again with sources {fingerprint()}, which are those of this commit. ",
    ]
    lines[-1] += "Outcomes: " + (", ".join(f"{kind} {n}" for kind, n in sorted(again.items())) or "none") + "."
    by_sources = ", ".join(f"{n:,} ({form})" for form, n in whole.sources.items())
    lines += [
        "",
        f"Programs by the sources that made, imported and judged them: {by_sources}. Where a generator changed since,",
    ]
    lines += ["the same number may be another program."]
    without = Counter(op.rpartition(".")[0] or "no domain" for op in trials.uncovered())
    shown = ", ".join(f"{n} operators of {domain}" for domain, n in without.items())
    lines += ["", f"No program had: {', '.join(never) or 'none'}. Without a generator: {shown or 'none'}."]
    lines += ["", f"{whole.secs:.0f} s of wall time, beside other work on the machine.", ""]
    lost = [f"{seed}: program {number}, {why}" for seed, totals in parts.items() for number, why in totals.lost]
    lines += [f"Programs without an outcome, by seed: {'; '.join(lost)}.", ""] if lost else []
    differences = [(seed, *finding) for seed, findings in left.items() for finding in findings]
    if differences:
        lines += ["| seed | program | difference |", "|---|---|---|"]
        lines += [f"| {seed} | {number} | {why.splitlines()[0][:160]} |" for seed, number, why in differences]
        lines += [""]
    lines += [
        "## Refusals, and programs without an oracle",
        "",
        "| programs | reason | the first one, tried again |",
        "|---|---|---|",
    ]
    for text, count in whole.refusals.most_common(25):
        example = next(((seed, t.examples[text]) for seed, t in parts.items() if text in t.examples), None)
        again = "" if example is None else f"{example[0]}, {example[1]}: {kind_of(trials, *example)}"
        lines.append(f"| {count} | {' '.join(text.split()).replace('|', '/')} | {again} |")
    return lines


def kind_of(trials: Trials, seed: int, number: int) -> str:
    """Return the kind of the outcome of a program."""
    outcome = one(trials, seed, number, None)
    return "no program" if outcome is None else outcome.kind or "agrees"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--importer", choices=tuple(PAGES), default="onnx")
    parser.add_argument("states", type=Path, nargs="+", help="files of totals, whose names end with the seed")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    measured = environment()
    parts = {int(re.findall(r"\d+", file.stem)[-1]): Totals.read(file) for file in asked.states}
    write_page(PAGES[asked.importer][0], page(parts, asked.importer), None, measured, quiet=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
