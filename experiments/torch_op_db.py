"""torch's own operator samples through torch.export, the importer, the passes, generated C and the C device.

    python experiments/torch_op_db.py                       (some samples, writes experiments/results/torch_op_db.{json,md})
    python experiments/torch_op_db.py --only 'amax|sort.*'  (some operators, printed)
    python experiments/torch_op_db.py --all                 (every sample: hours)

The samples are those of `torch.testing._internal.common_methods_invocations.op_db`, which torch tests its operators with. A
sample's tensors become inputs of a module, its other arguments stay fixed. The module is exported with every dim beyond 1
dynamic where torch.export allows it, built with the generic schedule, called, and judged against torch. Of each operator some
samples are taken, spread evenly, fewer in types other than float32. Every third is called on `-(-(x + 0))`, every third is
followed by `abs`, so that the operator is fused; of complex results the parts are taken. Pointwise operators, extremes, sorts
and reductions are called again with NaN, infinities and -0 in their inputs.

A result is right within the tolerances of `torch.testing.assert_close`, or where its error against torch in float64 is at most
four times the error of torch, in the largest element; where torch overflowed, its result in float64 counts. `refused` is an
error of ours that names operator, node, what was wanted and found. `not exported` is an error of torch.export. `not judged` is
a sample that torch itself cannot run, is random or has no tensor. The samples of an operator are one program, and each is one
of its own where not all of them are right. Batches run in child processes, so that a crash is one sample's. Exit status 1 when
a result is wrong, a child crashed or an error was not ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
TYPES = ("float32", "float16", "int64", "int32", "bool")
LETTERS = {
    "right": ".", "refused": "r", "not exported": "x", "not judged": "-", "wrong": "W", "failed": "F", "crashed": "C",
}  # fmt: skip
BAD = ("wrong", "failed", "crashed")
BATCH = 36
SECS = 120  # of one sample
# Results of no defined value.
UNDEFINED = re.compile(r"(new_)?empty.*|geqrf|.*dropout.*|rand.*|normal.*|multinomial|uniform.*|bernoulli.*|cauchy|exponential|"
                       r"geometric|log_normal|nn\.functional\.rrelu")  # fmt: skip
# Operators that are called with NaN, infinities and -0, beside the pointwise ones and the reductions.
EXTREME = re.compile(r"(arg)?sort|msort|topk|kthvalue|(nan)?median|mode|clamp.*|where|cum.*|logcumsumexp|logsumexp|"
                     r"(log_)?softmax.*|.*(relu|elu|gelu|silu|tanh|sigmoid|softplus|softsign|hardswish|mish|shrink|threshold).*|"
                     r"nn\.functional\.(max|avg|adaptive).*pool.*|isin|unique.*|nan_to_num|fmax|fmin|lerp|addcmul|addcdiv|"
                     r"masked\..*|max_.*|min_.*|aminmax|trapezoid|diff")  # fmt: skip

UNKNOWN = "supported operators, found one that is not"
# Operators whose indices torch leaves open among equal elements.
UNSTABLE = re.compile("(arg)?sort|msort|topk|kthvalue|(nan)?median|mode|unique.*")


@dataclass(frozen=True)
class Case:
    """One sample of an operator.

    form: 0 the operator alone, 1 on `-(-(x + 0))`, 2 followed by `abs`
    """

    op: Any
    dtype: str
    number: int
    form: int
    sample: Any

    @property
    def name(self) -> str:
        return f"{self.op.full_name} {self.dtype} {self.number}{('', ' negated', ' abs')[self.form]}"


def operators(only: str) -> list[Any]:
    """The operators of the suite, in its order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if not only or re.fullmatch(only, op.full_name)]


def cases(op: Any, samples: int, types: Sequence[str] = TYPES) -> Iterator[Case]:
    """Some samples of an operator in float32 and a third of them in each other type, spread evenly; 0: all."""
    import torch

    for turn, dtype in enumerate(TYPES):
        if dtype not in types or not op.supports_dtype(getattr(torch, dtype), "cpu"):
            continue
        torch.manual_seed(0)
        np.random.seed(0)
        try:
            found = list(op.sample_inputs("cpu", getattr(torch, dtype), requires_grad=False))
        except Exception:  # some samples need packages or devices
            continue
        count = min(-(-samples // 3) if turn else samples, len(found)) if samples else len(found)
        first = turn / len(TYPES) * len(found) / max(count, 1) if samples else 0.0  # other types begin elsewhere
        for k, number in enumerate(sorted({int(first + p * len(found) / count) for p in range(count)})):
            yield Case(op, dtype, number, (k + turn) % 3, found[number])


@dataclass(frozen=True, eq=False)
class Prepared:
    """A sample that torch runs.

    call: the sample as a function of its tensors
    wanted: results of torch, flat
    leaves: their number with None
    """

    case: Case
    call: Callable[..., Any]
    tensors: Sequence[Any]
    wanted: Sequence[Any]
    leaves: int


def prepared(case: Case) -> Prepared | dict[str, Any]:
    """The sample as a function of its tensors, or the report that it is not judged."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

    leaves, spec = tree_flatten((case.sample.input, case.sample.args, case.sample.kwargs))
    places = [p for p, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def before(x: Any) -> Any:
        return ~~x if x.dtype is torch.bool else (x + 0).neg().neg()

    def after(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return ~x if x.dtype is torch.bool else x.abs()

    def real(x: Any) -> Any:
        return torch.view_as_real(x.resolve_conj()) if isinstance(x, torch.Tensor) and x.is_complex() else x

    def call(*tensors: Any) -> Any:
        given = list(leaves)
        for p, tensor in zip(places, tensors, strict=True):
            given[p] = before(tensor) if case.form == 1 else tensor
        x, args, kwargs = tree_unflatten(given, spec)
        found = case.op.op(x, *args, **kwargs)
        return tree_map(real, tree_map(after, found) if case.form == 2 else found)

    if UNDEFINED.fullmatch(case.op.name) or not places:
        return {"status": "not judged", "why": "no defined value" if places else "no tensors"}
    tensors = [leaves[p].detach().clone() for p in places]
    try:
        wanted, again = eager(call, tensors), eager(call, tensors)
    except Exception as error:  # torch's own
        return {"status": "not judged", "why": first_line(error)}
    try:
        torch.testing.assert_close(again, wanted, rtol=0, atol=0, equal_nan=True)
    except Exception:
        return {"status": "not judged", "why": "random, or of a kind that torch cannot compare"}
    return Prepared(case, call, tensors, wanted, len(tree_leaves(call(*tensors))))


def module_of(samples: Sequence[Prepared]) -> Any:
    """A module of the tensors of all samples, one after the other, that calls each."""
    import torch

    class Samples(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *tensors: Any) -> Any:
            rest, found = list(tensors), []
            for s in samples:
                own, rest = rest[: len(s.tensors)], rest[len(s.tensors) :]
                found.append(s.call(*own))
            return found

    return Samples()


def special(tensors: Sequence[Any]) -> list[Any]:
    """The tensors with NaN, infinities and zeros of both signs among the elements of floats."""
    import torch

    random = np.random.default_rng(7)
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0])
    found = []
    for t in tensors:
        t = t.clone(memory_format=torch.contiguous_format)
        if t.is_floating_point() and t.numel():
            at = torch.from_numpy(random.permutation(t.numel())[: max(1, t.numel() // 3)])
            t.view(-1)[at] = values[torch.from_numpy(random.integers(0, 5, len(at)))].to(t.dtype)
        found.append(t)
    return found


def takes_special(op: Any) -> bool:
    """Whether an operator is pointwise, an extreme, a sort or a reduction."""
    kinds = {c.__name__ for c in type(op).__mro__}
    return bool(kinds & {"UnaryUfuncInfo", "BinaryUfuncInfo", "ReductionOpInfo"} or EXTREME.fullmatch(op.full_name))


def eager(call: Callable[..., Any], tensors: Sequence[Any]) -> list[Any]:
    """The results of torch, flat and without None."""
    from torch.utils._pytree import tree_leaves

    return [r for r in tree_leaves(call(*(t.clone() for t in tensors))) if r is not None]


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


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]


def compiled(plain: Any, device: Any) -> Any:
    """An open model of a program, given as plain data, with the generic schedule."""
    from relax_tune.database.memory_store import MemoryStore
    from relax_tune.ir.frontend.torch.importer import import_program
    from relax_tune.tuner.job.job import Job
    from relax_tune.tuner.settings import Settings
    from relax_tune.tuner.task.domain import Range

    module = import_program(plain)
    spots = {b.var.name: Range(max(2, b.lower or 0), max(2, b.lower or 0)) for b in module.bounds}
    job = Job(module, device.info, MemoryStore(), Settings(target="c"), overrides=spots)
    return job.artifact(job.build("generic")).open(device)


def differs(found: Sequence[np.ndarray[Any, Any]], wanted: Sequence[Any], exact: Callable[[], Sequence[Any]]) -> str:
    """Why results differ; empty when they agree."""
    import torch

    if len(found) != len(wanted):
        return f"wanted {len(wanted)} results, found {len(found)}"
    for position, (f, w) in enumerate(zip(found, wanted)):
        ours = np.array(f, order="C", copy=True)
        ours = (
            torch.from_numpy(ours.view(np.int16)).view(torch.bfloat16)
            if ours.dtype.name == "bfloat16"
            else torch.from_numpy(ours)
        )
        if not isinstance(w, torch.Tensor):  # a number of Python has no type of elements
            w = torch.tensor(w, dtype=ours.dtype)
        if ours.dtype is not w.dtype or ours.shape != w.shape:
            return f"output {position}: wanted {w.dtype} {tuple(w.shape)}, found {ours.dtype} {tuple(ours.shape)}"
        try:
            torch.testing.assert_close(ours, w.contiguous(), equal_nan=True, check_stride=False)
        except AssertionError as error:
            if not (w.is_floating_point() and near(ours, w, exact, position)):
                return f"output {position}: {detail(ours, w)} {' '.join(str(error).split())[:160]}"
    return ""


def near(ours: Any, theirs: Any, exact: Callable[[], Sequence[Any]], position: int) -> bool:
    """Whether the largest error is at most four of torch's, both against torch in float64.

    Where torch's result overflowed, that in float64 counts, and where ours is that in float64: torch's vectors of floats lose
    infinities of gelu on some processors."""
    import torch

    try:
        truth = exact()[position].double()
    except Exception:  # an operator without float64
        return False
    if truth.shape != ours.shape:
        return False
    whole = torch.isfinite(theirs)
    rounded = truth.to(ours.dtype)
    settled = torch.where(torch.isfinite(truth) & torch.isfinite(ours) | (rounded == ours), rounded, theirs)
    if not torch.allclose(ours[~whole], settled[~whole], 1e-3, 1e-5, equal_nan=True):
        return False
    truth = truth[whole]
    if not bool((torch.isfinite(truth) & torch.isfinite(ours[whole])).all()):
        return False
    if not truth.numel():
        return True
    least = torch.finfo(ours.dtype).eps * float(truth.abs().max())
    error, other = (float((x[whole].double() - truth).abs().max()) for x in (ours, theirs))
    return error <= 4 * max(other, least)


def detail(ours: Any, theirs: Any) -> str:
    """The first elements that differ."""
    import torch

    a, b = ours.reshape(-1).double(), theirs.reshape(-1).double()
    close = torch.isclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
    at = (~close).nonzero().reshape(-1)[:3].tolist()
    return f"{tuple(theirs.shape)} " + ", ".join(f"[{p}] wanted {b[p].item():.6g} found {a[p].item():.6g}" for p in at)


def attempt(samples: Sequence[Prepared], device: Any) -> dict[str, Any]:
    """The report of samples in one program; `missing` is what each needs that is not supported."""
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
        named = "wanted" in text and "found" in text
        missing = unsupported(samples, plain) if plain is not None and UNKNOWN in text and len(samples) > 1 else {}
        return report | {"status": "refused" if named else "failed", "why": text[:600], "missing": missing}
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


def stable(s: Prepared, tensors: Sequence[Any]) -> list[Any]:
    """The result of an argsort that keeps equal elements in their order, as ours does."""
    import torch

    given = dict(zip(("dim", "descending"), s.case.sample.args)) | s.case.sample.kwargs | {"stable": True}
    return [torch.argsort(tensors[0], **given)]


def serve(start: int, stop: int, done: int, alone: bool, args: argparse.Namespace) -> None:
    """Run the operators start .. stop-1 but the first `done` samples, and print JSON lines.

    alone: the samples of the first operator are not tried together
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
        s: {"status": "refused", "why": f"node '', operator {m} of (): wanted one {UNKNOWN}"}
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
        environment = {**os.environ, "RELAX_TUNE_CACHE": cache, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            [sys.executable, __file__, *serve],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
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
                raise SystemExit(f"wanted operators {start}:{stop} to run, found exit status {code}: {' '.join(serve)}")
            return
        done, alone = begun["begin"], 1
        if "case" in begun:
            yield begun | {"status": "crashed", "why": f"exit status {code}" + (f" ({SECS} s)" if code == -14 else "")}
            done += 1


def environment() -> dict[str, str]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":")[1].strip() for x in info if x.startswith("model name")), platform.processor())
    compiler = subprocess.run(["gcc", "--version"], capture_output=True, text=True).stdout.splitlines()[:1]
    return {
        "torch": version("torch"), "numpy": version("numpy"), "python": platform.python_version(), "processor": cpu,
        "compiler": compiler[0] if compiler else "",
    }  # fmt: skip


def reason(why: str) -> str:
    """The kind of a refusal: its aten operator, or its text without names of nodes."""
    found = re.search(r"operator (\S+) of \(.*?\): (wanted [^;]*)", why)
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


def summary(reports: Sequence[dict[str, Any]], env: dict[str, str], samples: int, measured: str) -> str:
    """The Markdown page."""
    paragraphs = __doc__.split("\n\n")
    lines = ["# torch's operator samples through compiled C", ""]
    lines += [p.replace("\n", " ").split(" Exit status")[0] + "\n" for p in paragraphs[2:]]
    lines += [f"* {k}: {v}" for k, v in env.items()] + [
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
    lines += ["", "## Refused", "", "By the aten operator, or by what was wanted of it; samples of all types.", ""]
    lines += [f"* {k} ({n})" for k, n in sorted(by.items(), key=lambda x: (-x[1], x[0]))]
    ops: dict[str, set[str]] = defaultdict(set)
    for r in reports:
        ops[r["op"]].add(r["status"])
    whole = sorted(o for o, s in ops.items() if "right" in s and s <= {"right", "not exported", "not judged"})
    part = sorted(o for o, s in ops.items() if "right" in s and o not in whole)
    lines += ["", f"## Right in every sample that was judged ({len(whole)} operators)", "", ", ".join(whole)]
    lines += ["", f"## Right in some ({len(part)} operators)", "", ", ".join(part), ""]
    return "\n".join(lines)


def write(reports: Sequence[dict[str, Any]], samples: int, measured: str = "") -> None:
    """Write the two files of results."""
    env = environment()
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"environment": env, **compact(reports)}, indent=0, sort_keys=True)
    (RESULTS / "torch_op_db.json").write_text(text + "\n")
    (RESULTS / "torch_op_db.md").write_text(summary(reports, env, samples, measured))


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
        write(list(found.values()), args.samples, args.measured)
        return
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
    if not (args.only or args.skip or args.types != TYPES):
        write(reports, args.samples)
    sys.exit(1 if any(r["status"] in BAD for r in reports) else 0)


if __name__ == "__main__":
    main()
