"""Printed programs with tokens lost, doubled or exchanged: they read back as a program, or the refusal points into the text."""

from __future__ import annotations

import io
import random
import re
import tokenize

import pytest
from tests.ir.text.test_text_graph import Odd, everything, feed_forward
from tests.support import zoo

from relax_tune.errors import ParseError, RelaxTuneError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.expr import Tunable
from relax_tune.ir.core.function import ExternFunc
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.parser import parse_text
from relax_tune.ir.text.printer import print_text

OPERATORS_AND_ODD = {**OPERATORS, "test.odd": Odd}
CALLS = """module(version=1)
n = symbol("n", lower=1, upper=9)
@function
def g(x: Tensor((m, 4), f32)) -> Tensor((m, 4), f32):
    with dataflow():
        y: Tensor((m, 4), f32) = op.relu(x)
    return y
@function(pure=False)
def main(x: Tensor((n, 4), f32), s: Shape([n]), f: Callable((Object(),), Object(), pure=False)) -> Tensor((n, 4), f32):
    with dataflow():
        a: Tensor((n, 4), f32) = call("g", x)
        k: Callable((Tensor((q, 4), f32),), Tensor((q, 4), f32)) = fn("g")
        p: Prim(bool) = prim(n < 3)
        c: Tensor((r, 4), f32) = match_cast(a, Tensor((r, 4), f32))
    z: Tensor((n, 4), f32)
    if p:
        z = a
    else:
        u: Tensor((n, 4), f32) = op.mul_scalar(a, value=2.0)
        z = u
    h: Object() = call_host("print", (z,), out=Object(), pure=False)
    return z
"""
WORDS = (
    "x n 0 -1 ( ) [ ] : , = == 'a' None True 1.5 99999999999999999999 f32 i64 if for return lambda * ** @ match_cast op const "
    "symbol {} 1e999 ... inf not b'x' 0x \\ é yield f'' main lower upper := 1j module extern with pass del"
)
STRANGE = [*WORDS.split(), "\n", "\n    ", "\t", "\0", " "]


def programs() -> dict[str, str]:
    tiled = zoo.tiled_matmul((Tunable("T0", (1, 2, 4)), Tunable("T1", (4, 8))))
    return {
        "graph": print_text(feed_forward()),
        "lowered": print_text(lower(feed_forward()).module),
        "everything": print_text(everything()),
        "calls": CALLS,
        "sketch": print_text(tiled),
        "loops": print_text(zoo.lowered(zoo.tiled_matmul())),
    }


def spans(text: str) -> list[tuple[int, int]]:
    """Where the tokens of `text` are."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    result = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(starts[t.start[0] - 1] + t.start[1], starts[t.end[0] - 1] + t.end[1]) for t in result if t.string.strip()]


def mutant(text: str, tokens: list[tuple[int, int]], rng: random.Random) -> str:
    """`text` with one token lost, doubled, or exchanged for a strange one or another of the program."""
    start, end = rng.choice(tokens)
    other = rng.choice(tokens)
    new = rng.choice(["", text[start:end] * 2, rng.choice(STRANGE), text[slice(*other)]])
    return text[:start] + new + text[end:]


def points_into(message: str, text: str) -> bool:
    """Whether a refusal names a line and column that exist, and shows the line with a caret under the column."""
    place = re.match(r"line (\d+), column (\d+): .", message)
    if place is None:
        return False
    line, column = map(int, place.groups())
    lines = [*re.split(r"\r\n|\r|\n", text), ""]  # what is missing at the end is missed on the line after it
    shown = message.splitlines()
    caret = shown[-1].split("|", 1)
    return line <= len(lines) and column <= len(lines[line - 1]) + 2 and caret[1][1:].index("^") == column - 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", list(programs()))
def test_mutants(name: str) -> None:
    text, rng = programs()[name], random.Random(f"mutants of {name}")
    assert print_text(parse_text(text, OPERATORS_AND_ODD))  # the program itself is fine
    tokens, refused = spans(text), 0
    for _ in range(250):
        changed = mutant(text, tokens, rng)
        try:
            result = parse_text(changed, OPERATORS_AND_ODD)
        except ParseError as error:
            assert points_into(str(error), changed), f"{error}\n--\n{changed}"
            refused += 1
            continue
        again = print_text(result)
        assert print_text(parse_text(again, OPERATORS_AND_ODD)) == again
        if not isinstance(result, ExternFunc):
            try:
                verify(result)
            except RelaxTuneError as error:
                assert str(error)  # what can be read may still be no program; that is told as such
    assert refused > 50
