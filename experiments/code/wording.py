"""Ten docstrings and ten errors of two revisions, side by side.

    python -m experiments.code.wording b9130345 HEAD

The texts are read from git. `--write` writes results/code_wording.md.
"""

from __future__ import annotations

import argparse
import ast
import subprocess

from experiments.harness.pages import ROOT, environment, write_page

DOCSTRINGS = (
    "ir/core/expr.py:Op", "ir/core/expr.py:Load", "ir/core/expr.py:_folded", "ir/op/math/elementwise.py:ScalarUnary",
    "ir/passes/fusion/fuse.py:_compared_copies", "ir/passes/fusion/fuse.py:_all_cheap", "runtime/executor.py:_launch_of",
    "runtime/executor.py:call", "runtime/device/base.py:DeviceClock", "database/rules.py:Spent",
)  # fmt: skip
ERRORS = (
    "ir/op/math/elementwise.py:broadcast_dims", "ir/deduce/deduce.py:placed", "ir/deduce/deduce.py:require_bounds",
    "schedules/primitives/loops/loops.py:fuse", "schedules/primitives/loops/loops.py:_require_initial_values",
    "schedules/primitives/loops/loops.py:_require_own_points", "runtime/executor.py:check_open",
    "runtime/arguments.py:match_symbols", "tuner/settings.py:find_sources", "database/engine.py:make_engine",
)  # fmt: skip
"""Functions with one `raise` in both revisions."""


def definition(revision: str, place: str) -> ast.FunctionDef | ast.ClassDef:
    """Return a function or class of a revision, given as `path:name`."""
    path, name = place.split(":")
    text = subprocess.run(["git", "show", f"{revision}:{path}"], cwd=ROOT, capture_output=True, text=True, check=True)
    nodes = (n for n in ast.walk(ast.parse(text.stdout)) if isinstance(n, ast.FunctionDef | ast.ClassDef))
    return next(n for n in nodes if n.name == name)


def docstring(revision: str, place: str) -> str:
    return ast.get_docstring(definition(revision, place)) or ""


def error(revision: str, place: str) -> str:
    """Return the message of the only `raise` of a function, with its parts in braces."""
    (call,) = (
        n.exc for n in ast.walk(definition(revision, place)) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)
    )
    message = call.args[0]
    if isinstance(message, ast.Constant):
        return str(message.value)
    assert isinstance(message, ast.JoinedStr)
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined]
        for part in message.values
    )


def lines(before: str, after: str) -> list[str]:
    """Return the Markdown lines of the comparison."""
    page: list[str] = []
    for title, places, read in (("Docstrings", DOCSTRINGS, docstring), ("Errors", ERRORS, error)):
        page += ["", f"## {title}"]
        for place in places:
            page += ["", f"`{place}`, before and after:", "", "```text", read(before, place), "```", ""]
            page += ["```text", read(after, place), "```"]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default="HEAD")
    parser.add_argument("--write", action="store_true", help="write results/code_wording.md")
    arguments = parser.parse_args()
    page = lines(arguments.before, arguments.after)
    print("\n".join(page))
    if arguments.write:
        command = f"`python -m experiments.code.wording {arguments.before} {arguments.after} --write`"
        write_page(
            "code_wording",
            ["# Docstrings and errors, before and after", "", command, *page],
            None,
            environment(),
            quiet=True,
        )


if __name__ == "__main__":
    main()
