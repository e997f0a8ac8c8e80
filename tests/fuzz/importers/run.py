"""Random programs for an importer, against others: `python -m tests.fuzz.importers.run --programs 1000 --seed 1`.

ONNX programs are compared with `onnx.reference` and ONNX Runtime, and with `--importer torch` programs of torch.export with torch.

A program is determined by the seed and its number. A child process makes, imports, interprets and judges it, so that an oracle
that dies (integer division by 0 ends ONNX Runtime) costs one program. One program in `--sample` is also built for the target c
as builds are, and run. With `--state FILE` the same command goes on where it ended. Findings are minimised, printed as tests, and stored.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.importers import minimise as onnx_texts
from tests.fuzz.importers import trial as onnx_trials
from tests.fuzz.importers.minimise import minimise
from tests.fuzz.importers.program import Program
from tests.fuzz.importers.trial import Outcome, judge_calls

SECONDS, WALL_SECONDS = 120, 1800
"""Seconds of processor time and of wall time that one program may take."""
LIFE = 2000
"""Programs of a child."""
SHRINK_SECONDS = 6


@dataclass(frozen=True)
class Trials:
    """What programs of an importer are made, tried and shown by: the functions of `trial` and `minimise`, or of `torch_programs`."""

    make: Callable[[int, int], Any]
    attempt: Callable[..., Outcome]
    operators: Callable[[], list[tuple[str, str]]]
    uncovered: Callable[[], list[str]]
    shown: Callable[[Any], str]
    stored: Callable[[Any, Path, str], Path]
    regression_test: Callable[[Any, str], str]


ONNX = Trials(
    onnx_trials.make, onnx_trials.attempt, onnx_trials.operators, onnx_trials.uncovered, onnx_texts.shown,
    onnx_texts.stored, onnx_texts.regression_test,
)  # fmt: skip


def trials_of(importer: str) -> Trials:
    """Return the trials of the importer "onnx" or "torch"."""
    if importer == "onnx":
        return ONNX
    from tests.fuzz.importers import torch_programs as t

    return Trials(t.make, t.attempt, t.operators, t.uncovered, t.shown, t.stored, t.regression_test)


@dataclass
class Totals:
    """Counts of a campaign, which a file keeps.

    Attributes:
        next: Number of the next program.
        kinds: Programs by outcome.
        findings: Number of a program and what is wrong.
        examples: The first program of each refusal.
        lost: Number of a program, and why it has no outcome.
        sources: Programs by the hash of the sources that made, imported and judged them.
    """

    next: int = 0
    secs: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    findings: list[tuple[int, str]] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)

    def lose(self, why: str) -> None:
        """Count a program without an outcome."""
        self.kinds[why] += 1
        self.lost.append((self.next, why))
        self.next += 1

    @classmethod
    def read(cls, file: Path) -> Totals:
        if not file.exists():
            return cls()
        data = json.loads(file.read_text())
        counters = {k: Counter(data.get(k, {})) for k in ("kinds", "operators", "elements", "refusals", "sources")}
        lists = {k: [tuple(f) for f in data.get(k, ())] for k in ("findings", "lost")}
        return cls(data["next"], data["secs"], **counters, **lists, examples=data.get("examples", {}))

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps(vars(self), indent=1))
        partial.replace(file)

    def text(self, trials: Trials) -> str:
        never = [op for d, op in trials.operators() if not self.operators[f"{d}.{op}" if d else op]]
        lines = [
            f"{sum(self.kinds.values())} programs in {self.secs:.0f} s: {dict(self.kinds)}",
            f"elements: {dict(self.elements)}",
            f"{len(self.operators)} operators; none of {never}; without a generator: {trials.uncovered()}",
            *(f"{count:6} {text} ({self.examples[text]})" for text, count in self.refusals.most_common(40)),
            *(f"finding {number}: {why[:200]}" for number, why in self.findings),
            *(f"{why}: {number}" for number, why in self.lost),
        ]
        return "\n".join(lines)


def fingerprint() -> str:
    """Return a short hash of the sources that make, import, interpret and judge programs."""
    root = Path(__file__).resolve().parents[3]
    files = sorted(f for folder in ("tests/fuzz/importers", "src/relax_tune/ir") for f in (root / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.name != "results.py")).hexdigest()[:8]


def one(
    trials: Trials, seed: int, number: int, judge_built: Callable[[Program, Outcome], None] | None
) -> Outcome | None:
    """Try one program. judge_built: builds, runs and judges it too."""
    program = trials.make(seed, number)
    if program is None:
        return None
    outcome = trials.attempt(program, seed=number)
    if judge_built is not None and not outcome.kind and outcome.module is not None:
        judge_built(program, outcome)
    return outcome


def built_judge(folder: Path) -> Callable[[Program, Outcome], None]:
    """Return a judge of programs built for the target c, compiled as builds compile them."""
    from tests.fuzz.execute import Bench, Trial, Way

    bench = Bench(folder)

    def judged(program: Program, outcome: Outcome) -> None:
        assert outcome.module is not None
        calls = [[np.asarray(c[i], order="C") for i in program.inputs] for c in program.calls]
        (done,) = bench.run(Way("c", "generic", 3), [Trial(outcome.module, tuple(calls))])
        if done.unbuilt or done.crash:
            outcome.kind = "wrong" if done.crash else "not built"
            outcome.why = done.crash or done.unbuilt
            return
        results = iter(done.results)

        def run(_: Any, args: list[Any]) -> Any:
            result = next(results)
            if isinstance(result, str):
                raise RuntimeError(f"the built program refuses: {result}")
            return result

        called = outcome.expected
        for k, e in enumerate(called):
            if e is None:
                next(results)
                continue
            one_call = program.copy(calls=[program.calls[k]])
            part = Outcome(module=outcome.module, expected=[e])
            judge_calls(one_call, part, run)
            if part.kind:
                outcome.kind, outcome.why, outcome.output, outcome.call = (
                    part.kind,
                    f"built for c: {part.why}",
                    part.output,
                    k,
                )
                return

    return judged


def work(trials: Trials, parent: Connection, pipe: Connection, seed: int, numbers: Sequence[int], sample: int) -> None:
    """Try programs in a child, and send what each says."""
    parent.close()  # so that a parent that ends is noticed
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        judged = built_judge(Path(folder)) if sample else None
        for number in numbers:
            pipe.send(("begin", number))
            outcome = one(trials, seed, number, judged if sample and number % sample == 0 else None)
            if outcome is None:
                pipe.send(("none", number))
                continue
            elements = {"judged": outcome.judged, "disagreements": outcome.disagreements, "unsure": outcome.unsure}
            elements |= {f"calls with {o}": 1 for o in outcome.oracles}
            elements |= {"built for c": 1} if sample and number % sample == 0 else {}
            pipe.send(("done", number, outcome.kind, outcome.why, outcome.key(), outcome.operators, elements))
    pipe.send(("end",))


def processor_seconds(process: int) -> float:
    """Return the processor time that a process has used; 0 where the system does not say."""
    try:
        times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def answers(pipe: Connection, process: int) -> bool:
    """Wait for what a child says of a program; return False where it takes too long. Other work on the machine does not count."""
    begin, used = time.monotonic(), processor_seconds(process)
    while not pipe.poll(5):
        if processor_seconds(process) - used > SECONDS or time.monotonic() - begin > WALL_SECONDS:
            return False
    return True


def campaign(
    seed: int, programs: int, secs: float, sample: int = 0, totals: Totals | None = None, state: Path | None = None,
    note: Callable[[int, str, str], None] | None = None, trials: Trials = ONNX,
) -> Totals:  # fmt: skip
    """Try programs until as many were tried, or the time is over. note: told number, kind and reason of each finding."""
    totals = totals or Totals()
    begin, first, fork = time.monotonic(), totals.secs, multiprocessing.get_context("fork")
    last, sources = totals.next + programs, fingerprint()

    def over() -> bool:
        return totals.next >= last or time.monotonic() - begin > secs

    while not over():
        ours, theirs = fork.Pipe(duplex=False)
        numbers = range(totals.next, min(last, totals.next + LIFE))
        child = fork.Process(target=work, args=(trials, ours, theirs, seed, numbers, sample), daemon=True)
        child.start()
        theirs.close()
        try:
            while not over():
                if not answers(ours, child.pid or 0):
                    totals.lose("no answer")
                    break
                message = ours.recv()
                if message[0] == "end":
                    break
                _add(totals, message, note)
                totals.sources[sources] += message[0] != "begin"
                if state and totals.next % 100 == 0:
                    totals.secs = first + time.monotonic() - begin
                    totals.write(state)
        except EOFError:
            totals.lose("an oracle died")
        finally:
            child.kill()
            child.join()
            ours.close()
    totals.secs = first + time.monotonic() - begin
    if state:
        totals.write(state)
    return totals


def _add(totals: Totals, message: Sequence[Any], note: Callable[[int, str, str], None] | None) -> None:
    if message[0] == "begin":
        return
    totals.next = message[1] + 1
    if message[0] == "none":
        totals.kinds["no program"] += 1
        return
    _, number, kind, why, key, names, elements = message
    totals.kinds[kind or "agrees"] += 1
    totals.operators.update(names)
    totals.elements.update(elements)
    if kind in ("wrong", "crash"):
        totals.findings.append((number, why))
        if note is not None:
            note(number, kind, why)
    elif kind:
        totals.refusals[key] += 1
        totals.examples.setdefault(key, number)


def report(trials: Trials, seed: int, number: int, why: str, folder: Path) -> None:
    """Print a finding, minimised and as a test, and store it."""
    program = trials.make(seed, number)
    assert program is not None
    outcome = trials.attempt(program, seed=number)
    if not outcome.is_finding:
        print(f"==== program {number}: {why}", flush=True)
        print(trials.shown(program), flush=True)
        trials.stored(program, folder, f"s{seed}_{number}")
        return

    def fails(candidate: Program) -> bool:
        other = trials.attempt(candidate, seed=number)
        return other.kind == outcome.kind and (outcome.kind == "crash" or other.oracles >= outcome.oracles)

    small = minimise(program, outcome.output if outcome.kind == "wrong" else "", outcome.call, fails, SHRINK_SECONDS)
    reason = trials.attempt(small, seed=number).why
    print(
        f"==== program {number}: {outcome.kind}: {reason}\n{trials.shown(small)}\n{trials.regression_test(small, reason)}",
        flush=True,
    )
    trials.stored(small, folder, f"s{seed}_{number}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--importer", choices=("onnx", "torch"), default="onnx")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--sample", type=int, default=20, help="one in so many is built for c, too; 0: none")
    parser.add_argument("--state", type=Path, help="a file of totals: go on where it ends")
    parser.add_argument("--found", type=Path, default=Path("build/fuzz/findings"), help="the folder for findings")
    parser.add_argument(
        "--operators", default="", help="a pattern of ONNX operators, such as 'com[.]microsoft[.]QLinear'"
    )
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    trials = trials_of(asked.importer)
    if asked.operators:
        trials = replace(trials, make=partial(onnx_trials.make, pattern=asked.operators))
    totals = Totals.read(asked.state) if asked.state else Totals()

    def note(number: int, kind: str, why: str) -> None:
        report(trials, asked.seed, number, why, asked.found)

    campaign(asked.seed, asked.programs, asked.seconds, asked.sample, totals, asked.state, note, trials)
    print(totals.text(trials))
    return bool(totals.findings)


if __name__ == "__main__":
    sys.exit(main())
