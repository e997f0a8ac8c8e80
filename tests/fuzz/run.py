"""Random programs against the judge for some seconds: `python -m tests.fuzz.run --secs 60 --seed 1`.

A campaign is a sequence of batches; the seed and a batch's number determine its programs. Workers, processes of their own,
generate, build, run and judge; the batch that a worker dies of is tried again program by program."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tests.fuzz.coverage import Finding, Place, Tally
from tests.fuzz.draft import ELEMENTS, Draft, Grower, arguments, sizes_of
from tests.fuzz.execute import SECONDS, Bench, Outcome, Trial, Way, execute, in_child
from tests.fuzz.known import READS_NO_ELEMENTS
from tests.fuzz.operators import grow
from tests.fuzz.oracle import Array, Expected, indices_inside
from tests.fuzz.shrink import kind_of, shrink, store

from relax_tune.errors import RelaxTuneError, UserError
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.text.printer import print_text
from relax_tune.tuner.settings import Memory

CALLS = 2
STYLES = ("plain", "small", "edges", "plain", "small", "edges", "zeros")
STEPS = (1, 2, 2, 3, 3, 4, 6)
WAYS = (
    "c generic 0", "c generic 1", "c tuned 3", "c generic 0", "c traces 3", "c generic 0", "c library 0", "c generic 3",
    "opencl generic 1", "c generic 0", "c traces 1", "c generic 1", "c tuned 3", "opencl tuned 1", "c generic 0", "cuda generic 1",
    "c library 1", "cuda tuned 1",
)  # fmt: skip
"""Target, policy and level of optimisation of batches, one after the other."""
BATCH = {"c": 48, "opencl": 12, "cuda": 8}
"""Programs of a batch by target; a quarter of them where tuned, which takes ten times as long."""
SLICE = 300
"""Seconds after which findings are shortened and totals stored."""
LIFE = 40
"""Batches of a worker: what it has compiled stays in its memory."""


def wrong(draft: Draft, module: Any, args: Sequence[Array], result: Any, target: str, tally: Tally) -> str:
    """Return what is wrong with the outcome of a call, "" for nothing."""
    try:
        with np.errstate(all="ignore"):
            interpreted = run_function(module, "main", args)
    except UserError as error:
        tally.counts["refused"] += 1
        if isinstance(result, str):
            wrongly = "indices" in str(error) and indices_inside(module, args)
            return f"refused, though every index is inside: {error}" if wrongly else ""
        if any(s.op.name == READS_NO_ELEMENTS for s in draft.steps):
            return ""
        return f"the interpreter refuses, the program does not: {error}"
    except Exception as error:
        return f"the interpreter crashes: {type(error).__name__}: {error}"
    if isinstance(result, str):
        return f"the program refuses, the interpreter does not: {result}"
    expected = Expected(module, args, target)
    plain = expected.judge(interpreted if len(draft.outputs) > 1 else (interpreted,))
    if plain.problems:
        return f"the interpreter: {plain.problems[0]}"
    actual = expected.judge(result)
    tally.counts["judged"] += actual.judged
    tally.counts["skipped"] += actual.skipped
    return actual.problems[0] if actual.problems else ""


def programs(rng: random.Random, count: int, tally: Tally) -> list[tuple[Draft, Trial]]:
    trials: list[tuple[Draft, Trial]] = []
    while len(trials) < count:
        w = Grower(rng)
        grow(w, rng.choice(STEPS), lambda name: 1 / (3 + tally.uses[name]) ** 0.5)
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
            trials.append((draft, trial))
            tally.uses.update(s.op.name for s in draft.steps)
    return trials


def calls(draft: Draft, rng: random.Random) -> Iterator[Sequence[Array]]:
    for _ in range(CALLS):
        sizes = sizes_of(draft, rng)
        shapes = draft.shapes(sizes)
        if min((d for s in shapes for d in s), default=0) < 0:
            continue  # of a difference of sizes
        if sum(int(np.prod(s)) for s in shapes) <= ELEMENTS:
            yield arguments(draft, sizes, np.random.default_rng(rng.randrange(1 << 30)), rng.choice(STYLES))


def way_of(seed: int, number: int, ways: Sequence[str]) -> Way:
    rng = random.Random(f"way {seed} {number}")
    target, policy, level = ways[number % len(ways)].split()
    return Way(target, policy, int(level), rng.randrange(1 << 20), rng.choice(get_args(Memory)))


def batch_of(seed: int, number: int, way: Way, tally: Tally) -> list[tuple[Draft, Trial]]:
    count = BATCH[way.target] // (4 if way.policy == "tuned" else 1)
    return programs(random.Random(f"batch {seed} {number}"), count, tally)


def examine(way: Way, at: tuple[int, int], draft: Draft, trial: Trial, outcome: Outcome, tally: Tally) -> None:
    """Count a program, and find what is wrong with it. at: numbers of its batch and in it."""
    tally.programs[f"{way.target} {way.policy}"] += 1
    tally.count(trial.module, way.target, outcome.tasks)
    if outcome.unbuilt:
        tally.refusals[re.sub(r"\d+|'[^']*'", "_", outcome.unbuilt)[:160]] += 1
    for number, args in enumerate(trial.calls):
        if why := reason(draft, trial.module, args, outcome, way.target, tally, number):
            tally.findings.append(Place(*at, number, why))
            return


def one_batch(bench: Bench | None, seed: int, number: int, ways: Sequence[str]) -> Tally:
    """Try a batch: at a bench, or without one each program in a separate process."""
    tally, way = Tally(next=number + 1), way_of(seed, number, ways)
    clock = Clock(tally)
    batch = batch_of(seed, number, way, tally)
    clock("generate")
    trials = [t for _, t in batch]
    outcomes = bench.run(way, trials, clock) if bench else [execute(way, [t])[0] for t in trials]
    clock("run")
    for k, ((draft, trial), outcome) in enumerate(zip(batch, outcomes, strict=True)):
        examine(way, (number, k), draft, trial, outcome, tally)
    clock("judge")
    return tally


def finding_at(seed: int, place: Place, ways: Sequence[str]) -> Finding:
    """The program of a finding. Workers send only its place: types are compared by identity, which a copy would lose."""
    way = way_of(seed, place.batch, ways)
    draft, trial = batch_of(seed, place.batch, way, Tally())[place.program]
    return Finding(way, draft, list(trial.calls[place.call]), place.why)


class Clock:
    """Adds the processor time since the last call to a kind of work."""

    def __init__(self, tally: Tally) -> None:
        self.tally, self.last = tally, processor_secs()

    def __call__(self, what: str) -> None:
        now = processor_secs()
        self.tally.millis[what] += round(1000 * (now - self.last))
        self.last = now


@dataclass
class Worker:
    """A process that tries the batches `next`, `next + step`, ... and sends the tally of each."""

    process: Any
    pipe: Connection
    next: int

    @classmethod
    def start(cls, seed: int, first: int, step: int, ways: Sequence[str]) -> Worker:
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(
            target=work, args=(theirs, seed, range(first, first + LIFE * step, step), ways), daemon=True
        )
        process.start()
        theirs.close()
        return cls(process, ours, first)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def work(pipe: Connection, seed: int, numbers: Sequence[int], ways: Sequence[str]) -> None:
    gc.freeze()
    gc.set_threshold(50_000)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for number in numbers:
            pipe.send(one_batch(bench, seed, number, ways))
        pipe.send(None)


def campaign(
    secs: float, seed: int, ways: Sequence[str] = WAYS, most: int | None = None, jobs: int = 1, first: int = 0
) -> Tally:
    """Try batches from number `first` on until the time is over, or `most` programs were."""
    tally, end = Tally(), time.monotonic() + secs
    workers = [Worker.start(seed, first + k, jobs, ways) for k in range(jobs)]
    try:
        while time.monotonic() < end and (most is None or tally.total < most):
            ready = wait([w.pipe for w in workers], min(SECONDS, max(0.0, end - time.monotonic())))
            for k, w in enumerate(workers):
                if w.pipe not in ready:
                    continue
                try:
                    result = w.pipe.recv()
                except EOFError:
                    tally.counts["deaths"] += 1
                    result = one_batch(None, seed, w.next, ways)
                    w.next += jobs
                    tally.add(result)
                    result = None
                if result is None:
                    w.stop()
                    workers[k] = Worker.start(seed, w.next, jobs, ways)
                    continue
                w.next += jobs
                tally.add(result)
                for f in result.findings:
                    print(f"batch {f.batch}.{f.program} {way_of(seed, f.batch, ways)}: {f.why[-300:]}", flush=True)
    finally:
        for w in workers:
            w.stop()
    return tally


def reason(
    draft: Draft, module: Any, args: Sequence[Array], outcome: Outcome, target: str, tally: Tally, call: int = 0
) -> str:
    """Return why the outcome of a program is wrong, "" for nothing."""
    if outcome.unbuilt:
        return "" if _refused(module, args) else f"not built: {outcome.unbuilt}"
    if outcome.crash:
        return outcome.crash
    if outcome.outside and not any(isinstance(r, str) for r in outcome.results):
        return f"the lowered program: {outcome.outside}"
    return wrong(draft, module, args, outcome.results[call], target, tally)


def _refused(module: Any, args: Sequence[Array]) -> bool:
    """Return whether the interpreter refuses a call: the build may already refuse shapes that can never fit."""
    try:
        with np.errstate(all="ignore"):
            run_function(module, "main", args)
    except UserError:
        return True
    except Exception:  # a crash of the interpreter excuses no build
        pass
    return False


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
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument("--most", type=int, help="number of programs")
    parser.add_argument("--shrink", type=float, default=20, help="seconds to shorten each finding; 0: do not shorten")
    parser.add_argument("--store", help="the folder for findings")
    parser.add_argument("--tally", type=Path, help="a file of totals: go on where it ends, and add to it")
    parser.add_argument("--ways", default=",".join(WAYS))
    asked = parser.parse_args()
    total = Tally.read(asked.tally) if asked.tally else Tally()
    total.findings, past = [], total.findings
    for place in past:
        total.findings += [place] if is_reproduced(asked.seed, place, asked.ways.split(",")) else []
    total.counts["accepted since"] += len(past) - len(total.findings)
    first, end = max(asked.first, total.next), time.monotonic() + asked.secs
    while (left := end - time.monotonic()) > 0 and (asked.most is None or total.total < asked.most):
        most = None if asked.most is None else asked.most - total.total
        tally = campaign(min(left, SLICE), asked.seed, asked.ways.split(","), most, asked.jobs, max(first, total.next))
        total.add(tally)
        if asked.tally:
            total.write(asked.tally)
        for place in tally.findings:
            report(finding_at(asked.seed, place, asked.ways.split(",")), place.batch, asked.shrink, asked.store)
    print(total.text(sum(total.millis.values()) / 1000))
    return bool(total.findings)


def is_reproduced(seed: int, place: Place, ways: Sequence[str]) -> bool:
    """Try the batch of an earlier finding again, and return whether it fails again."""
    tally = in_child(lambda bench: one_batch(bench, seed, place.batch, ways))
    return tally is None or any(f.program == place.program for f in tally.findings)


def report(f: Finding, batch: int, secs: float, folder: str | None) -> None:
    """Print a finding, shortened for some seconds, and keep it in a folder."""
    print(f"---- batch {batch} {f.way}: {f.why}", flush=True)
    small = shortened(f, secs) if secs else f
    if folder:
        print(store((small.draft, list(small.call)), small.way, small.why, Path(folder)))
    print(f"{small.why}\n{shown(small)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
