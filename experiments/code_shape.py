"""Count what a reader of the code meets, at one revision or several side by side.

    python experiments/code_shape.py 8560d24 HEAD

Product code is `ir schedules tuner runtime database src`. Import lines are the lines that import statements take. A folder counts
as crowded above 15 modules (`__init__` not counted). Prints a Markdown table; `--write` puts it into results/code_shape.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import tarfile
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("ir", "schedules", "tuner", "runtime", "database", "src")
CROWDED = 15


def sources(revision: str) -> dict[PurePosixPath, str]:
    """Path -> text of every Python module of the product at a revision."""
    data = subprocess.run(["git", "archive", revision, *PRODUCT], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = [m for m in archive.getmembers() if m.isfile() and m.name.endswith(".py")]
        return {PurePosixPath(m.name): archive.extractfile(m).read().decode() for m in found}  # type: ignore[union-attr]


def shape(revision: str) -> dict[str, str]:
    """Row name -> value, for one revision."""
    texts = sources(revision)
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
    folders = Counter(str(path.parent) for path in modules)
    largest = max(lines, key=lambda p: lines[p])
    crowded = sorted(
        (f"{folder} {n}" for folder, n in folders.items() if n > CROWDED), key=lambda x: -int(x.split()[1])
    )
    return {
        "product lines": f"{sum(lines.values()):,}",
        "modules": str(len(modules)),
        "import lines": f"{imports:,} ({imports / sum(lines.values()):.1%})",
        "`isinstance` calls": f"{calls.count('isinstance'):,}",
        "median module, lines": f"{statistics.median(modules.values()):.0f}",
        "largest module": f"{largest} ({lines[largest]})",
        "functions above 60 lines": str(sum(n > 60 for n in functions)),
        "class names used more than once": str(sum(n > 1 for n in classes.values())),
        f"folders above {CROWDED} modules": f"{len(crowded)}: {', '.join(crowded)}" if crowded else "0",
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
        head = (
            "# The shape of the code\n\n`python experiments/code_shape.py "
            + " ".join(arguments.revisions)
            + " --write`\n\n"
        )
        (ROOT / "experiments" / "results" / "code_shape.md").write_text(head + text)


if __name__ == "__main__":
    main()
