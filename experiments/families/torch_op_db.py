"""torch's operator samples through torch.export, the importer, the passes, generated C and the C device.

    python -m experiments.families.torch_op_db                       (some samples, writes experiments/results/torch_op_db.{json,md})
    python -m experiments.families.torch_op_db --only 'amax|sort.*'  (some operators, printed)
    python -m experiments.families.torch_op_db --all                 (every sample: hours)

The samples are those of `torch.testing._internal.common_methods_invocations.op_db`, with which torch tests its operators. The tensors
of a sample become inputs of a module; its other arguments are constants. The module is exported with every dim larger than 1 dynamic
where torch.export allows it, built with the generic schedule, called, and compared with torch. Some samples of each operator are
taken, evenly spread, fewer in types other than float32. Every third is called on `-(-(x + 0))` and every third is followed by `abs`,
so that the operator is fused; complex results are compared as pairs of real numbers. Pointwise operators, extremes, sorts and
reductions are called again with NaN, infinities and -0 in their inputs.

A result is right within the tolerances of `torch.testing.assert_close`, or if the largest error against torch in float64 is at most
four times that of torch; where torch overflowed, its result in float64 counts. `refused` is an error of the importer, which names
what it does not support. `not exported` is an error of torch.export. `not judged` is a sample that torch itself cannot run, that is
random, or that has no tensor. The samples of an operator form one program, and one program each if not all of them are right.
Batches run in child processes, so that a crash costs one sample. The exit status is 1 if a result is wrong, a child crashed or an
error was not a refusal.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.families.op_db_compare import UNSTABLE, differs, stable
from experiments.families.op_db_samples import (
    TYPES,
    Prepared,
    cases,
    eager,
    first_line,
    module_of,
    operators,
    prepared,
    special,
    takes_special,
)
from experiments.harness.pages import environment, write_page

LETTERS = {
    "right": ".", "refused": "r", "not exported": "x", "not judged": "-", "wrong": "W", "failed": "F", "crashed": "C",
}  # fmt: skip
BAD = ("wrong", "failed", "crashed")
BATCH = 36
SECS = 120  # of one sample
UNKNOWN = "supported operators, got one that is not"
"""The end of the importer's message about an operator that it does not know."""


def export(module: Any, tensors: Sequence[Any]) -> tuple[Any, str]:
    """(program, why its dims are not dynamic)."""
    import torch

    def dynamic(t: Any) -> dict[int, Any]:
        return {axis: torch.export.Dim.AUTO for axis, size in enumerate(t.shape) if size > 1}

    try:
        return torch.export.export(module, tuple(tensors), dynamic_shapes=(tuple(map(dynamic, tensors)),)), ""
    except Exception as error:  # torch's own
        why = first_line(error)
    return torch.export.export(module, tuple(tensors)), why


def compiled(plain: Any, device: Any) -> Any:
    """Build a program, given as plain data, with the generic schedule; return the open model."""
    from relax_tune.database.memory_store import MemoryStore
    from relax_tune.ir.frontend.torch.importer import import_program
    from relax_tune.tuner.job.device_job import device_job
    from relax_tune.tuner.settings import Settings
    from relax_tune.tuner.task.allowed_sizes import Range

    module = import_program(plain)
    spots = {b.var.name: Range(max(2, b.lower or 0), max(2, b.lower or 0)) for b in module.bounds}
    job = device_job(module, device.info, MemoryStore(), Settings(target="c"))
    vars(job)["tasks"] = job.extract(spots)
    return job.artifact(job.build("generic")).open(device)


def status_of(error: Exception) -> str:
    """Return the status of a sample that ends with an error of this package: importers refuse programs by a ParseError."""
    from relax_tune.errors import ParseError

    return "refused" if isinstance(error, ParseError) else "failed"


def attempt(samples: Sequence[Prepared], device: Any) -> dict[str, Any]:
    """Return the report of samples in one program; `missing` holds the unsupported operator of each sample."""
    from relax_tune.errors import RelaxTuneError
    from relax_tune.ir.frontend.torch.export import plain_program

    try:
        program, fixed = export(module_of(samples), [t for s in samples for t in s.tensors])
    except Exception as error:  # torch's own
        return {"status": "not exported", "why": first_line(error)}
    report: dict[str, Any] = {"fixed": fixed} if fixed else {}
    plain = None
    try:
        plain = plain_program(program)
        model = compiled(plain, device)
    except RelaxTuneError as error:
        text = f"{type(error).__name__}: {error}"
        missing = unsupported(samples, plain) if plain is not None and UNKNOWN in text and len(samples) > 1 else {}
        return report | {"status": status_of(error), "why": text[:600], "missing": missing}
    try:
        return report | judged(samples, model)
    finally:
        model.close()


def judged(samples: Sequence[Prepared], model: Any) -> dict[str, Any]:
    """The report of the calls of a program."""
    calls = [("", [s.tensors for s in samples], [s.wanted for s in samples])]
    if takes_special(samples[0].case.op) and any(
        t.is_floating_point() and t.numel() for s in samples for t in s.tensors
    ):
        given, wanted = [], []
        for s in samples:
            beside = special(s.tensors)
            try:
                results = eager(s.call, beside)
            except Exception:  # torch refuses the values
                beside, results = list(s.tensors), list(s.wanted)
            given.append(beside)
            wanted.append(results)
        calls.append(("beside NaN: ", given, wanted))
    for where, given, wanted in calls:
        found = list(model.run([t.contiguous().numpy() for tensors in given for t in tensors]))
        for s, tensors, results in zip(samples, given, wanted):
            own, found = found[: len(results)], found[len(results) :]
            ties = bool(where) or s.case.dtype != "float32"  # equal elements are in any order
            if ties and UNSTABLE.fullmatch(s.case.op.name):
                own, results = own[:1], stable(s, tensors) if s.case.op.name == "argsort" else results[:1]

            def exact(s: Prepared = s, tensors: Sequence[Any] = tensors) -> Sequence[Any]:
                return eager(s.call, [t.double() if t.is_floating_point() else t for t in tensors])

            why = differs(own, results, exact)
            if why:
                return {"status": "wrong", "why": where + why}
    return {"status": "right"}


def serve(start: int, stop: int, done: int, alone: bool, args: argparse.Namespace) -> None:
    """Run the operators start .. stop-1 except the first `done` samples, and print JSON lines.

    alone: do not run the samples of the first operator as one program
    """
    import logging

    import torch
    import torch._export.utils as export_utils
    import torch.export.exported_program as exported_program

    from relax_tune.runtime.device.registry import open_device

    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # the same at every export, and a third of its time
    once = functools.cache(export_utils._collect_all_valid_cia_ops)
    export_utils._collect_all_valid_cia_ops = exported_program._collect_all_valid_cia_ops = lambda: set(once())
    device = open_device("c")
    index = 0
    for op in operators(args.only)[start:stop]:
        found = list(cases(op, args.samples, args.types))
        if index + len(found) <= done:
            index += len(found)
            continue
        ready = [(prepared(case) if index + k >= done else {}) for k, case in enumerate(found)]
        together = [r for r in ready if isinstance(r, Prepared)]
        known: dict[Prepared, dict[str, Any]] = {}
        if len(together) > 1 and not alone:
            print(json.dumps({"begin": max(index, done), "op": op.full_name}), flush=True)
            known = settled(together, device)
            print(json.dumps({"together": len(known)}), flush=True)
        alone = False
        for case, r in zip(found, ready):
            if index >= done:
                begun = {"begin": index, "op": op.full_name, "case": case.name, "dtype": case.dtype}
                print(json.dumps(begun), flush=True)
                report = r if isinstance(r, dict) else known[r] if r in known else guarded([r], device)
                report = {k: v for k, v in report.items() if k != "missing"}
                print(json.dumps(report), flush=True)
            index += 1
    device.close()


def settled(samples: Sequence[Prepared], device: Any) -> dict[Prepared, dict[str, Any]]:
    """The reports that one program of all samples tells: all are right, or some need operators that are not supported."""
    report = guarded(samples, device)
    if report["status"] == "right":
        return dict.fromkeys(samples, report)
    known = {
        s: {"status": "refused", "why": f"node '', operator {m} of (): expected one of the {UNKNOWN}"}
        for s, m in report.get("missing", {}).items()
        if m
    }
    rest = [s for s in samples if s not in known]
    return known | (settled(rest, device) if known and len(rest) > 1 else {})


def unsupported(samples: Sequence[Prepared], plain: Any) -> dict[Prepared, str]:
    """The first operator that is not supported among those that the results of each sample need, or none."""
    from relax_tune.ir.frontend.torch.importer import SUPPORTED
    from relax_tune.ir.frontend.torch.program import Ref

    calls = {c.name: c for c in plain.nodes}
    outputs = [value for _, value in plain.outputs]
    found = {}
    for s in samples:
        own, outputs = outputs[: s.leaves], outputs[s.leaves :]
        stack, seen = list(own), set[str]()
        while stack:
            value = stack.pop()
            if isinstance(value, list):
                stack += value
            elif isinstance(value, Ref) and value.name in calls and value.name not in seen:
                seen.add(value.name)
                stack += [*calls[value.name].args, *calls[value.name].kwargs.values()]
        names = [c.op for c in plain.nodes if c.name in seen and c.op not in SUPPORTED]
        found[s] = names[0] if names else ""
    return found


def guarded(samples: Sequence[Prepared], device: Any) -> dict[str, Any]:
    """The report of samples; after `SECS` the process ends."""
    signal.alarm(SECS)
    try:
        return attempt(samples, device)
    except Exception as error:
        return {"status": "failed", "why": f"{type(error).__name__}: {error}"[:600]}
    finally:
        signal.alarm(0)


def run_batch(start: int, stop: int, args: argparse.Namespace, cache: str) -> Iterator[dict[str, Any]]:
    """The reports of a batch; a child that dies costs its sample, and another takes over behind it."""
    done, alone = 0, 0
    while True:
        serve = ["--serve", *map(str, (start, stop, done, alone)), "--samples", str(args.samples), "--only", args.only]
        serve += ["--types", *args.types]
        variables = {**os.environ, "RELAX_TUNE_CACHE": cache, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            [sys.executable, "-m", "experiments.families.torch_op_db", *serve],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables,
        )
        assert child.stdout is not None
        begun: dict[str, Any] | None = None
        for line in child.stdout:
            if not line.startswith("{"):
                continue
            message = json.loads(line)
            if "begin" in message:
                begun = message
            elif begun is not None:
                if "together" not in message:
                    yield begun | message
                    done = begun["begin"] + 1
                begun = None
        code = child.wait()
        if begun is None:
            if code:
                raise SystemExit(f"expected operators {start}:{stop} to run, got exit status {code}: {' '.join(serve)}")
            return
        done, alone = begun["begin"], 1
        if "case" in begun:
            yield begun | {"status": "crashed", "why": f"exit status {code}" + (f" ({SECS} s)" if code == -14 else "")}
            done += 1


def facts() -> dict[str, str]:
    compiler = subprocess.run(["gcc", "--version"], capture_output=True, text=True).stdout.splitlines()[:1]
    return {
        **environment(), "torch": version("torch"), "numpy": version("numpy"), "compiler": compiler[0] if compiler else "",
    }  # fmt: skip


def reason(why: str) -> str:
    """The kind of a refusal: its aten operator, or its text without names of nodes."""
    found = re.search(r"operator (\S+) of \(.*?\): (expected [^;]*)", why)
    if found:
        unknown = "supported operators" in found[2]
        return found[1] if unknown else f"{found[1]}: {found[2]}"
    return re.sub(r"'[^']*'", "_", why)[:160]


def compact(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By operator and type one letter a sample, and the text of each that is not right."""
    table: dict[str, dict[str, str]] = defaultdict(dict)
    kinds: dict[str, list[str]] = defaultdict(list)
    for r in reports:
        row = table[r["op"]]
        row[r["dtype"]] = row.get(r["dtype"], "") + LETTERS[r["status"]]
        if r["status"] in ("refused", "not exported"):
            kinds[f"{r['status']}: {reason(r.get('why', ''))}"].append(r["case"])
    bad = {r["case"]: f"{r['status']}: {r.get('why', '')}" for r in reports if r["status"] in BAD}
    return {"letters": LETTERS, "samples": table, "bad": bad, "kinds": {k: len(v) for k, v in sorted(kinds.items())}}


def summary(reports: Sequence[dict[str, Any]], samples: int, measured: str) -> str:
    """The Markdown page."""
    paragraphs = __doc__.split("\n\n")
    lines = ["# torch's operator samples through compiled C", ""]
    lines += [p.replace("\n", " ").split(" The exit status")[0] + "\n" for p in paragraphs[2:]]
    lines += [
        f"* samples of each operator in float32: {samples or 'all'}; in each other type: {-(-samples // 3) or 'all'}",
        "",
    ]
    lines += [f"Operators with samples that ran: {len({r['op'] for r in reports})} of {len(operators(''))}.", ""]
    lines += [measured, ""] if measured else []
    lines += ["| type | " + " | ".join(LETTERS) + " |", "|---|" + "---:|" * len(LETTERS)]
    for dtype in (*TYPES, "all"):
        c = Counter(r["status"] for r in reports if dtype in (r["dtype"], "all"))
        lines.append(f"| {dtype} | " + " | ".join(str(c[s]) for s in LETTERS) + " |")
    fixed = sum(r["status"] == "right" and "fixed" in r for r in reports)
    lines += ["", f"Of the right ones, {fixed} have fixed dims, because torch.export refuses dynamic ones."]
    for status in BAD:
        listed = [r for r in reports if r["status"] == status]
        if listed:
            lines += ["", f"## {status.capitalize()}", ""]
            lines += [f"* `{r['case']}`: {r.get('why', '')[:200]}" for r in listed]
    by = Counter(reason(r.get("why", "")) for r in reports if r["status"] == "refused")
    lines += ["", "## Refused", "", "By the aten operator, or by what was expected of it; samples of all types.", ""]
    lines += [f"* {k} ({n})" for k, n in sorted(by.items(), key=lambda x: (-x[1], x[0]))]
    ops: dict[str, set[str]] = defaultdict(set)
    for r in reports:
        ops[r["op"]].add(r["status"])
    whole = sorted(o for o, s in ops.items() if "right" in s and s <= {"right", "not exported", "not judged"})
    part = sorted(o for o, s in ops.items() if "right" in s and o not in whole)
    lines += ["", f"## Right in every sample that was judged ({len(whole)} operators)", "", ", ".join(whole)]
    lines += ["", f"## Right in some ({len(part)} operators)", "", ", ".join(part), ""]
    return "\n".join(lines)


def write(reports: Sequence[dict[str, Any]], samples: int, env: Mapping[str, str], measured: str = "") -> None:
    """Write the two files of results."""
    page = summary(reports, samples, measured).splitlines()
    write_page("torch_op_db", page, {"environment": env, **compact(reports)}, env, indent=0, quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression for whole names of operators")
    parser.add_argument(
        "--samples", type=int, default=3, help="samples of each operator in float32; a third in other types"
    )
    parser.add_argument("--all", action="store_true", help="every sample")
    parser.add_argument("--jobs", type=int, default=2, help="batches at a time")
    parser.add_argument("--log", default="", help="a file for one JSON line a sample")
    parser.add_argument(
        "--pages", nargs="*", default=[], help="logs of a run in parts: only write their results; later ones count"
    )
    parser.add_argument("--skip", type=int, default=0, help="begin behind this many operators")
    parser.add_argument("--serve", nargs=4, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measured", default="", help="what the pages say of when their parts were measured")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES, help="element types")
    args = parser.parse_args()
    args.samples = 0 if args.all else args.samples
    if args.serve:
        serve(*args.serve, args)
        return
    if args.pages:
        found = {
            (r["op"], r["case"]): r for log in args.pages for r in map(json.loads, Path(log).read_text().splitlines())
        }
        write(list(found.values()), args.samples, facts(), args.measured)
        return
    complete = not (args.only or args.skip or args.types != TYPES)
    env = facts() if complete else {}
    total, started = len(operators(args.only)), time.monotonic()
    reports: list[dict[str, Any]] = []
    batches = [(start, min(start + BATCH, total)) for start in range(args.skip, total, BATCH)]

    def run(batch: tuple[int, int]) -> list[dict[str, Any]]:
        reports = []
        for report in run_batch(*batch, args, cache):
            reports.append(report)
            if args.log:
                with open(args.log, "a") as log:
                    log.write(json.dumps(report) + "\n")
        return reports

    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(args.jobs) as pool:
        for batch, found in zip(batches, pool.map(run, batches)):
            reports += found
            for r in found:
                if args.only or r["status"] in BAD:
                    print(r["status"], r["case"], r.get("why", ""), flush=True)
            print(f"{batch[1]}/{total}: {dict(Counter(r['status'] for r in reports))}", flush=True)
    print(f"{time.monotonic() - started:.0f} s")
    if complete:
        write(reports, args.samples, env)
    sys.exit(1 if any(r["status"] in BAD for r in reports) else 0)


if __name__ == "__main__":
    main()
