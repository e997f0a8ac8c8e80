"""Checks the wording of the product: a deny list that may only shrink, function lengths, class names and test names.

`tests/support/deny_list.json` counts, per folder, how often each denied word appears in identifiers, comments and strings.
A count that rises fails; after lowering one, run `python -m tests.test_language` to write the new counts.
A function above 60 lines says why in its docstring: "Above 60 lines, since ...".
A test of a refusal matches the subject of the error (a name, a flag, the values) in at most 8 words, not its sentence.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("ir", "schedules", "tuner", "runtime", "database")
COUNTS = ROOT / "tests" / "support" / "deny_list.json"
LONGEST_FUNCTION = 60
MOST_WORDS = 8

# Participles and adverbs that stood for nouns ("found" for a candidate, "apart" for a separate buffer), and pronoun chains.
DENIED_WORDS = frozenset(
    {
        "found",
        "made",
        "kept",
        "told",
        "said",
        "held",
        "seen",
        "apart",
        "alone",
        "beside",
        "anew",
        "stranger",
        "strangers",
    }
    | {"wanted", "wants", "whoever", "whatever", "elsewhere", "likest", "whichever", "thereof"}
)
DENIED_PHRASES = (
    "that of",
    "those of",
    "those that",
    "of which",
    "by then",
    "in turns",
    "so many",
    "in words",
    "of its own",
    "each of what",
)
# Terms of the field that hold a denied word: held-out samples, HTTP's status 404, OpenAI's code for it, a key of Dask's scheduler.
FIELD_TERMS = re.compile(r"\b(held[-_]out|not found|model_not_found|last_seen)\b")
_WORD = re.compile(r"[A-Za-z]+")
_PHRASE = re.compile(rf"\b({'|'.join(DENIED_PHRASES)})\b", re.I)
# A name such as `test_what_they_hold_there` says neither the unit nor the result.
PRONOUN = re.compile(r"_(they|them|their|its|it|there|what|which|whose|those|these|that|this)(_|$)")


def denied(source: str) -> Counter[str]:
    """Count the denied words and phrases in the identifiers, comments and strings of a module."""
    counts: Counter[str] = Counter()
    text = " ".join(source.lower().split())
    if not any(part in text for part in (*DENIED_WORDS, *DENIED_PHRASES)):  # most modules, and tokens take long
        return counts
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = FIELD_TERMS.sub("", token.string.lower())
        if token.type == tokenize.NAME:
            counts.update(part for part in text.split("_") if part in DENIED_WORDS)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            counts.update(word for word in _WORD.findall(text) if word in DENIED_WORDS)
            counts.update(phrase.lower() for phrase in _PHRASE.findall(" ".join(text.split())))
    return counts


def room(path: Path) -> str:
    """Return the folder that a module is counted under, such as `ir`, `ir/op` or `ir/frontend/onnx`."""
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 3 if "frontend" in parts else 2])


@cache
def counted() -> dict[str, dict[str, int]]:
    """Return the counts per folder of the product as it is."""
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(p for folder in PRODUCT for p in (ROOT / folder).rglob("*.py")):
        rooms[room(path)].update(denied(path.read_text()))
    return {name: dict(sorted(counts.items())) for name, counts in sorted(rooms.items()) if counts}


class Outline(NamedTuple):
    """What is checked of a module of the product.

    Attributes:
        functions: Those above LONGEST_FUNCTION lines, with their docstrings.
        imports: Names that come from modules of the product.
    """

    path: str
    functions: list[tuple[str, str]]
    classes: list[str]
    imports: list[str]


def trees(*folders: str, having: str = "") -> Iterator[tuple[str, ast.Module]]:
    """Yield the path from the root and the syntax tree of each file with a text. A tree is large: let go of it before the next."""
    for p in sorted(p for f in folders for p in (ROOT / f).rglob("*.py")):
        if having in (source := p.read_text()):
            yield p.relative_to(ROOT).as_posix(), ast.parse(source)


@pytest.fixture(scope="module")
def product() -> list[Outline]:
    """All modules of the product, each parsed once."""
    return [
        Outline(
            path,
            [
                (name, ast.get_docstring(node) or "")
                for name, node in definitions(tree)
                if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
            ],
            [n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")],
            [
                alias.name
                for node in statements(tree)
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("relax_tune")
                for alias in node.names
            ],
        )
        for path, tree in trees(*PRODUCT)
    ]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements, and what holds statements, at any depth."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements(child)


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
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

    return below(tree, "")


@pytest.mark.slow
def test_denied_words_do_not_increase() -> None:
    limits = json.loads(COUNTS.read_text())
    counts = counted()
    raised = {
        f"{name}: {word}": (limits.get(name, {}).get(word, 0), count)
        for name, words in counts.items()
        for word, count in words.items()
        if count > limits.get(name, {}).get(word, 0)
    }
    assert not raised, (
        f"write these in the plain terms of the field (see CONTRIBUTING, Language); limit and count: {raised}"
    )
    slack = {
        name
        for name, words in limits.items()
        for word, limit in words.items()
        if counts.get(name, {}).get(word, 0) < limit
    }
    assert not slack, f"fewer denied words than the list allows in {sorted(slack)}: run python -m tests.test_language"


def test_denied_words_are_counted_in_names_comments_and_strings() -> None:
    source = (
        '"""Keep those of others apart."""\nfound_one, last_seen = "made", held_out  # told by foundation: not found\n'
    )
    assert denied(source) == {"those of": 1, "apart": 1, "found": 1, "made": 1, "told": 1}


@pytest.mark.slow
def test_long_functions_say_why(product: list[Outline]) -> None:
    long = [
        f"{module.path}::{name}"
        for module in product
        for name, docstring in module.functions
        if f"Above {LONGEST_FUNCTION} lines, since" not in docstring
    ]
    assert not long, f"split these, or say in the docstring why they are long: {long}"


def test_test_names_hold_no_pronouns() -> None:
    vague = [
        f"{path.relative_to(ROOT)}::{name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(), re.M)
        if PRONOUN.search(name)
    ]
    assert not vague, f"name the unit, the condition and the result: {vague}"


def test_class_names_repeated_are_used_qualified(product: list[Outline]) -> None:
    """Two classes may share a name only where users import their modules, not the classes."""
    homes = Counter(name for module in product for name in module.classes)
    imported = [f"{module.path}: {name}" for module in product for name in module.imports if homes[name] > 1]
    assert not imported, f"give the class another name, or import its module: {imported}"


def tables(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that a literal table fills, by `parametrize` or a loop, with each of its values."""
    for node in ast.walk(function):
        if isinstance(node, ast.For):
            names, rows = ast.unparse(node.target).strip("()"), node.iter
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
            names, rows = ast.unparse(node.args[0]).strip("'[]()").replace("'", ""), node.args[1]
        else:
            continue
        targets = names.split(", ") if ", " in names else names.split(",")
        for row in rows.elts if isinstance(rows, ast.List | ast.Tuple) else ():
            values = row.args if isinstance(row, ast.Call) else getattr(row, "elts", [row])
            yield from zip(targets, values if len(targets) > 1 else [row], strict=False)


def literal(node: ast.expr) -> str:
    """Return the literal text of an expression, without what an f-string fills in."""
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return " ".join(part for part in parts if isinstance(part, str))


def matched(tree: ast.Module) -> Iterator[str]:
    """Yield the literal text of every `match=` pattern of the tests of a module."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            for pattern in (keyword.value for keyword in call.keywords if keyword.arg == "match"):
                if isinstance(pattern, ast.Name):
                    yield from (literal(value) for name, value in tables(function) if name == pattern.id)
                else:
                    yield literal(pattern)


def words(pattern: str) -> list[str]:
    """Return the words of a regular expression: parts between spaces and wildcards that have two letters or more."""
    return [part for part in re.split(r"\s+|\.\*|\\[ns]", pattern) if re.search("[A-Za-z]{2}", part)]


@pytest.mark.slow
def test_matches_of_errors_are_short() -> None:
    long = [
        f"{path}: {text}"
        for path, tree in trees("tests", having="match=")
        for text in matched(tree)
        if len(words(text)) > MOST_WORDS
    ]
    assert not long, f"match the subject of the error in at most {MOST_WORDS} words: {long}"


def test_matches_are_read_from_calls_and_tables() -> None:
    tree = ast.parse(
        """
@pytest.mark.parametrize(("n", "says"), [(1, "first"), pytest.param(2, "second", id="x")])
def test_one(n, says):
    with pytest.raises(ValueError, match=says):
        call(match=rf"third {n} of")
    for wrong, part in ((0, "fourth"), (1, "fifth")):
        call(match=part)
"""
    )
    assert list(matched(tree)) == ["first", "second", "third   of", "fourth", "fifth"]
    assert words(r"x\.npz: expected .*2 dims,\n got n") == [r"x\.npz:", "expected", "dims,", "got"]


def write_counts() -> None:
    """Write the present counts, unless a count rose; folders that are new start at what they have."""
    limits, counts = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}, counted()
    for name in limits.keys() & counts.keys():
        for word, count in counts[name].items():
            if count > limits[name].get(word, 0):
                sys.exit(f"{name}: {word}: {count} uses, at most {limits[name].get(word, 0)} allowed")
    COUNTS.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    print(sum(sum(words.values()) for words in counts.values()), "uses of denied words")


if __name__ == "__main__":
    write_counts()
