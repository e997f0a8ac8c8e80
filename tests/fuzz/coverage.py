"""What programs have covered: their number, operators, and uses of an operator by dtype, consumer and target."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.draft import Draft
from tests.fuzz.execute import Array, Way
from tests.fuzz.operators import ENTRIES

import relax_tune
from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Binding, Call, Function
from relax_tune.ir.core.struct_info import TensorInfo

Pair = tuple[str, str, str, str]
PRODUCT = Path(relax_tune.__file__).parent
UNTRIED = ("ir/frontend", "runtime/generate.py", "runtime/generation", "tuner/cli")
"""Importers of model files, generation of text and commands, which no program of the fuzzer comes through."""


def code_under_test() -> str:
    """The hash of the sources that the programs try.

    Their judge is left out: once repaired it accepts more, and its findings are tried again."""
    result = hashlib.sha256()
    folders = os.walk(PRODUCT, followlinks=True)
    for path in sorted(Path(folder, f) for folder, _, files in folders for f in files if f.endswith(".py")):
        name = path.relative_to(PRODUCT).as_posix()
        if not name.startswith(UNTRIED):
            result.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return result.hexdigest()


@dataclass
class Finding:
    """A program that is wrong on a target, with the arguments of the call."""

    way: Way
    draft: Draft
    call: Sequence[Array]
    why: str


@dataclass(frozen=True)
class Place:
    """Place of a finding in a campaign, whose seed determines the program. call: number of the program's call."""

    batch: int
    program: int
    call: int
    why: str


@dataclass
class Tally:
    """programs: by target and policy. pairs: (operator, dtype, consumer or -, target); fused: those in one tensor function.

    counts: of elements and calls; refusals: reasons why programs were not built; millis: of processor time, by kind of work.
    next: number after those of all batches."""

    programs: Counter[str] = field(default_factory=Counter)
    uses: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    fused: Counter[Pair] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    millis: Counter[str] = field(default_factory=Counter)
    findings: list[Place] = field(default_factory=list)
    next: int = 0

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
        self.findings += other.findings
        self.next = max(self.next, other.next)

    def write(self, path: Path) -> None:
        """Write everything, with the hash of the code under test."""
        counters = {n: [[k, c] for k, c in v.items()] for n, v in vars(self).items() if isinstance(v, Counter)}
        result = [astuple(f) for f in self.findings]
        path.write_text(json.dumps({**counters, "next": self.next, "findings": result, "code": code_under_test()}))

    @classmethod
    def read(cls, path: Path) -> Tally:
        """What an earlier run wrote; an empty one where there is no file. Raises UserError for totals of other code."""
        stored, result = json.loads(path.read_text()) if path.exists() else {}, cls()
        if stored and stored.get("code") != code_under_test():
            raise UserError(f"{path}: expected totals of this code, got totals of other code; give another file")
        for name, value in vars(result).items():
            if isinstance(value, Counter):
                value.update({tuple(k) if isinstance(k, list) else k: c for k, c in stored.get(name, [])})
        result.next, result.findings = stored.get("next", 0), [Place(*f) for f in stored.get("findings", ())]
        return result

    @property
    def total(self) -> int:
        return sum(self.programs.values())

    def count(self, module: IRModule, target: str, tasks: Sequence[str]) -> None:
        """Count the pairs of a program whose tensor functions have these names."""
        main = module.functions["main"]
        assert isinstance(main, Function)
        together = [operators_in(t) for t in tasks]
        makers: dict[Any, tuple[str, str]] = {}
        for b in main.bindings:
            if not isinstance(b, Binding) or not isinstance(b.value, Call):
                continue
            op = b.value.op.name
            dtype = b.var.info.dtype if isinstance(b.var.info, TensorInfo) else None
            makers[b.var] = (op, str(dtype))
            result = {(*makers[a], op, target) for a in b.value.args if a in makers}
            self.pairs.update(result or [(op, str(dtype), "-", target)])
            self.fused.update(p for p in result if any({p[0], op} <= names for names in together))

    def text(self, secs: float) -> str:
        """secs: of processor time."""
        total = max(1, self.total)
        spent = ", ".join(f"{name} {ms / total:.1f}" for name, ms in sorted(self.millis.items()))
        targets, fused = (dict(Counter(t for *_, t in which)) for which in (self.pairs, self.fused))
        return "\n".join([
            f"{self.total} programs in {secs:.0f} s of processor time, {total / max(secs, 1e-9):.1f} a second: {dict(self.programs)}",
            f"milliseconds a program: {spent}",
            f"{len(self.uses)} of {len(ENTRIES)} operators, {len({p[:2] for p in self.pairs})} of (operator, dtype)",
            f"{len(self.pairs)} of (operator, dtype, consumer, target): {targets}; in one kernel {len(self.fused)}: {fused}",
            f"{dict(self.counts)}",
            f"not built: {dict(self.refusals.most_common(8))}",
            f"{len(self.findings)} findings",
        ])  # fmt: skip


def operators_in(name: str) -> set[str]:
    """The operators in the name of a tensor function, which joins theirs."""
    parts, result = name.split("_"), set()
    while parts:
        for size in range(min(3, len(parts)), 0, -1):
            if (word := "_".join(parts[:size])) in ENTRIES:
                result.add(word)
                break
        parts = parts[size:]
    return result
