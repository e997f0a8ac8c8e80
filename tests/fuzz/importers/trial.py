"""Trials of ONNX programs: made by a seed, imported, interpreted, and judged by the oracles."""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx
from tests.fuzz.importers import (
    control,
    elementwise,
    images,
    learning,
    microsoft,
    microsoft_integers,
    microsoft_standard,
    shapes,
    sums,
)
from tests.fuzz.importers.builder import FLOATS, SIMPLIFIED, Builder, another_call
from tests.fuzz.importers.elementwise import Use, edge_consumer
from tests.fuzz.importers.formulas import MICROSOFT
from tests.fuzz.importers.oracles import Expected, Runtime, Verdict, expected, has_runtime, judge
from tests.fuzz.importers.program import Array, Invalid, Program

from relax_tune.errors import RelaxTuneError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.onnx.importer import KNOWN, OTHER_DOMAINS, PLACEHOLDER, load_onnx
from relax_tune.ir.frontend.onnx.versions import version_of
from relax_tune.ir.interp.interp_graph import run_function

Run = Callable[[IRModule, "list[Array]"], Any]
OPSETS = (7, 8, 9, 10, 11, 11, 12, 13, 13, 14, 15, 16, 17, 18, 18, 19, 20, 20, 21, 22, 23, 24, 25, 26, 26)
STEPS = (1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6)
ATTEMPTS = 5
"""Attempts of a program to add a node that the oracles accept, for each node."""
USES: Mapping[str, Use] = {**elementwise.USES, **shapes.USES, **sums.USES, **images.USES, **control.USES}
MORE_OPERATORS = ("Softsign", "ThresholdedRelu", "RMSNormalization", "RotaryEmbedding", "MeanVarianceNormalization", "HannWindow",
                  "HammingWindow", "BlackmanWindow")  # fmt: skip
"""Operators that the importer reads through their function bodies."""
OTHER_USES: Mapping[tuple[str, str], Use] = {
    **learning.OTHER_DOMAINS,
    **{(MICROSOFT, op): use for op, use in {**microsoft_integers.USES, **microsoft_standard.USES}.items()},
    ("", SIMPLIFIED): microsoft.simplified_norm,
}


def uncovered() -> list[str]:
    """Return the operators of the importer's registry that no generator makes."""
    other = [f"{d}.{op}" for d, op in OTHER_DOMAINS if (d, op) not in OTHER_USES.keys() | learning.NO_ARRAYS]
    return sorted([op for op in KNOWN if op not in USES] + other)


def operators() -> list[tuple[str, str]]:
    """Return domain and name of every operator that programs are made of."""
    names = [("", op) for op in sorted(KNOWN) if op in USES] + [("", op) for op in MORE_OPERATORS]
    return names + [key for key in sorted(OTHER_DOMAINS) if key in OTHER_USES]


@cache
def _available(opset: int, pattern: str) -> tuple[tuple[str, str], ...]:
    """Return the operators that an opset has; those that few opsets have are listed several times, so that each is drawn as often.

    Args:
        pattern: A regular expression that a domain and name, such as `com.microsoft.Gelu`, begin with.
    """
    listed: list[tuple[str, str]] = []
    for key in operators():
        if not re.match(pattern, ".".join(filter(None, key))):
            continue
        having = [o for o in OPSETS if key in OTHER_USES or _is_defined(key[1], o)]
        if opset in having:
            listed += [key] * min(8, len(OPSETS) // len(having))
    return tuple(listed)


def _is_defined(op: str, opset: int) -> bool:
    return version_of(onnx, op, opset) is not None and not onnx.defs.get_schema(op, opset, "").deprecated


def make(seed: int, number: int, pattern: str = "") -> Program | None:
    """Return a program of the operators whose domain and name begin with a pattern; None where no oracle accepted a node."""
    rng = random.Random(f"{seed} {number}")
    opset = rng.choice(OPSETS)
    b = Builder(rng, opset)
    for _ in range(rng.choice(STEPS)):
        for _ in range(ATTEMPTS):
            domain, op = rng.choice(_available(opset, pattern))
            use = OTHER_USES.get((domain, op)) or USES[op]
            before = len(b.p.nodes)
            try:
                use(b, op)
            except (Invalid, ValueError, IndexError, ZeroDivisionError):
                del b.p.nodes[before:]
                continue
            break
    if not b.p.nodes:
        return None
    results = [n for node in b.p.nodes for n in node.output]
    for name in results:
        value = b.values.get(name)
        if (
            isinstance(value, np.ndarray)
            and value.dtype in FLOATS
            and value.size
            and rng.random() < 0.5
            and len(b.p.nodes) < 12
        ):
            try:
                edge_consumer(b, name)
            except Invalid:
                continue
    program = b.finish()
    if not program.outputs:
        return None
    more = another_call(program, rng)
    if more is not None and not program.wrongly_tied:
        program.calls.append(more)
    return program


@dataclass
class Outcome:
    """What a trial of a program says.

    Attributes:
        kind: "" for agreement, else "wrong", "crash", "refused import", "refused call" or "no oracle".
        why: What differs.
        call: Number of the call.
        output: Name of the output that differs.
    """

    kind: str = ""
    why: str = ""
    call: int = 0
    output: str = ""
    judged: int = 0
    disagreements: int = 0
    unsure: int = 0
    oracles: set[str] = field(default_factory=set)
    operators: list[str] = field(default_factory=list)
    module: IRModule | None = None
    expected: list[Expected | None] = field(default_factory=list)

    def key(self) -> str:
        """Return what findings of one kind share."""
        text = re.sub(r"^node '.*?', operator (\w+) .*?\)\): ", r"\1: ", self.why, flags=re.DOTALL).partition("; ")[0]
        text = re.sub(r"'[^']*'|\"[^\"]*\"|Tensor\(.*?\w\)|node \S+|\b[\d.]+(e[-+]?\d+)?|nan|inf", "_", text)
        return f"{self.kind}: {text}"[:160]

    @property
    def is_finding(self) -> bool:
        return self.kind in ("wrong", "crash")


def interpreted(module: IRModule, args: list[Array]) -> Any:
    with np.errstate(all="ignore"):
        return run_function(module, "main", args)


def symbols(program: Program) -> set[str]:
    return {d for i in program.inputs.values() for d in i.dims if isinstance(d, str) and not PLACEHOLDER.fullmatch(d)}


def attempt(program: Program, run: Run = interpreted, seed: int = 0) -> Outcome:
    """Import a program, run each call and compare the results with the oracles'."""
    outcome = Outcome()
    try:
        types = program.runs(program.calls[0]).by_name
        proto = program.proto(types)
    except Exception as error:
        return Outcome("no oracle", f"{type(error).__name__}: {error}")
    runtime = Runtime(program, types) if _runtime() else None
    for call in program.calls:
        try:
            outcome.expected.append(expected(program, call, runtime, seed))
        except Exception as error:
            outcome.expected.append(None)
            outcome.why = f"{type(error).__name__}: {error}"
    if outcome.expected[0] is None:
        outcome.kind = "no oracle"
        return outcome
    outcome.operators = [f"{n.domain}.{n.op_type}" if n.domain else n.op_type for n in program.nodes]
    outcome = judged(program, outcome, lambda: load_onnx(proto, {name: (0, 1024) for name in symbols(program)}), run)
    if outcome.kind == "refused call" and program.wrongly_tied:
        outcome.kind = "refused as wrongly tied"
    return outcome


def judged(program: Program, outcome: Outcome, load: Callable[[], IRModule], run: Run) -> Outcome:
    """Import a program, run its calls and note what is wrong."""
    try:
        outcome.module = load()
    except RelaxTuneError as error:
        outcome.kind, outcome.why = "refused import", str(error)
        return outcome
    except Exception:
        outcome.kind, outcome.why = "crash", "import: " + traceback.format_exc()[-900:]
        return outcome
    judge_calls(program, outcome, run)
    return outcome


def judge_calls(program: Program, outcome: Outcome, run: Run) -> None:
    """Run each call of an imported program, and note what is wrong."""
    assert outcome.module is not None
    for number, (call, e) in enumerate(zip(program.calls, outcome.expected, strict=True)):
        if e is None:
            continue
        outcome.call = number
        try:
            results = run(outcome.module, [call[name] for name in program.inputs])
        except UserError as error:
            outcome.kind, outcome.why = "refused call", str(error)
            return
        except Exception:
            outcome.kind, outcome.why = "crash", "call: " + traceback.format_exc()[-900:]
            return
        results = results if isinstance(results, tuple) else (results,)
        verdict = judge(program, e, dict(zip(program.outputs, results, strict=False)))
        _count(outcome, e, verdict)
        if verdict.wrong:
            outcome.kind, outcome.why, outcome.output = "wrong", verdict.wrong, verdict.output
            return


def _count(outcome: Outcome, e: Expected, verdict: Verdict) -> None:
    outcome.judged += verdict.judged
    outcome.disagreements += verdict.disagreements
    outcome.unsure += verdict.unsure
    outcome.oracles |= {"reference"} if e.reference else set()
    outcome.oracles |= {"runtime"} if e.runtime else set()


@cache
def _runtime() -> bool:
    return has_runtime()
