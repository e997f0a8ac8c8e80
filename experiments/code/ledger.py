"""Account for the lines of two revisions: the cuts that a review proposed, the growth by subject, and what the lines are.

    python -m experiments.code.ledger b9130345 HEAD --write

A row of the ledger counts the files that an item concerns, at both revisions. Patterns are those of `fnmatch`: `*` matches `/` too.
Code lines leave out docstrings, comments, imports and blank lines. Prints the tables; `--write` writes them to
results/code_ledger.md.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from experiments.code.shape import FRAGMENT_LINES, PRODUCT, code_lines, comment_lines, sources
from experiments.harness.pages import environment, write_page

Files = Mapping[str, str]
"""Text of each module, by path."""


def lines_of(texts: Files) -> int:
    return sum(text.count("\n") for text in texts.values())


def import_lines(texts: Files) -> int:
    return sum(_extent(n) for n in _nodes(texts) if isinstance(n, ast.Import | ast.ImportFrom))


def raise_lines(texts: Files) -> int:
    return sum(_extent(n) for n in _nodes(texts) if isinstance(n, ast.Raise))


def ellipses(texts: Files) -> int:
    return sum(line.strip() == "..." for text in texts.values() for line in text.splitlines())


def small_modules(texts: Files) -> int:
    """Count the modules of few lines; packages' own modules do not count."""
    return sum(text.count("\n") <= FRAGMENT_LINES for path, text in texts.items() if not path.endswith("__init__.py"))


def _nodes(texts: Files) -> list[ast.AST]:
    return [node for text in texts.values() for node in ast.walk(ast.parse(text))]


def _extent(node: ast.AST) -> int:
    return int(node.end_lineno or node.lineno) - int(node.lineno) + 1  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Item:
    """An item of the review's ledger.

    Attributes:
        title: What was to be cut.
        predicted: Lines that the review expected to save.
        paths: Patterns of the files concerned, at either revision; none for all of the product.
        outcome: What was done, or why it was not.
        added: Patterns of files with capabilities that the older revision lacks, which do not count.
        count: What is counted.
        unit: Its name.
    """

    title: str
    predicted: int
    paths: tuple[str, ...]
    outcome: str
    added: tuple[str, ...] = ()
    count: Callable[[Files], int] = lines_of
    unit: str = "lines"


HF, ONNX, TORCH = "ir/frontend/hf/*", "ir/frontend/onnx/*", "ir/frontend/torch/*"
NEW_HF = tuple(
    f"ir/frontend/hf/{name}.py"
    for name in (
        "quantized", "sentence", "pooling", "families/hybrids", "transformer/state_space", "transformer/delta_rule",
        "transformer/mixers",
    )
)  # fmt: skip
NEW_IMPORTS = (
    *(f"ir/frontend/onnx/{name}.py" for name in ("trees", "scores", "learning", "support_vectors")),
    "ir/frontend/onnx/microsoft/*", "ir/frontend/shared/known_elements.py", "ir/frontend/shared/element_rules.py",
)  # fmt: skip

LEDGER = (
    Item("import blocks", 2700, (), "Not done. It would touch every module, and shorten only the heads of files.",
         count=import_lines, unit="import lines"),
    Item("`...` after a docstring", 96, (), "Half done.",
         count=ellipses, unit="such lines"),
    Item("one SQL schema", 1090,
         ("database/sql/*", "database/migrations/*", "database/upgrade.py", "database/stored_names.py"),
         "Done: one revision and one layout. `tools/convert_database.py`, outside of the package, converts older files."),
    Item("`MemoryStore` by SQLite in memory", 330, ("database/memory_store.py",),
         "Not done. It is the second implementation of `Store`, with which the contract suite compares the SQL stores."),
    Item("operators from the scalar table; `legalize` with one argument", 600, ("ir/op/*",),
         "Done: classes of unary and binary operators state a name and exceptions only.", added=("ir/op/reduction/trees.py",)),
    Item("lists of operators in registries and importers", 250,
         ("ir/op/registry.py", f"{ONNX[:-1]}math.py", f"{ONNX[:-1]}numeric.py", f"{TORCH[:-1]}math.py",
          "ir/frontend/shared/operators.py"),
         "Done: the registry lists modules, and one table names the operators of both importers."),
    Item("one transformer for Hugging Face folders", 1500, (HF,),
         "Done: one specification, one builder, one table of families. New in the same modules: attention biases, experts, "
         "programs of several functions, and families that need them.", added=NEW_HF),
    Item("one node protocol for ONNX and torch", 1200, (ONNX, TORCH, "ir/frontend/shared/*"),
         "Done for what both have (`shared/handlers`). Both importers gained operators, and the right values at the ends of "
         "types, at infinities and NaN.", added=NEW_IMPORTS),
    Item("one job and one virtual machine for several devices", 450,
         ("ir/passes/placement/*", "tuner/placement/*", "runtime/placement/*", "runtime/program/placement.py", "runtime/vm*",
          "tuner/emit/emit_placed.py", "tuner/cli/commands/several.py", "tuner/cli/commands/multi_device.py", "ir/op/devices.py"),
         "Done: one machine with a queue per device."),
    Item("executor and calls", 250,
         ("runtime/executor.py", "runtime/calls/*", "runtime/bound_program.py", "runtime/program_memory.py"),
         "Done: two entry points. Memory and launches became modules of their own, whose docstrings and heads cost the difference."),
    Item("one subject of reports, three renderers", 700,
         ("tuner/report/*", "tuner/cli/report/*", "tuner/dashboard/*", "tuner/cli/commands/views/*"),
         "Done for what existed. Listings of the database, of devices and of fleets are new."),
    Item("pairs of JSON and text in commands", 400, ("tuner/cli/commands/*",),
         "Done by `view`; the commands grew by fleets, exchange of records and folders of sentence models."),
    Item("fragments merged", 600, (), "Done.", count=small_modules, unit=f"modules of at most {FRAGMENT_LINES} lines"),
    Item("unreachable code", 550,
         ("schedules/rules/gpu/wgmma.py", "ir/hardware/wgmma.py", "tuner/search/models/cost_model.py",
          "ir/passes/memory/inplace.py", "runtime/device/quirks.py"),
         "Done (`RidgeModel`, the pass `Inplace`, quirks without effect), but for `wgmma`: the CUDA device now states this "
         "capability of sm_90, so its rule is reached."),
    Item("`raise` statements", 500, (),
         "Not done: messages became longer, since they say what to do.", count=raise_lines, unit="lines of `raise`"),
)  # fmt: skip

SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "decision trees, support vectors and other ONNX-ML operators": (
        *(f"ir/frontend/onnx/{name}*.py" for name in ("trees", "scores", "learning", "support_vectors", "domains/ml")),
        "ir/op/reduction/trees.py", "schedules/rules/cpu/descents.py",
    ),
    "operators of com.microsoft": ("ir/frontend/onnx/microsoft/*",),
    "importers of ONNX and torch, what they share": (ONNX, TORCH, "ir/frontend/shared/*"),
    "model folders and GGUF": (HF, "ir/frontend/gguf/*", "ir/frontend/*"),
    "untrusted input: checks, confinement, signatures": (
        "ir/check/*", "runtime/device/confinement.py", "runtime/device/binaries.py", "runtime/hashed_zip.py",
        "runtime/validation.py", "database/sql/integrity.py", "tuner/printable.py", "tuner/measure/cluster/trust/*",
    ),
    "fleets: workers, leases, submitted jobs": (
        "tuner/measure/*", "tuner/service/*", "tuner/job/*", "database/jobs/*", "tuner/cli/commands/fleet/*",
    ),
    "stores": ("database/*",),
    "knowledge between devices: similar devices, priors, plans": ("tuner/learn/*", "tuner/plan/*"),
    "search": ("tuner/search/*", "tuner/task/*"),
    "reports and commands": ("tuner/report/*", "tuner/dashboard/*", "tuner/cli/*", "tuner/web/*"),
    "schedules": ("schedules/*",),
    "code generation": ("ir/codegen/*", "ir/hardware/*"),
    "operators": ("ir/op/*",),
    "passes, deduction, interpreter and the rest of the IR": ("ir/*",),
    "runtime and devices": ("runtime/*",),
    "builds, exports, packs, quality, placement and the facade": ("*",),
}  # fmt: skip


def matching(texts: Files, paths: tuple[str, ...], without: tuple[str, ...] = ()) -> Files:
    """Return the modules that a pattern of `paths` and none of `without` matches; without patterns all of them."""
    chosen = {p: t for p, t in texts.items() if not paths or any(fnmatch(p, pattern) for pattern in paths)}
    return {p: t for p, t in chosen.items() if not any(fnmatch(p, pattern) for pattern in without)}


def by_subject(texts: Files) -> dict[str, Files]:
    """Return the modules of each subject; a module belongs to the first one that matches."""
    parts: dict[str, dict[str, str]] = {name: {} for name in SUBJECTS}
    for path, text in texts.items():
        name = next(n for n, patterns in SUBJECTS.items() if any(fnmatch(path, p) for p in patterns))
        parts[name][path] = text
    return dict(parts)


def code_of(texts: Files) -> int:
    return sum(code_lines(text, ast.parse(text)) for text in texts.values())


def composition(texts: Files) -> Counter[str]:
    """Count lines by kind. A comment at the end of a line of code counts as code."""
    counts: Counter[str] = Counter()
    for text in texts.values():
        lines = text.splitlines()
        blank = sum(not line.strip() for line in lines)
        comments = sum(line.lstrip().startswith("#") for line in lines)
        counts["code"] += code_lines(text, ast.parse(text))
        counts["imports"] += import_lines({"": text})
        counts["comments on lines without code"] += comments
        counts["blank lines outside of docstrings"] += blank - sum(
            not line.strip() for doc in _docstrings(text) for line in doc
        )
        counts["docstrings"] += sum(map(len, _docstrings(text)))
        counts["all lines with a comment"] += comment_lines(text)
    return counts


def _docstrings(text: str) -> list[list[str]]:
    """Return the lines of each text that stands as a statement."""
    lines = text.splitlines()
    statements = [n for n in _nodes({"": text}) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return [
        lines[n.lineno - 1 : n.end_lineno]
        for n in statements
        if isinstance(n.value, ast.Constant) and isinstance(n.value.value, str)
    ]


def tables(old: Files, new: Files) -> list[str]:
    """Return the page's tables."""
    page = [
        "## The review's ledger",
        "",
        "| item | predicted | counted | before | after | change | change of code lines | outcome |",
    ]
    page.append("|---|---|---|---|---|---|---|---|")
    for item in LEDGER:
        parts = [matching(t, item.paths, item.added) for t in (old, new)]
        a, b = map(item.count, parts)
        code = f"{code_of(parts[1]) - code_of(parts[0]):+,}" if item.count is lines_of else ""
        outcome = item.outcome
        if item.added:
            outcome += f" Without {lines_of(matching(new, item.added)):,} lines in modules of new capabilities."
        page.append(
            f"| {item.title} | -{item.predicted:,} | {item.unit} | {a:,} | {b:,} | {b - a:+,} | {code} | {outcome} |"
        )
    page += ["", "## Growth by subject", "", "| subject | lines before | after | change | change of code lines |"]
    page.append("|---|---|---|---|---|")
    subjects = by_subject(old), by_subject(new)
    for name in SUBJECTS:
        x, y = subjects[0][name], subjects[1][name]
        change, code = lines_of(y) - lines_of(x), code_of(y) - code_of(x)
        page.append(f"| {name} | {lines_of(x):,} | {lines_of(y):,} | {change:+,} | {code:+,} |")
    total = lines_of(new) - lines_of(old)
    page.append(f"| all | {lines_of(old):,} | {lines_of(new):,} | {total:+,} | {code_of(new) - code_of(old):+,} |")
    page += ["", "## Lines by kind", "", "| kind | before | after | change |", "|---|---|---|---|"]
    kinds = composition(old), composition(new)
    page += [f"| {k} | {kinds[0][k]:,} | {kinds[1][k]:,} | {kinds[1][k] - kinds[0][k]:+,} |" for k in kinds[0]]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--write", action="store_true", help="write the page to experiments/results/code_ledger.md")
    arguments = parser.parse_args()
    old, new = ({str(p): t for p, t in sources(r, *PRODUCT).items()} for r in (arguments.old, arguments.new))
    command = f"`python -m experiments.code.ledger {arguments.old} {arguments.new} --write`"
    page = ["# Where the lines went", "", command, "", *tables(old, new)]
    if arguments.write:
        write_page("code_ledger", page, None, environment(), quiet=True)
    print("\n".join(page))


if __name__ == "__main__":
    main()
