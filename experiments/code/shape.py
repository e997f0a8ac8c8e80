"""Count files, lines, comments, tests and denied words at one or several revisions.

    python -m experiments.code.shape 8560d24 HEAD

Product code is `ir schedules tuner runtime database src`. Import lines are the lines that import statements take. Denied words are
those of `tests/test_language.py` of this checkout, for every revision alike. A module has its test if the file at the mirrored path
exists, or if the module's docstring names one. Recipes are the sections of CONTRIBUTING that `tests/recipes` follows; their tests
state the number of product files.
Prints a Markdown table; `--write` writes it to results/code_shape.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import tarfile
import tokenize
from collections import Counter
from pathlib import PurePosixPath

from tests.test_language import denied  # the one definition of the deny list

from experiments.harness.pages import ROOT, environment, write_page

PRODUCT = ("ir", "schedules", "tuner", "runtime", "database", "src")
FRAGMENT_LINES = 60


def sources(revision: str, *folders: str) -> dict[PurePosixPath, str]:
    """Return the text of every Python module in these folders of a revision, by path."""
    data = subprocess.run(["git", "archive", revision, *folders], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [m for m in archive.getmembers() if m.isfile() and m.name.endswith(".py")]
        return {PurePosixPath(m.name): archive.extractfile(m).read().decode() for m in members}  # type: ignore[union-attr]


def comment_lines(text: str) -> int:
    """Count the lines that hold a comment; directives of tools do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    switches = re.compile(r"#\s*(type:|noqa|fmt:|pragma)")
    return sum(t.type == tokenize.COMMENT and not switches.match(t.string) for t in tokens)


def code_lines(text: str, tree: ast.Module) -> int:
    """Count the lines that hold code: neither blank, nor only a comment, nor part of a docstring or an import."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    lines = enumerate(text.splitlines(), 1)
    return sum(n not in skipped and bool(line.strip()) and not line.lstrip().startswith("#") for n, line in lines)


def recipes(tests: dict[PurePosixPath, str]) -> str:
    """Return the product files that each tested recipe changes, as the docstrings of the tests state them."""
    counts = []
    for path, text in sorted(tests.items()):
        if path.match("tests/recipes/test_add_*.py"):
            number = re.search(r"\b(one|two|three|four|five|six) (?:product )?files?\b", text.partition("\n")[0])
            counts.append(f"{path.stem.removeprefix('test_add_')} {number[1] if number else '?'}")
    return ", ".join(counts) or "not tested"


def has_test(path: PurePosixPath, tree: ast.Module, tests: set[str]) -> bool:
    """Return whether a module has a test file at the mirrored path or names one in its docstring."""
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ast.get_docstring(tree) or "").partition("Tests:")[2])
    return f"tests/{path.parent}/test_{path.name}" in tests or any(name in tests for name in named)


def fragments(modules: dict[PurePosixPath, int], trees: dict[PurePosixPath, ast.Module]) -> int:
    """Count the modules of few lines that exactly one module imports."""
    importers: dict[str, set[PurePosixPath]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]:
                    importers.setdefault(name, set()).add(path)
    names = {path: "relax_tune." + str(path.with_suffix("")).replace("/", ".") for path in modules}
    return sum(n <= FRAGMENT_LINES and len(importers.get(names[path], ())) == 1 for path, n in modules.items())


def shape(revision: str) -> dict[str, str]:
    """Row name -> value, for one revision."""
    texts, tests = sources(revision, *PRODUCT), sources(revision, "tests")
    lines = {path: text.count("\n") for path, text in texts.items()}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    imports = sum(
        (n.end_lineno or n.lineno) - n.lineno + 1 for _, n in nodes if isinstance(n, ast.Import | ast.ImportFrom)
    )
    calls = [n.func.id for _, n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    functions = [
        (n.end_lineno or n.lineno) - n.lineno + 1
        for _, n in nodes
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    classes = Counter(n.name for _, n in nodes if isinstance(n, ast.ClassDef))
    modules = {path: n for path, n in lines.items() if path.name != "__init__.py"}
    largest = max(lines, key=lambda p: lines[p])
    words = sum((denied(text) for text in texts.values()), Counter[str]())
    commonest = ", ".join(f"{word} {n:,}" for word, n in words.most_common(6))
    comments = sum(map(comment_lines, texts.values()))
    tested = sum(has_test(path, trees[path], set(map(str, tests))) for path in modules if path.parts[0] != "src")
    return {
        "product lines": f"{sum(lines.values()):,}",
        "code lines, without docstrings, comments, imports and blanks": f"{sum(code_lines(t, trees[p]) for p, t in texts.items()):,}",
        "test lines": f"{sum(text.count(chr(10)) for text in tests.values()):,}",
        "modules": str(len(modules)),
        f"modules of at most {FRAGMENT_LINES} lines with one importer": str(fragments(modules, trees)),
        "modules with a mirrored or named test": f"{tested} of {sum(path.parts[0] != 'src' for path in modules)}",
        "uses of denied words": f"{sum(words.values()):,} ({commonest})",
        "lines with a comment": f"{comments:,} ({comments / sum(lines.values()):.1%})",
        "product files of a recipe": recipes(tests),
        "import lines": f"{imports:,} ({imports / sum(lines.values()):.1%})",
        "`isinstance` calls": f"{calls.count('isinstance'):,}",
        "median module, lines": f"{statistics.median(modules.values()):.0f}",
        "largest module": f"{largest} ({lines[largest]})",
        "functions above 60 lines": str(sum(n > 60 for n in functions)),
        "class names used more than once": str(sum(n > 1 for n in classes.values())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", default=["HEAD"])
    parser.add_argument("--write", action="store_true", help="write the table to experiments/results/code_shape.md")
    arguments = parser.parse_args()
    columns = {r: shape(r) for r in arguments.revisions}
    names = {
        r: subprocess.run(
            ["git", "rev-parse", "--short", r], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        for r in columns
    }
    table = [f"| | {' | '.join(names.values())} |", f"|---|{'---|' * len(columns)}"]
    table += [f"| {row} | {' | '.join(c[row] for c in columns.values())} |" for row in next(iter(columns.values()))]
    text = "\n".join(table) + "\n"
    print(text, end="")
    if arguments.write:
        command = f"`python -m experiments.code.shape {' '.join(arguments.revisions)} --write`"
        lines = ["# The shape of the code", "", command, "", *table]
        write_page("code_shape", lines, None, environment(), quiet=True)


if __name__ == "__main__":
    main()
