"""Integers of untrusted texts stay within 64 bits: by declared bounds, or by a check of the call."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.hostile_texts import HEAD, SIZES, Texts, caller, campaign, digits
from tests.runtime.test_artifact_memory import sanitizer
from tests.support.effort import examples

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.check.no_overflow import LIMIT, SIZE_LIMIT
from relax_tune.ir.core.expr import free_vars
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import MatchCast, PrimValue
from relax_tune.ir.core.graph_walk import all_bindings
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.text import save_text
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.program.program import SIZE_LIMIT as SIZE_LIMIT_OF_CALLS
from relax_tune.runtime.program.program import Program, Symbol

ROOT = Path(__file__).parents[3]
POWER = "n*n*n*n*n*(n//50)"
COPY = """@prim_func(outputs=1)
def f(x: Buffer((n,), f32), y: Buffer((n,), f32)):
    for i in serial(n):
        with block("f"):
            vi = spatial(n, i)
            y[vi] = x[vi]
"""
STORE = COPY + "    for j in serial(n):\n        if COND:\n            y[AT] = x[j]\n"
_LOOPS = "".join(" " * (8 + 4 * k) + f"for {name} in serial(n):\n" for k, name in enumerate("abcde"))
NEST = (
    COPY.replace("        with", _LOOPS + " " * 28 + "with")
    .replace("            vi", " " * 32 + "vi")
    .replace("            y", " " * 32 + "y")
)
READ = """@prim_func(outputs=1)
def f(x: Buffer((n,), i64), y: Buffer((n,), i64)):
    for i in serial(n):
        with block("f"):
            vi = spatial(n, i)
            y[vi] = VALUE
"""


MATRIX = """@prim_func(outputs=1)
def f(x: Buffer((n, m), f32), y: Buffer((n, m), f32)):
    for i in serial(n * m):
        with block("f"):
            vi = spatial(n, i // m)
            vj = spatial(m, i % m)
            y[vi, vj] = x[vi, vj]
"""


def store(at: str, cond: str | None = None) -> str:
    return STORE.replace("COND", cond or f"{at} < n").replace("AT", at)


def read(at: str, cond: str | None = None) -> str:
    return READ.replace("VALUE", f"select({cond or f'{at} < n'}, x[{at}], x[0])")


WRAPPED = f"(n // 600) * ({digits(2**64 - 8)}) + vi"
"""At n = 600 it is 2**64 - 8 + vi: the element 8 before the buffer."""
GRAPH = """module(version=1)

@function
def main(x: Tensor((n,), f32)) -> Tensor((n,), f32):
    with dataflow():
        big: Tensor((SIZE,), f32) = op.broadcast_to(x, shape=[SIZE])
        y: Tensor((n,), f32) = op.add(x, x)
    return y
"""
CALLED = (
    "module(version=1)\n\n"
    + COPY.replace("(n,)", "(q,)").replace("serial(n)", "serial(q)").replace("spatial(n", "spatial(q")
    + """
@function
def main(x: Tensor((n * n * n,), f32), k: Tensor((n,), f32)) -> Tensor((n * n * n,), f32):
    with dataflow():
        y: Tensor((n * n * n,), f32) = call_tir(f, (x,), out=Tensor((n * n * n,), f32))
    return y
"""
)
HOSTILE: Mapping[str, tuple[str, int]] = {
    "write": (store(POWER), 6000),
    "read by digits": (read(WRAPPED), 600),
    "difference": (store(f"n - {POWER}", f"0 <= n - {POWER}"), 6000),
    "two conditions": (store(POWER, f"{POWER} < n and 0 <= {POWER}"), 6000),
    "condition elsewhere": (store(f"min({POWER}, n - 1)", f"{POWER} < n"), 6000),
    "condition that wraps": (store("j", f"{POWER} < 0"), 6000),
    "select": (store(f"select({POWER} < n, {POWER}, 0)", "0 < n"), 6000),
    "min and max": (store(f"max(min({POWER}, n - 1), 0)", "0 < n"), 6000),
    "quotient": (store(f"({POWER}) // 4294967296", "0 < n"), 6000),
    "remainder": (store(f"({POWER}) % n", "0 < n"), 6000),
    "remainder of a power": (store("j % (n*n*n*n*n*n*n + 1)", "0 < n"), 6000),
    "cast": (store(f"cast(cast({POWER}, i32), i64)", f"cast(cast({POWER}, i32), i64) < n"), 6000),
    "extent": (COPY.replace("serial(n)", f"serial({POWER} + n)"), 6000),
    "extent below 0": (COPY.replace("serial(n)", f"serial(n - {POWER})"), 6000),
    "nest": (NEST, 8192),
    "constant": (store("n * 4611686018427387903", "n * 4611686018427387903 < n"), 6000),
    "binding": (COPY.replace("spatial(n, i)", f"spatial(n, i + {POWER})"), 6000),
    "dim of a value": (GRAPH.replace("SIZE", "n * n * n * n * n * n"), 6000),
}  # fmt: skip


def load(folder: Path, text: str, bounds: Mapping[str, tuple[int, int]] | None = None) -> IRModule:
    path = folder / "model.relax"
    path.write_text(text)
    return load_model(path, bounds)


def assertions(module: IRModule) -> list[PrimValue]:
    bindings = [b for f in module.graphs.values() for b in all_bindings(f) if isinstance(b, MatchCast)]
    return [b.value for b in bindings if isinstance(b.value, PrimValue)]


def refused(module: IRModule, size: int) -> bool:
    """Return whether the assertions refuse a call with this value of every symbol, counted in Python's integers."""
    numbers = {v.name: size for a in assertions(module) for v in free_vars(a.value)}
    return not all(
        eval(repr(a.value), {"__builtins__": {}, "max": max, "min": min}, numbers) for a in assertions(module)
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_text_of_wrapping_integers_is_refused_or_checked(tmp_path: Path, name: str) -> None:
    text, size = HOSTILE[name]
    try:
        module = load(tmp_path, text)
    except ParseError:
        return  # refused at once
    assert refused(module, size)
    assert not refused(module, 1)


@pytest.mark.parametrize(
    "text",
    [
        COPY,
        store("j", "j < n"),
        store("j % n", "0 < n"),
        read("(vi * 3 + n) // 4"),
        CALLED.replace("n * n * n", "n"),
        MATRIX,
    ],
)  # fmt: skip
def test_ordinary_text_gets_no_check(tmp_path: Path, text: str) -> None:
    assert assertions(load(tmp_path, text)) == []


def test_declared_bounds_take_the_place_of_checks(tmp_path: Path) -> None:
    text = 'module(version=1)\nn = symbol("n", lower=1, upper=1000)\n\n' + store(POWER)
    assert assertions(load(tmp_path, text)) == []
    assert assertions(load(tmp_path, text.replace("1000", "100000"))) != []


def test_sizes_of_a_call_count_and_not_names(tmp_path: Path) -> None:
    more = "    for j in serial(q * q):\n        if j < q:\n            y[j] = x[j]\n\n@function"
    module = load(tmp_path, CALLED.replace("\n@function", more))
    assert refused(module, 1 << 11) and not refused(module, 3)


def test_checks_are_written_and_not_made_twice(tmp_path: Path) -> None:
    module = load(tmp_path, store(POWER))
    again = load_model(save_text(module, tmp_path / "again.relax"))
    assert print_text(again) == print_text(module) and len(assertions(again)) == 2


def test_assertion_of_nothing_is_no_check(tmp_path: Path) -> None:
    module = load(tmp_path, store(POWER))
    text = print_text(module).replace("Prim(bool, True)", "Prim(bool)")
    assert any(refused(load(tmp_path, text), size) for size in (6000,))


def test_divisor_of_possible_zero_is_checked(tmp_path: Path) -> None:
    text = COPY.replace("x[vi]", "x[vi] * cast(vi % m, f32)").replace("y: Buffer", "k: Buffer((m,), f32), y: Buffer")
    module = load(tmp_path, text)
    assert refused(module, 0) and not refused(module, 1)
    with pytest.raises(ParseError, match="divisor other than 0"):
        load(tmp_path, store("j % (j - 20)", "20 < n"))


def test_size_limits_of_proofs_and_of_calls_agree() -> None:
    assert SIZE_LIMIT == SIZE_LIMIT_OF_CALLS and SIZE_LIMIT**2 <= LIMIT


@pytest.mark.ccompiler
@pytest.mark.process
def test_size_beyond_the_limit_is_refused_unless_declared() -> None:
    device = CDevice()
    for upper, allowed in ((None, SIZE_LIMIT), (1 << 40, 1 << 40)):
        program = Program((Symbol("n", 0, upper),), (1, 0, 0, 0), (), (), (), (), (), (), (), ())
        with pytest.raises(UserError, match=f"n <= {allowed}"):
            Executor(program, device, {}).bind({"n": allowed + 1})
        Executor(program, device, {}).bind({"n": allowed})


RUN = """
import sys, numpy as np, relax_tune as rt
built = rt.build(rt.load_model(sys.argv[1]), target='c', db='memory://', policy='generic', self_test=False)
with built.open() as model:
    for n in (3, 599, 600, 6000):
        x = np.arange(n, dtype=sys.argv[2])
        try:
            y = np.asarray(list(model.run({'x': x}).values())[0] if isinstance(model.run({'x': x}), dict) else model.run({'x': x}))
        except rt.UserError:
            print('refused', n)
        else:
            assert (y.reshape(-1) < max(n, 1)).all() and (y >= 0).all(), y
"""


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.parametrize(("name", "dtype"), [("write", "float32"), ("read by digits", "int64")])
def test_hostile_text_ends_no_process_and_reads_no_memory(tmp_path: Path, name: str, dtype: str) -> None:
    text, size = HOSTILE[name]
    (tmp_path / "m.relax").write_text(text)
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path / "m.relax"), dtype], capture_output=True, text=True)
    assert done.returncode == 0 and f"refused {size}\n" in done.stdout, done.stderr[-2000:]


CANCELLING = """module(version=1)

@prim_func(outputs=1)
def f_loops(x: Buffer((n,), f32), z: Buffer((m,), f32), y: Buffer((n,), f32)):
    for i in serial(n):
        with block("f"):
            vi = spatial(n, i)
            y[vi] = x[vi]
    for j in serial(n):
        if (((m // 600) * (m * m * m) + j) * (j * j)) < n:
            y[(j + (m // 50) * (m * m * m * m + 2)) % n] = z[j % 7]

@function
def main(x: Tensor((n,), f32), z: Tensor((m,), f32)) -> Tensor((n,), f32):
    with dataflow():
        y: Tensor((n,), f32) = call_tir(f_loops, (x, z), out=Tensor((n,), f32))
    return y
"""
"""The stored index becomes the loop's variable: `j` becomes a sum of terms that cancel, whose cube leaves 64 bits."""
RUN_CANCELLING = """
import sys, numpy as np, relax_tune as rt
from pathlib import Path
from tests.runtime.device.watched import SanitizedDevice
built = rt.build(rt.load_model(sys.argv[1]), target='c', db='memory://', policy='generic', self_test=False)
with built.open(SanitizedDevice(Path(sys.argv[2]))) as model:
    for n, m in ((50, 51), (7, 3000), (64, 599)):
        y = model.run({'x': np.zeros(n, 'f4'), 'z': np.arange(1, m + 1, dtype='f4')})
        wanted = np.zeros(n, 'f4')
        for j in range(n):
            if (m // 600 * m**3 + j) * j * j < n:
                wanted[(j + m // 50 * (m**4 + 2)) % n] = j % 7 + 1
        np.testing.assert_array_equal(list(y.values())[0] if isinstance(y, dict) else y[0], wanted)
print('done')
"""


@pytest.mark.ccompiler
@pytest.mark.process
def test_cancelling_terms_of_an_index_may_overflow(tmp_path: Path) -> None:
    (tmp_path / "m.relax").write_text(CANCELLING)
    command = [sys.executable, "-c", RUN_CANCELLING, str(tmp_path / "m.relax"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=sanitizer())
    assert done.stdout == "done\n", done.stderr[-3000:]


class Word(int):
    """An integer whose sums, differences and products stay within int64, or are an error."""

    def __add__(self, other: int) -> Word:
        return _word(int(self) + int(other))

    def __sub__(self, other: int) -> Word:
        return _word(int(self) - int(other))

    def __mul__(self, other: int) -> Word:
        return _word(int(self) * int(other))

    def __floordiv__(self, other: int) -> Word:
        return _word(int(self) // int(other))

    def __mod__(self, other: int) -> Word:
        return _word(int(self) % int(other))


def _word(value: int) -> Word:
    if not -(1 << 63) <= value < 1 << 63:
        raise OverflowError(value)
    return Word(value)


def _cast(value: int, bits: int) -> Word:
    half = 1 << bits - 1
    return Word((int(value) + half) % (2 * half) - half)


def counted(texts: Texts, n: int, m: int) -> None:
    """Compute the expressions of a text at sizes and some points of its loops. Raises OverflowError beyond 64 bits."""
    names = {"select": lambda c, a, b: a if c else b, "min": min, "max": max, "cast": _cast, "i32": 32, "i64": 64}
    names |= {"n": Word(n), "m": Word(m)}

    def value(e: str, **more: int) -> int:
        literals = re.sub(r"\b(\d+)\b", r"Word(\1)", e)
        return int(eval(literals, {"__builtins__": {}, "Word": Word}, names | {k: Word(v) for k, v in more.items()}))

    for vi in {0, n // 2, n - 1} if n > 0 else ():
        for e in texts.by_vi:
            value(e, vi=vi)
    extent = max(value(e) for e in texts.extents)
    for j in {0, extent // 2, extent - 1} if extent > 0 else ():
        for e in texts.by_j:
            value(e, j=j)


@pytest.mark.slow
@settings(max_examples=examples(250), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_text_within_checks_never_leaves_64_bits(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """The expressions are counted from the text by Python's own integers."""
    dice = random.Random(seed)
    sizes = [*SIZES, 1 << 20, 3037000500, SIZE_LIMIT]
    texts = Texts(dice)
    part = texts.text("f")
    if "k[" in part:
        return  # data may be anything
    try:
        module = load(tmp_path_factory.getbasetemp(), HEAD + part + "\n" + caller("f"))
    except ParseError:
        return
    for _ in range(60):
        given = {name: min(dice.choice(sizes), SIZE_LIMIT) for name in "nm"}
        holds = [eval(repr(a.value), {"__builtins__": {}, "max": max, "min": min}, given) for a in assertions(module)]
        if all(holds):
            with suppress(ZeroDivisionError):  # of an expression that a condition leaves out
                counted(texts, **given)


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.slow
def test_random_hostile_texts_reach_no_foreign_memory(tmp_path: Path) -> None:
    """`make fuzz-texts` runs more of them."""
    totals = campaign(examples(50), 0.0, 3, tmp_path)
    assert totals["calls"] and not totals["findings"], [f.read_text() for f in tmp_path.iterdir()]
