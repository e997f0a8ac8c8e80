"""Random programs against the judge for some seconds: `python -m tests.fuzz.run --secs 60 --seed 1`."""

from __future__ import annotations

import argparse
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.draft import ELEMENTS, Draft, Grower, arguments, sizes_of
from tests.fuzz.execute import Outcome, Trial, Way, execute
from tests.fuzz.known import KNOWN_REFUSALS
from tests.fuzz.operators import ENTRIES, grow
from tests.fuzz.oracle import Array, expected
from tests.fuzz.shrink import kind_of, shrink, store

from relax_tune.errors import RelaxTuneError, UserError
from relax_tune.ir.core.graph import Binding, Call, Function
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.text.printer import print_text

CALLS = 3
STYLES = ("plain", "small", "edges")
WAYS = (
    "c generic 1", "c tuned 1", "opencl generic 1", "c library 3", "c generic 1", "c tuned 3", "opencl tuned 1", "c generic 3",
    "c tuned 1", "cuda generic 1",
)  # fmt: skip
"""Target, policy and level of optimisation of batches, in turns."""
BATCH = {"c": 24, "opencl": 10, "cuda": 5}


@dataclass
class Finding:
    """A program that is wrong on a target, with the arguments of the call."""

    way: Way
    draft: Draft
    call: Sequence[Array]
    why: str


@dataclass
class Tally:
    """programs: by target. pairs: (operator, dtype, consumer, target)."""

    programs: Counter[str] = field(default_factory=Counter)
    uses: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def covered(self) -> dict[str, int]:
        """Count different (operator, dtype, consumer) by target."""
        return dict(Counter(target for *_, target in self.pairs))

    def text(self, secs: float) -> str:
        total = sum(self.programs.values())
        lines = [
            f"{total} programs in {secs:.0f} s of processor time, {total / secs * 60:.0f} a minute: {dict(self.programs)}",
            f"{len(self.uses)} of {len(ENTRIES)} operators, {len(self.pairs)} of (operator, dtype, consumer, target): {self.covered()}",
            f"{dict(self.counts)}",
            f"{len(self.findings)} findings",
        ]
        return "\n".join(lines)


def wrong(draft: Draft, module: Any, args: Sequence[Array], result: Any, target: str, tally: Tally) -> str:
    """Return what is wrong with the outcome of a call, "" for nothing."""
    try:
        with np.errstate(all="ignore"):
            said = run_function(module, "main", args)
    except UserError as error:
        tally.counts["refused"] += 1
        if isinstance(result, str) or any(re.search(p, str(error)) for p in KNOWN_REFUSALS):
            return ""
        return f"the interpreter refuses, the program does not: {error}"
    except Exception as error:
        return f"the interpreter crashes: {type(error).__name__}: {error}"
    if isinstance(result, str):
        return f"the program refuses, the interpreter does not: {result}"
    wanted = expected(module, args, target)
    plain = wanted.judge(said if len(draft.outputs) > 1 else (said,))
    if plain.problems:
        return f"the interpreter: {plain.problems[0]}"
    found = wanted.judge(result)
    tally.counts["judged"] += found.judged
    tally.counts["skipped"] += found.skipped
    return found.problems[0] if found.problems else ""


def programs(rng: random.Random, count: int, tally: Tally) -> list[tuple[Draft, Trial]]:
    made: list[tuple[Draft, Trial]] = []
    while len(made) < count:
        w = Grower(rng)
        grow(w, rng.randint(2, 8), lambda name: 1 / (3 + tally.uses[name]) ** 0.5)
        if not any(kind == "step" for kind, _ in w.order):
            continue
        draft = w.finish()
        try:
            module = draft.module()
        except RelaxTuneError:
            tally.counts["not rebuilt"] += 1
            continue
        trial = Trial(module, tuple(calls(draft, rng)))
        if trial.calls:
            made.append((draft, trial))
            tally.uses.update(s.op.name for s in draft.steps)
    return made


def calls(draft: Draft, rng: random.Random) -> Iterator[Sequence[Array]]:
    for _ in range(CALLS):
        sizes = sizes_of(draft, rng)
        if sum(int(np.prod(s)) for s in draft.shapes(sizes)) <= ELEMENTS:
            yield arguments(draft, sizes, np.random.default_rng(rng.randrange(1 << 30)), rng.choice(STYLES))


def count_pairs(module: Any, target: str, tally: Tally) -> None:
    main = module.functions["main"]
    assert isinstance(main, Function)
    makers: dict[Any, tuple[str, str]] = {}
    for b in main.bindings:
        if not isinstance(b, Binding):
            continue
        if isinstance(b.value, Call):
            dtype = b.var.info.dtype if isinstance(b.var.info, TensorInfo) else None
            makers[b.var] = (b.value.op.name, str(dtype))
            tally.pairs.update((*makers[a], b.value.op.name, target) for a in b.value.args if a in makers)
            if not any(a in makers for a in b.value.args):
                tally.pairs[(b.value.op.name, str(dtype), "-", target)] += 1


def campaign(secs: float, seed: int, ways: Sequence[str] = WAYS, most: int | None = None) -> Tally:
    """Try batches until the time is over, or `most` programs were."""
    rng, tally, start, number = random.Random(seed), Tally(), time.monotonic(), 0
    while time.monotonic() - start < secs and (most is None or sum(tally.programs.values()) < most):
        target, policy, level = ways[number % len(ways)].split()
        way = Way(target, policy, int(level), rng.randrange(1 << 20))
        batch = programs(rng, BATCH[target], tally)
        began = time.monotonic()
        outcomes = execute(way, [t for _, t in batch])
        tally.counts[f"execute ms {target}"] += int(1000 * (time.monotonic() - began))
        for (draft, trial), outcome in zip(batch, outcomes, strict=True):
            examine(way, draft, trial, outcome, tally)
        number += 1
    return tally


def examine(way: Way, draft: Draft, trial: Trial, outcome: Outcome, tally: Tally) -> None:
    tally.programs[way.target] += 1
    count_pairs(trial.module, way.target, tally)
    if outcome.unbuilt:
        tally.counts["not built"] += 1
        return
    for number, args in enumerate(trial.calls):
        if why := reason(draft, trial.module, args, outcome, way.target, tally, number):
            tally.findings.append(Finding(way, draft, list(args), why))
            return


def reason(
    draft: Draft, module: Any, args: Sequence[Array], outcome: Outcome, target: str, tally: Tally, call: int = 0
) -> str:
    """Return why the outcome of a program is wrong, "" for nothing."""
    if outcome.unbuilt or outcome.crash:
        return outcome.crash
    return wrong(draft, module, args, outcome.results[call], target, tally)


def shortened(f: Finding, secs: float) -> Finding:
    """The finding with as little as fails alike."""

    def why(draft: Draft, module: Any, args: Sequence[Array], outcome: Outcome) -> str:
        return reason(draft, module, args, outcome, f.way.target, Tally())

    (draft, args), text = shrink((f.draft, list(f.call)), f.way, why, kind_of(f.why), secs)
    return Finding(f.way, draft, args, text if text != kind_of(f.why) else f.why)


def shown(f: Finding) -> str:
    """The program of a finding and the arguments of its call."""
    arguments = "\n".join(f"x{p} = {a.tolist() if a.size < 40 else a.shape}" for p, a in enumerate(f.call))
    return f"{print_text(f.draft.module())}\n{arguments}"


def processor_secs() -> float:
    """Processor time of this process and its children so far."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in both)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--secs", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", type=float, default=20, help="seconds for each finding; 0: as it was found")
    parser.add_argument("--store", help="the folder for findings")
    parser.add_argument("--ways", default=",".join(WAYS))
    asked = parser.parse_args()
    tally = campaign(asked.secs, asked.seed, asked.ways.split(","))
    secs = processor_secs()
    for f in tally.findings:
        print(f"---- {f.way}: {f.why}", flush=True)
        small = shortened(f, asked.shrink) if asked.shrink else f
        if asked.store:
            print(store((small.draft, list(small.call)), small.way, small.why, Path(asked.store)))
        print(f"{small.why}\n{shown(small)}", flush=True)
    print(tally.text(secs))
    return bool(tally.findings)


if __name__ == "__main__":
    sys.exit(main())
