"""Contenders of a comparison: each in a separate process, called one at a time, in rounds.

Two thread pools in one process slow each other down, and figures taken minutes apart compare two states of a machine. So every
contender has a process, and for every case the parent calls all of them in turns, a few calls per visit, beginning with another one in
each round. `serve` answers in the child. Variables that pin OpenBLAS's kernels are removed for all contenders.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.pages import ROOT

# Idle thread pools of the contender before spin for a while: nobody is timed beside them.
PAUSE_SECS = 0.15
Answer = Callable[[str], tuple[Callable[..., Any], ...]]


def serve(answer: Answer) -> None:
    """Answer lines of JSON `{"case", "repeats"}` with `{"secs", "head"}` until the input ends.

    answer: for a case, a function that runs it once to the end, and one that gives a few numbers of its result; where runs change a
    state, also one that restores it, called before a visit's runs and before the numbers."""
    made: dict[str, tuple[Callable[..., Any], ...]] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        case = asked["case"]
        try:
            if case not in made:
                made[case] = answer(case)
            run, head, *restores = made[case]
            for restore in restores:
                restore()
            run()  # warm: caches hold what the call before it left
            samples = []
            for _ in range(asked["repeats"]):
                start = time.perf_counter()
                run()
                samples.append(time.perf_counter() - start)
            for restore in restores:
                restore()
            print(json.dumps({"secs": samples, "head": [float(x) for x in head()]}), flush=True)
        except Exception as error:  # a contender that cannot do a case says so and goes on
            print(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}), flush=True)


class Contender:
    """The process of a contender.

    cases: those that it can run, None for all; rounds: number of rounds in which it takes part, None for all; log: a file for its standard
    error.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        cases: Sequence[str] | None = None,
        rounds: int | None = None,
        log: Path | None = None,
    ) -> None:
        self.name, self.cases, self.rounds = name, cases, rounds
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
        # Commands name their script as a module (`-m experiments.kernels.peer_kernels`), whatever the working folder is.
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(os.devnull if log is None else log, "w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        while (line := self._line()) != "ready":
            if not line and self.process.poll() is not None:
                raise SystemExit(f"contender {name} did not start: {' '.join(command)}")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def takes(self, case: str, round_: int = 0) -> bool:
        return (self.cases is None or case in self.cases) and (self.rounds is None or round_ < self.rounds)

    def time(self, case: str, repeats: int, limit_secs: float | None = None) -> dict[str, Any]:
        """`secs` and `head` of a case, or `error`. A contender that has not answered after `limit_secs` is stopped."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"case": case, "repeats": repeats}) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], limit_secs)[0]:
            self.process.kill()
            return {"error": f"no answer after {limit_secs:g} s"}
        line = self._line()
        if not line:
            raise SystemExit(f"contender {self.name} died at {case}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


Visits = dict[str, dict[str, list[list[float]]]]
"""Seconds by case and contender: what was sampled at each visit."""


def in_rounds(
    contenders: Sequence[Contender], cases: Sequence[str], rounds: int, repeats: int, tolerance: float = 1e-3
) -> dict[str, dict[str, list[float]]]:
    """The samples of `visits`, by case and contender."""
    found = visits(contenders, cases, rounds, repeats, tolerance)
    return {case: {name: [s for v in own for s in v] for name, own in by.items()} for case, by in found.items()}


def visits(
    contenders: Sequence[Contender],
    cases: Sequence[str],
    rounds: int,
    repeats: int,
    tolerance: float = 1e-3,
    visit_secs: float | None = None,
) -> Visits:
    """Return the samples of every round. A contender whose numbers differ from the first contender's is not timed and has no visits.

    tolerance: relative to the largest of the first contender's numbers. visit_secs: limit of a visit, by the time of the previous one; at
    least one call is made.
    """
    samples: Visits = {case: {} for case in cases}
    wanted: dict[str, list[float]] = {}
    for round_ in range(rounds):
        for case in cases:
            turn = round_ % len(contenders)
            for c in (*contenders[turn:], *contenders[:turn]) if round_ else contenders:
                known = samples[case].get(c.name)
                if not c.takes(case, round_) or (round_ and not known):
                    continue
                count = repeats
                if visit_secs is not None:
                    count = min(repeats, max(1, int(visit_secs / min(known[-1])))) if known else 1
                time.sleep(PAUSE_SECS)
                found = c.time(case, count)
                if "error" in found:
                    print(f"{c.name} {case}: {found['error']}", file=sys.stderr)
                    samples[case][c.name] = []
                    continue
                first = wanted.setdefault(case, found["head"])
                scale = max((abs(x) for x in first), default=1.0) or 1.0
                if (
                    max((abs(x - y) for x, y in zip(first, found["head"], strict=True)), default=0.0)
                    > tolerance * scale
                ):
                    print(f"{c.name} {case}: expected {first}, got {found['head']}", file=sys.stderr)
                    samples[case][c.name] = []
                    continue
                samples[case].setdefault(c.name, []).append(found["secs"])
    return samples


def summary(samples: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Median and least microseconds by case and contender."""
    return {
        case: {
            name: {"median_us": statistics.median(s) * 1e6, "least_us": min(s) * 1e6, "samples": len(s)}
            for name, s in by.items()
            if s
        }
        for case, by in samples.items()
    }
