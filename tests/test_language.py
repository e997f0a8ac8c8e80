"""The words of the code: docstrings, function lengths, class names, test names.

A function above 60 lines says why in its docstring: "Above 60 lines, since ...". The docstring of a function begins with a
verb; those of properties, classes and modules are noun phrases.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("ir", "schedules", "tuner", "runtime", "database")

LONGEST_FIRST, LONGEST, LONGEST_FUNCTION = 20, 30, 60
RIDDLE = re.compile(r"(What|Which|Whether|Where|How|When|Who|Those|That|There|It|They)\b")
# A function's docstring begins with a verb, so it begins with none of these words, no number and no code.
NO_VERB = re.compile(
    r"[^A-Z]|(A|An|The|This|These|Every|Each|All|Any|Some|No|None|Nothing|Nobody|One|Two|Three|Its|Their|Why"
    r"|True|False|Returns|Yields|Raises|Called|As|At|By|For|From|In|Of|On|To|Under|Until|With|Without|If|Once|Between)\b"
)
BANNED = re.compile(
    r"\b(so many|those that|of which|where there (is|are) none|DESIGN \d|STYLE \d|thereof|each of what)\b", re.I
)
# A name such as `test_what_they_hold_there` says neither the unit nor the result.
PRONOUN = re.compile(r"_(they|them|their|its|it|there|what|which|whose|those|these|that|this)(_|$)")

Place = tuple[str, ast.AST]


def trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path from the root and the syntax tree of each file. All at once would slow every later garbage collection."""
    for p in sorted(p for f in folders for p in (ROOT / f).rglob("*.py")):
        yield p.relative_to(ROOT).as_posix(), ast.parse(p.read_text())


def definitions(tree: ast.Module, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every class and function with its qualified name."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
                yield name, child
                yield from below(child, name)
            else:
                yield from below(child, prefix)

    return below(tree, inside)


def is_function(node: ast.AST) -> bool:
    """Return True for a function or method that is no property."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any(ast.unparse(d).endswith(("property", ".setter")) for d in node.decorator_list)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring's prose; examples, tables and indented code are left out."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.S)):
        if re.match(r"\s*(>>>|\$|\|)", paragraph) or re.search(r"\n {4,}\S", paragraph):
            continue
        for item in re.split(r"\n(?=\s*(?:[-*]|`?[\w, |.]+`?:))", paragraph):
            plain = re.sub(r"\([^()]*\)", "", re.sub(r"`[^`]*`", "x", item))
            yield from filter(None, re.split(r"(?<=[.!?;:])\s+", " ".join(plain.split())))


@cache
def offences() -> frozenset[tuple[str, str]]:
    """Return (rule, place) of every offence in the product and in the names of tests."""
    return frozenset([*product_offences(), *name_offences()])


def product_offences() -> Iterator[tuple[str, str]]:
    for path, tree in trees(*PRODUCT):
        for name, node in [("", tree), *definitions(tree)]:
            place = f"{path}::{name}" if name else path
            long = isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
            if long and f"Above {LONGEST_FUNCTION} lines, since" not in (ast.get_docstring(node) or ""):
                yield "function-length", place
            text = ast.get_docstring(node)  # type: ignore[arg-type]
            if text is None:
                continue
            if RIDDLE.match(text) or (is_function(node) and NO_VERB.match(text)):
                yield "first-word", place
            if BANNED.search(text):
                yield "banned-words", place
            lengths = [len(s.split()) for s in sentences(text)]
            if lengths and (lengths[0] > LONGEST_FIRST or max(lengths) > LONGEST):
                yield "sentence-length", place


def name_offences() -> Iterator[tuple[str, str]]:
    for path, tree in trees("tests"):
        for name, node in definitions(tree):
            if name.startswith("test_") and isinstance(node, ast.FunctionDef) and PRONOUN.search(name):
                yield "test-name", f"{path}::{name}"


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["first-word", "sentence-length", "banned-words", "function-length", "test-name"])
def test_language_has_no_offence(rule: str) -> None:
    found = sorted(place for r, place in offences() if r == rule)
    assert not found, f"{rule}: see CONTRIBUTING, Language: {found}"


def test_class_names_repeated_are_used_qualified() -> None:
    """Two classes may share a name only where users import their modules, not the classes."""
    homes: dict[str, list[str]] = defaultdict(list)
    imports: list[tuple[str, str]] = []
    for path, tree in trees(*PRODUCT):
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for name in classes:
            homes[name].append(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("relax_tune"):
                imports += [(path, alias.name) for alias in node.names]
    imported = [f"{path}: {name}" for path, name in imports if len(homes.get(name, ())) > 1]
    assert not imported, f"give the class another name, or import its module: {imported}"
