"""How the time of a call divides: iterations of kernels, loops that wait for threads, and the host's code; in two commits, in turns.

    python -m experiments.end_to_end.call_costs --work FOLDER --before 063e108b [--pairs 5]

Untuned builds for target `c`: all-MiniLM-L6-v2 by `run` and by `bind`, and a Llama-style decoder by the steps of a session and by
`rt.generate`. `outside` is the time of a call without the launches of kernels, the median of a process and then of all processes; each
process measures all cases. The same for a session with launches that only read memory: other processes then disturb the figures less. A
library in front of the team's `run` counts the parallel loops in processes of their own: `lost` is the time of loops beyond that of their
iterations divided by the threads. Loops without work tell what loops cost by themselves, and a barrier of two spinning threads what one
parallel region for all kernels would need between two of them. Writes results/call_costs.md and .json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.decoder_folder import write_folder
from experiments.harness.e2e_cases import SMALL, inputs, minilm_folder
from experiments.harness.pages import ROOT, environment, write_page

SELF = "experiments.end_to_end.call_costs"
TOKENS, PAST, CALLS, WARM = (8, 32, 128), 16, 60, 20
READ_BYTES = 40 << 20
KINDS = ("timed", "host")
# Runs loops as the team does, and adds up their number, the nanoseconds of loops, of the caller's chunks and of the others'.
COUNTING = """#include <stdint.h>
#include <pthread.h>
#include <time.h>
typedef void team_part(const void *, int64_t, int64_t);
struct counted { team_part *part; const void *data; };
static void (*team_run)(team_part *, const void *, int64_t, int);
static _Thread_local int is_caller;
int64_t counts[4];
static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}
static void counted_part(const void *given, int64_t from, int64_t to) {
  const struct counted *c = given;
  const int64_t began = now();
  c->part(c->data, from, to);
  __atomic_add_fetch(&counts[is_caller ? 2 : 3], now() - began, __ATOMIC_RELAXED);
}
void relax_tune_team_run(team_part *part, const void *data, int64_t count, int how) {
  const struct counted c = {part, data};
  const int64_t began = now();
  is_caller = 1;
  team_run(counted_part, &c, count, how);
  counts[0]++, counts[1] += now() - began;
}
static void nothing(const void *data, int64_t from, int64_t to) { (void)data, (void)from, (void)to; }
static _Alignas(64) int64_t here, there; /* words of the two threads of a barrier */
static void *meet(void *loops) {
  for (int64_t n = 1; n <= *(int64_t *)loops; n++) {
    __atomic_store_n(&there, n, __ATOMIC_RELEASE);
    while (__atomic_load_n(&here, __ATOMIC_ACQUIRE) < n) {}
  }
  return 0;
}
void counting_barrier(int64_t *nanoseconds, int64_t loops) {
  pthread_t other;
  here = there = 0;
  pthread_create(&other, 0, meet, &loops);
  for (int64_t n = 1; n <= loops; n++) {
    const int64_t began = now();
    __atomic_store_n(&here, n, __ATOMIC_RELEASE);
    while (__atomic_load_n(&there, __ATOMIC_ACQUIRE) < n) {}
    nanoseconds[n - 1] = now() - began;
  }
  pthread_join(other, 0);
}
void counting_use(void *run) { team_run = (void (*)(team_part *, const void *, int64_t, int))run; }
void counting_empty(int64_t *nanoseconds, int64_t loops, int64_t count) {
  for (int64_t n = 0; n < loops; n++) {
    const int64_t began = now();
    team_run(nothing, 0, count, 0);
    nanoseconds[n] = now() - began;
  }
}
"""


def prepare(work: Path) -> None:
    """Build the artifacts that are not there yet."""
    import relax_tune as rt

    work.mkdir(parents=True, exist_ok=True)
    models = {
        "minilm": (minilm_folder, {"b": (1, 8), "n": (1, 512)}),
        "decoder": (lambda: write_folder(work / "llama", SMALL, 600), {"b": (1, 8), "n": (1, 64), "m": (0, 512)}),
    }
    for name, (folder, bounds) in models.items():
        if not (work / f"{name}.rta").exists():
            rt.build(folder(), target="c", bounds=bounds, db="memory://").save(str(work / f"{name}.rta"))


def cases(work: Path) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return for each case a function that makes its call."""
    import relax_tune as rt
    from relax_tune.runtime.artifact import load_artifact

    encoder, decoder = (load_artifact(work / f"{name}.rta").open("c") for name in ("minilm", "decoder"))
    _, *caches = inputs("decode", PAST, SMALL)
    token, prompt = np.array([[7]]), np.arange(PAST)[None]

    def encode(tokens: int, bound: bool) -> Callable[[], object]:
        ids = np.random.default_rng(0).integers(1000, 30000, (1, tokens))
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        arrays = [given[spec.name] for spec in encoder.inputs]
        return encoder.bind(arrays).run if bound else lambda: encoder.run(arrays)

    def step() -> Callable[[], object]:
        session = decoder.session(caches, "decode")
        return lambda: session.run([token])

    def generate() -> Callable[[], object]:
        steps = rt.generate_steps(decoder, prompt, max_new_tokens=CALLS + WARM + 1)
        return lambda: next(steps)

    by_name: dict[str, Callable[[], Callable[[], object]]] = {"decoder, a step of a session": step}
    by_name["decoder, a token of generate_steps"] = generate
    for tokens in TOKENS:
        by_name[f"minilm, {tokens} tokens, run"] = lambda n=tokens: encode(n, False)
        by_name[f"minilm, {tokens} tokens, bind"] = lambda n=tokens: encode(n, True)
    return by_name


def counting() -> ctypes.CDLL:
    """Compile the library that counts loops, and load it in front of the team."""
    with tempfile.TemporaryDirectory() as name:
        source, library = Path(name, "counting.c"), Path(name, "counting.so")
        source.write_text(COUNTING)
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def time_calls(call: Callable[[], object], launching: list[float]) -> dict[str, float]:
    """Return times of calls in microseconds; `launching` adds up the seconds of launches."""
    for _ in range(WARM):
        call()
    whole, launches = [], []
    for _ in range(CALLS):
        before, began = launching[0], time.perf_counter()
        call()
        whole.append((time.perf_counter() - began) * 1e6)
        launches.append((launching[0] - before) * 1e6)
    outside = [a - b for a, b in zip(whole, launches)]
    low, middle, _ = statistics.quantiles(outside, n=4)
    row = {"call": statistics.median(whole), "outside": middle, "outside low": low}
    return row | {"mean": statistics.fmean(whole), "launches": statistics.fmean(launches)}


def measure(work: Path, kind: str) -> dict[str, dict[str, float]]:
    """Measure cases in this process.

    kind: `timed`; `counted`, with the loops of each call; `host`, with launches that only read some memory
    """
    library = counting() if kind == "counted" else None
    from relax_tune.runtime.bound_program import Launches
    from relax_tune.runtime.device.c import CDevice

    launching, enqueue, memory = [0.0], Launches.enqueue, np.zeros(READ_BYTES // 8)

    def timed(launches: Launches) -> None:
        began = time.perf_counter()
        if kind == "host":
            memory.sum()
        else:
            enqueue(launches)
        launching[0] += time.perf_counter() - began

    Launches.enqueue = timed  # type: ignore[method-assign]
    chosen = {name: case for name, case in cases(work).items() if kind != "host" or "session" in name}
    if library is None:
        return {name: time_calls(case(), launching) for name, case in chosen.items()}
    library.counting_use(ctypes.cast(CDevice._team.relax_tune_team_run, ctypes.c_void_p))
    counts, times, rows = (ctypes.c_int64 * 4).in_dll(library, "counts"), (ctypes.c_int64 * 20000)(), {}
    for name, case in chosen.items():
        call = case()
        counts[:] = [0] * 4
        rows[name] = time_calls(call, launching)
        loops, inside, caller, others = (number / (WARM + CALLS) for number in counts)
        rows[name] |= {"loops": loops, "inside": inside / 1e3, "caller": caller / 1e3, "others": others / 1e3}
    library.counting_empty(times, ctypes.c_int64(len(times)), ctypes.c_int64(64))
    empty = {"call": statistics.median(times) / 1e3, "mean": statistics.fmean(times) / 1e3}
    library.counting_barrier(times, ctypes.c_int64(len(times)))
    rows["empty loop"] = empty | {"threads": CDevice._taking_part, "barrier": statistics.median(times) / 1e3}
    return rows


def run(tree: Path, work: Path, kind: str) -> dict[str, dict[str, float]]:
    """Measure all cases in a process with the package of a checkout."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(ROOT)])}
    command = [sys.executable, "-m", SELF, "--work", str(work), "--child", kind]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tree}: {done.stderr[-3000:]}")
    rows: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def middle(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the medians over processes."""
    return {c: {k: statistics.median(r[c][k] for r in runs) for k in by} for c, by in runs[0].items()}


def page(before: str, pairs: int, by: Mapping[str, Any]) -> list[str]:
    old, new, counted = by["before timed"], by["after timed"], dict(by["counted"])
    lines = [
        "# What a call costs beside its kernels",
        "",
        f"`python -m {SELF} --before {before} --pairs {pairs}`: microseconds, medians of {CALLS} calls in a process, then over {pairs} "
        "processes of each commit.",
        "",
        "| case | call before | after | outside of launches before | after |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {c} | {old[c]['call']:.0f} | {new[c]['call']:.0f} | {old[c]['outside']:.1f} | {new[c]['outside']:.1f} |"
        for c in old
    ]
    old, new = by["before host"], by["after host"]
    lines += [
        "",
        f"The host's part by itself: launches only read {READ_BYTES >> 20} MB, as a step reads weights. Outside of launches, median "
        "(lower quartile):",
        "",
        "| case | before | after |",
        "|---|---|---|",
    ]
    cell = "{outside:.1f} ({outside low:.1f})"
    lines += [f"| {c} | {cell.format(**old[c])} | {cell.format(**new[c])} |" for c in old]
    empty = counted.pop("empty loop")
    threads = empty["threads"]
    lines += [
        "",
        f"Parallel loops, {threads:.0f} threads; means of {CALLS} calls, after. A loop of 64 iterations without work takes "
        f"{empty['call']:.2f} us (median; mean {empty['mean']:.2f}); a barrier of two spinning threads takes {empty['barrier']:.2f} us. "
        "`lost` is the time of loops beyond that of their iterations divided by the threads: begin, uneven ends, late threads. `serial` is "
        "the time of launches outside of loops. `one region` is the share of a call that its loops would save if each took a barrier "
        "instead of a loop without work.",
        "",
        "| case | call | launches | loops | in loops | lost | serial | one region |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c, x in counted.items():
        lost, serial = x["inside"] - (x["caller"] + x["others"]) / threads, x["launches"] - x["inside"]
        share = x["loops"] * max(0.0, empty["call"] - empty["barrier"]) / x["mean"]
        lines.append(
            f"| {c} | {x['mean']:.0f} | {x['launches']:.0f} | {x['loops']:.0f} | {x['inside']:.0f} | {lost:.0f} | {serial:.0f} | "
            f"{100 * share:.1f} % |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--before", help="the earlier commit")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--child", choices=("timed", "counted", "host"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.work, given.child)))
        return
    prepare(given.work)
    if given.before is None:
        return
    facts = environment()
    with tempfile.TemporaryDirectory(prefix="relax-tune-before-") as name:
        packed = subprocess.run(["git", "archive", given.before], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", name], input=packed, check=True)
        trees = {"before": Path(name), "after": ROOT}
        runs: dict[str, list[dict[str, dict[str, float]]]] = {f"{tree} {kind}": [] for tree in trees for kind in KINDS}
        for path in trees.values():  # fills the cache of kernels
            run(path, given.work, "host")
        for n in range(given.pairs):
            for kind in KINDS:
                for tree in list(trees) if n % 2 else list(trees)[::-1]:
                    runs[f"{tree} {kind}"].append(run(trees[tree], given.work, kind))
        by = {name: middle(own) for name, own in runs.items()}
        by["counted"] = middle([run(ROOT, given.work, "counted") for _ in range(3)])
    record = {"before": given.before, "runs": runs, "counted": by["counted"], "environment": facts}
    write_page("call_costs", page(given.before, given.pairs, by), json.loads(json.dumps(record)), facts)


if __name__ == "__main__":
    main()
