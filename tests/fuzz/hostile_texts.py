"""Random `.relax` texts that access memory outside of their buffers, under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.fuzz.hostile_texts --secs 600 --seed 1

Index expressions, conditions and extents are random expressions over sizes and data: powers, polynomials whose value wraps to a chosen
offset (Horner), quotients, remainders, casts, selects. A text is rejected when it is read, or its kernels run under the sanitizers,
which end the process at the first invalid access or overflow. Sizes that a run-time check rejects are counted.

A campaign starts one process after another, each with a seed of its own, and continues after a finding: the text, the sizes and the
report of the sanitizer are written to a file in `--store`. The last line has the totals; the exit status is 1 after a finding.

Tests: `tests/ir/check/test_no_overflow.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from tests.runtime.device.watched import SanitizedDevice
from tests.runtime.test_artifact_memory import sanitizer

import relax_tune as rt
from relax_tune.errors import ParseError, RelaxTuneError, UserError
from relax_tune.ir.arith.solver import installed_solver
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.op import base

SIZES = (0, 1, 2, 3, 50, 51, 600, 601, 6000, 8192, 65536)
CONSTANTS = (
    "0", "1", "2", "3", "50", "600", "65536", "2147483647", "2147483648", "4294967296", "4611686018427387904", "9223372036854775807",
)  # fmt: skip
HEAD = "module(version=1)\n\n"
MOST_ITERATIONS = 200_000
SLICE = 300.0
"""Seconds of one process of a campaign."""
REPORT_BYTES = 12_000
READ_SECS, BUILD_SECS = 0.15, 1.0
"""Processor time to read and to build a text; longer ones are counted and left out, since proofs about large polynomials are slow."""
DEPTHS = (1, 1, 1, 2, 2, 3)
"""Depths of the expressions of a text, each as often as it is listed."""
MEMORY_MIB = 6000
"""Memory of a process; one that needs more is a finding."""


class Slow(BaseException):
    """The processor time of a step has passed."""


@contextmanager
def processor_time(secs: float) -> Iterator[None]:
    """Raise `Slow` in the body after this much processor time."""

    def stop(*_: object) -> None:
        raise Slow

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, secs)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def select(cond: bool, a: int, b: int) -> int:
    return a if cond else b


def digits(value: int, base: int = 600, symbol: str = "n") -> str:
    """Return a polynomial in a symbol, in Horner's form, whose value at `symbol` = `base` is this number."""
    text, parts = "0", list[int]()
    while value:
        value, digit = divmod(value, base)
        parts.append(digit)
    for digit in reversed(parts):
        text = f"({text}) * {symbol} + {digit}"
    return text


class Texts:
    """A random text, and its expressions in Python's form.

    extents: of its loop over `j`, which say how long it runs; by_vi, by_j: expressions over each loop's variable
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.extents: list[str] = []
        self.by_vi: list[str] = []
        self.by_j: list[str] = []
        self.depth = dice.choice(DEPTHS)

    def number(self, names: Sequence[str], depth: int | None = None) -> str:
        roll, depth = self.dice.random(), self.depth if depth is None else depth
        if depth == 0 or roll < 0.15:
            return self.dice.choice([*names, *names, self.dice.choice(CONSTANTS)])
        if roll < 0.27:
            return "*".join([self.dice.choice(["n", "m"])] * self.dice.randint(2, 7))
        if roll < 0.3:
            return self.wrapping(names)
        a, b = self.number(names, depth - 1), self.number(names, depth - 1)
        if roll < 0.75:
            return f"({a} {self.dice.choice('++-***')} {b})"
        if roll < 0.85:
            return (
                f"({a} {self.dice.choice(['//', '%'])} {self.dice.choice(['2', '50', '600', '65536', '2147483648'])})"
            )
        if roll < 0.93:
            return f"{self.dice.choice(['min', 'max'])}({a}, {b})"
        return f"select({self.condition(names, depth - 1)}, {a}, {b})"

    def wrapping(self, names: Sequence[str]) -> str:
        """Return a small number at most sizes, and at one size a number that wraps to an offset around 0 or to 2**63."""
        base, symbol = self.dice.choice([50, 600, 6000]), self.dice.choice("nm")
        offset = self.dice.choice([2**64, 2**63, 2**32]) + self.dice.choice([-4096, -600, -8, -1, 0, 1, 8, 610])
        return f"(({symbol} // {base}) * ({digits(offset, base, symbol)}) + {names[0]})"

    def condition(self, names: Sequence[str], depth: int | None = None) -> str:
        depth = self.depth - 1 if depth is None else depth
        if self.dice.random() < 0.15:
            e = self.wrapping(names)
            return self.dice.choice([f"0 <= {e} and {e} < n", f"{e} < n", f"{e} <= {names[0]} or {e} == 0"])
        a = self.number(names, depth) if self.dice.random() < 0.5 else f"(n // 50) * {self.number(names, depth)}"
        return f"{a} {self.dice.choice(['<', '<=', '==', '!='])} {self.number(names, depth)}"

    def index(self, names: Sequence[str]) -> str:
        e = self.number(names)
        if self.dice.random() < 0.7:  # looks well at the sizes at which a text is tried when it is read
            e = f"({self.dice.choice([names[0], '0', '0'])} + ({self.dice.choice(['n', 'm'])} // 50) * {e})"
        return self.dice.choice([e, e, f"cast(cast({e}, i32), i64)", f"({e}) % n", f"min({e}, n - 1)", f"max({e}, 0)"])

    def extent(self) -> str:
        e = self.dice.choice(["n", "n", "m", self.number(["n", "m"], self.depth - 1)])
        self.extents.append(e)
        return e

    def text(self, name: str) -> str:
        read = self.index(["vi", "vi", "n", "m", *(["k[vi]"] if self.dice.random() < 0.3 else [])])
        stored, guarded = self.index(["j", "n", "m"]), self.condition(["j", "n", "m"])
        test = f"{read} < n" if self.dice.random() < 0.6 else self.condition(["vi", "n"])
        chosen = self.dice.random() < 0.6
        value = f"select({test}, x[{read}], x[vi])" if chosen else f"x[{read}]"
        inner = self.dice.choice([f"{stored} < n", self.condition(["j", "n"])])
        taken = self.index(["j", "m"])
        self.by_vi, self.by_j = [read, *([test] if chosen else [])], [guarded, inner, stored, taken]
        lines = [
            "@prim_func(outputs=1)",
            f"def {name}_loops(x: Buffer((n,), f32), k: Buffer((n,), i64), z: Buffer((m,), f32), y: Buffer((n,), f32)):",
            "    for i in serial(n):",
            f'        with block("{name}"):',
            "            vi = spatial(n, i)",
            f"            y[vi] = {value} + x[vi]",
            f"    for j in serial({self.extent()}):",
            f"        if {guarded}:",
            f"            if {inner}:",
            f"                y[{stored}] = z[{taken}]",
        ]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Text:
    """A text and the extents of its loops."""

    text: str
    extents: list[str]


def caller(name: str) -> str:
    tensors = "x: Tensor((n,), f32), k: Tensor((n,), i64), z: Tensor((m,), f32)"
    return (
        f"@function\ndef {name}({tensors}) -> Tensor((n,), f32):\n    with dataflow():\n"
        f"        y: Tensor((n,), f32) = call_tir({name}_loops, (x, k, z), out=Tensor((n,), f32))\n    return y\n"
    )


def iterations(extents: Sequence[str], n: int, m: int) -> int:
    try:
        return max(
            int(eval(e, {"__builtins__": {}}, {"n": n, "m": m, "min": min, "max": max, "select": select}))
            for e in extents
        )
    except (ZeroDivisionError, OverflowError):
        return MOST_ITERATIONS + 1


def run(count: int, dice: random.Random, device: SanitizedDevice, folder: Path, counts: Counter[str]) -> None:
    """Make, build and run texts, as functions of one module."""
    texts, modules = dict[str, Text](), list[IRModule]()
    path = folder / "one.relax"
    for number in range(count):
        name, parts = f"f{number}", Texts(dice)
        text = Text(parts.text(name) + "\n" + caller(name), parts.extents)
        path.write_text(HEAD + text.text)
        counts["texts"] += 1
        try:
            with processor_time(READ_SECS):
                modules.append(rt.load_model(path))
        except Slow:
            counts["slow texts"] += 1
        except ParseError:
            counts["rejected texts"] += 1
        else:
            texts[name] = text
    for artifact in built(modules, counts):
        with artifact.open(device) as model:
            for name in model.functions:
                call(model, name, texts[name], dice, counts)


def built(modules: Sequence[IRModule], counts: Counter[str]) -> Iterator[rt.Artifact]:
    """Build texts as one module, since the compiler starts once; each by itself if the module is slow or rejected."""
    if not modules:
        return
    functions = {name: f for m in modules for name, f in m.functions.items()}
    module = replace(modules[0], functions=functions, bounds=tuple(b for m in modules for b in m.bounds))
    try:
        with processor_time(BUILD_SECS * len(modules)):
            artifact = rt.build(module, target="c", db="memory://", policy="generic", self_test=False)
    except (Slow, RelaxTuneError) as error:
        if len(modules) == 1:
            counts["slow builds" if isinstance(error, Slow) else "rejected builds"] += 1
        else:
            for one in modules:
                yield from built([one], counts)
    else:
        yield artifact


def call(model: rt.Model, name: str, text: Text, dice: random.Random, counts: Counter[str]) -> None:
    """Call a function at sizes at which its loops end soon."""
    for n in SIZES:
        m = dice.choice(SIZES)
        if iterations(text.extents, n, m) > MOST_ITERATIONS:
            continue
        print(f"{text.text}n = {n}, m = {m}", file=sys.stderr, flush=True)  # the last one is the finding
        data = np.full(n, dice.choice([0, -1, 2**31, 2**63 - 1, -(2**63)]), np.int64)
        try:
            model.run({"x": np.ones(n, "f4"), "k": data, "z": np.ones(m, "f4")}, function=name)
            counts["calls"] += 1
        except UserError:
            counts["rejected calls"] += 1


def child(count: int, secs: float, seed: int) -> None:
    """Run modules for some seconds, one at least, and print the counts as JSON."""
    dice, counts, began = random.Random(seed), Counter[str](), time.monotonic()
    # most processes prove without the solver, as most installations do, since each of its questions takes 30 ms
    solver = installed_solver() if seed % 4 == 0 else None
    with tempfile.TemporaryDirectory() as folder, patch.object(base, "installed_solver", lambda: solver):
        device = SanitizedDevice(Path(folder))
        while not counts or time.monotonic() - began < secs:
            run(count, dice, device, Path(folder), counts)
    print(json.dumps(counts))


def campaign(count: int, secs: float, seed: int, store: Path) -> Counter[str]:
    """Run processes under the sanitizers one after the other for some seconds, one at least; return the totals.

    Args:
        store: folder for the findings.
    """
    totals, began, environment, number = Counter[str](processes=0, findings=0), time.monotonic(), sanitizer(), 0
    environment["ASAN_OPTIONS"] += f":hard_rss_limit_mb={MEMORY_MIB}"
    while number == 0 or time.monotonic() - began < secs:
        left = min(SLICE, max(secs - (time.monotonic() - began), 0.0))
        own = seed * 1_000_000 + number
        command = [
            sys.executable,
            "-m",
            "tests.fuzz.hostile_texts",
            "--child",
            "--count",
            str(count),
            "--seed",
            str(own),
        ]
        done = subprocess.run([*command, "--secs", str(left)], capture_output=True, text=True, env=environment)
        totals["processes"] += 1
        if done.returncode == 0:
            totals.update(json.loads(done.stdout))
        else:
            totals["findings"] += 1
            store.mkdir(parents=True, exist_ok=True)
            (store / f"hostile_text_{own}.txt").write_text(done.stderr[-REPORT_BYTES:])
        number += 1
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=32, help="texts per module")
    parser.add_argument("--secs", type=float, default=0.0, help="continue with other modules for this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", type=Path, default=Path("build/fuzz"), help="folder for findings")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.count, options.secs, options.seed)
        return 0
    totals = campaign(options.count, options.secs, options.seed, options.store)
    print(f"seed {options.seed}, {options.secs:g} s:", ", ".join(f"{n:,} {name}" for name, n in totals.items()))
    return 1 if totals["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
