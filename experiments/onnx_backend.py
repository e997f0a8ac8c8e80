"""The onnx package's own node tests through the ONNX importer, the passes, generated C and the C device.

    python experiments/onnx_backend.py                      (both forms, writes experiments/results/onnx_backend.{json,md})
    python experiments/onnx_backend.py --only 'reduce_.*'   (some cases, printed)

Each case runs in two forms: `static`, with the dims of the test, and `dynamic`, where every input dim beyond 1 is a symbol
(one symbol per size, so that dims that must agree do). Inputs that a node needs to know its shapes or axes, such as the
shape of a Reshape, are bound as initializers, because the importer wants them constant; the list says where.

A case counts as passed only when it was executed by compiled code: its results agree with the suite's, with the suite's
tolerances, shapes and types, and at least one kernel computed something from the values of an input. That is decided on the
graph after constant folding and dead-code elimination, which is what is compiled: an operator must be left that is no view
and no copy and that reads, through whatever other operators, an input tensor. What folds away at import, depends on shapes
alone, or only views its input counts apart ("folded or views"). Artifacts run kernels and nothing else. The suite's relative
tolerance of 1e-3 is about one unit in the last place of a 16-bit float: a case with such outputs that misses it by rounding
(at most two units anywhere) passes, and is named. Results that are draws of the suite's generator are not judged. Cases run
with the generic schedule, in a child process per batch, so that a crash is one case's. Exit status 1 when a result is wrong,
a child crashed, or the tool failed otherwise than by refusing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
FORMS = ("static", "dynamic")
BAD = ("wrong", "failed", "crashed")
BATCH = 157

# Inputs that decide shapes: by operator, the positions that must be constants.
_AXES = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
         "ReduceLogSumExp", "ReduceSumSquare", "Squeeze", "Unsqueeze")  # fmt: skip
BOUND: dict[str, tuple[int, ...]] = {
    **{op: (1,) for op in (*_AXES, "Reshape", "Expand", "Tile", "Split", "Trilu", "OneHot", "CumSum", "CumProd", "TopK")},
    "Slice": (1, 2, 3, 4), "Pad": (1, 2, 3), "ConstantOfShape": (0,), "Range": (0, 1, 2), "Dropout": (1, 2),
    "CenterCropPad": (1,), "AffineGrid": (1,), "Resize": (1, 2, 3),
    "Col2Im": (1, 2), "MaxUnpool": (2,), "Upsample": (1,), "DFT": (1, 2), "STFT": (1, 3), "MelWeightMatrix": (0, 1, 2, 3, 4),
}  # fmt: skip
RANDOM = r"test_(training_dropout_(default|default_mask)|training_dropout(_mask)?|bernoulli.*)"
"""Cases whose results are draws of one generator: not judged. With a ratio of 0 dropout draws nothing."""
SMALL = {"test_dft_inverse": 1e-6, "test_dft_inverse_opset19": 1e-6}
"""Absolute tolerances of cases whose stored zeros are roundings of the suite's own, larger than its tolerance."""


def cases() -> list[Any]:
    """The node suite, in its order."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(load_model_tests(kind="node"))


# Operators through which inputs decide shapes.
ARITHMETIC = ("Max", "Min", "Add", "Sub", "Mul", "Div", "Concat", "Unsqueeze", "Squeeze", "Cast", "Where", "Identity")


def plain(value: Any) -> Any:
    """Tensors and numbers as arrays; sequences and the like as they are."""
    from onnx import TensorProto, numpy_helper

    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, (np.ndarray, np.generic, int, float, bool)) else value


def bound_inputs(model: Any, inputs: Sequence[Any]) -> tuple[Any, list[Any], list[str]]:
    """(model, remaining inputs, names): shape inputs become initializers with the case's values."""
    from onnx import ModelProto, numpy_helper

    model_copy = ModelProto()
    model_copy.CopyFrom(model)
    graph = model_copy.graph
    wanted = {
        n.input[p]
        for n in graph.node
        for p in BOUND.get(n.op_type, ())
        if p < len(n.input) and n.domain in ("", "ai.onnx")
    }
    for n in reversed(graph.node):
        if n.op_type in ARITHMETIC and wanted.intersection(n.output):
            wanted.update(n.input)
    names = [i.name for i in graph.input]
    bound, rest = [], []
    for name, value in zip(names, inputs):
        if name in wanted and isinstance(value, np.ndarray):
            graph.initializer.append(numpy_helper.from_array(value, name))
            bound.append(name)
        else:
            rest.append(value)
    kept = [i for i in graph.input if i.name not in bound]
    del graph.input[:]
    graph.input.extend(kept)
    return model_copy, rest, bound


def symbolic(model: Any) -> bool:
    """Make every dim beyond 1 of the inputs a symbol, one per size; whether there was any."""
    found = False
    for i in model.graph.input:
        for d in i.type.tensor_type.shape.dim:
            if d.dim_value > 1:
                d.dim_param = f"d{d.dim_value}"
                found = True
    return found


def computes(module: Any) -> bool:
    """Whether anything but views and copies is left that reads the values of an input, when constants are folded."""
    from relax_tune.ir.passes.graph.cleanup import DeadCode
    from relax_tune.ir.passes.graph.constant_fold import FoldConstants

    left = DeadCode()(FoldConstants()(module))
    main = left.functions["main"]
    return bodies_compute(left, main.bindings, set(main.params), {"main"})


def bodies_compute(module: Any, bindings: Any, fed: set[Any], seen: set[str]) -> bool:
    """The same of some bindings, where the values `fed` depend on inputs; functions of `seen` are looked at already."""
    from relax_tune.ir.core.graph import Call, CallFunction, FunctionRef, If
    from relax_tune.ir.op.indexing.movement import VIEWS, Permute

    for b in bindings:
        value = b.value
        if not fed.intersection(value.operands):
            continue
        fed.add(b.var)
        if isinstance(value, If):
            if any(bodies_compute(module, side.bindings, fed, seen) for side in value.bodies):
                return True
        elif isinstance(value, CallFunction) and isinstance(value.callee, FunctionRef):
            if value.callee.name not in seen:
                f = module.functions[value.callee.name]
                given = {p for p, a in zip(f.params, value.args, strict=True) if a in fed}
                if bodies_compute(module, f.bindings, given, seen | {f.name}):
                    return True
        elif isinstance(value, Call):
            copies = isinstance(value.op, Permute) and value.op.axes == tuple(range(len(value.op.axes)))
            if not isinstance(value.op, VIEWS) and not copies:
                return True
    return False


def half_units(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """The largest difference of finite 16-bit floats, in units in the last place; infinite when others differ."""
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True):
        return float("inf")
    a, b = found[finite].astype(np.float64), wanted[finite].astype(np.float64)
    return float(np.max(np.abs(a - b) / np.spacing(np.abs(wanted[finite])).astype(np.float64), initial=0.0))


def same(found: np.ndarray[Any, Any], wanted: Any, rtol: float, atol: float) -> str:
    """Why two results differ; empty when they agree."""
    from relax_tune.ir.core.dtype import is_floating

    wanted = np.asarray(wanted)
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"wanted {wanted.dtype} {wanted.shape}, found {found.dtype} {found.shape}"
    try:
        if is_floating(found.dtype):
            np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(found, wanted)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


def attempt(case: Any, form: str, device: Any) -> dict[str, Any]:
    """One case: its status, and why."""
    from relax_tune.database.memory_store import MemoryStore
    from relax_tune.errors import RelaxTuneError
    from relax_tune.ir.core.dtype import is_floating
    from relax_tune.ir.frontend.onnx.importer import load_onnx
    from relax_tune.tuner.job.job import Job
    from relax_tune.tuner.settings import Settings
    from relax_tune.tuner.task.domain import Range

    operators = sorted({n.op_type for n in case.model.graph.node})
    report: dict[str, Any] = {"case": case.name, "form": form, "operators": operators}
    inputs, outputs = ([plain(v) for v in values] for values in case.data_sets[0])
    model, rest, bound = bound_inputs(case.model, inputs)
    report["bound"] = bound
    if form == "dynamic" and not symbolic(model):
        return report | {"status": "no dims"}
    if re.fullmatch(RANDOM, case.name):
        return report | {"status": "random"}
    try:
        module = load_onnx(model)
        if not computes(module):
            return report | {"status": "folded"}
        # nothing is tuned: one shape per symbol keeps the shapes to tune over few
        spots = {b.var.name: Range(2, 2) for b in module.bounds}
        job = Job(module, device.info, MemoryStore(), Settings(target="c"), overrides=spots)
        built = job.build("generic")
    except RelaxTuneError as error:
        return report | {"status": "unsupported", "why": f"{type(error).__name__}: {error}"[:600]}
    if not any(p.calls for p in built.programs.values()):
        return report | {"status": "folded"}
    with job.artifact(built).open(device) as loaded:
        found = loaded.run(rest)
    found = found if isinstance(found, (tuple, list)) else [found]
    report["kernels"] = sum(len(p.kernels) for p in built.programs.values())
    for position, (f, w) in enumerate(zip(found, outputs, strict=True)):
        why = same(f, w, case.rtol, SMALL.get(case.name, case.atol))
        half = is_floating(f.dtype) and f.dtype.itemsize == 2
        if why and half and f.shape == np.shape(w) and half_units(f, np.asarray(w, f.dtype)) <= 2:
            report["rounding"] = why
        elif why:
            return report | {"status": "wrong", "why": f"output {position}: {why}"}
    return report | {"status": "passed"}


def serve(form: str, start: int, stop: int, only: str) -> None:
    """Run cases start .. stop-1 and print one JSON line for each, the case's name in front of it."""
    import logging

    from relax_tune.runtime.device.registry import open_device

    logging.disable(logging.WARNING)
    device = open_device("c")
    every = cases()
    for index in range(start, min(stop, len(every))):
        if only and not re.fullmatch(only, every[index].name):
            continue
        print(json.dumps({"begin": index, "case": every[index].name}), flush=True)
        try:
            report = attempt(every[index], form, device)
        except Exception as error:
            report = {"case": every[index].name, "form": form, "status": "failed", "operators": []}
            report["why"] = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps(report), flush=True)
    device.close()


def run_batch(form: str, start: int, stop: int, only: str, cache: str) -> Iterator[dict[str, Any]]:
    """The reports of a batch; a child that dies costs its case, and another takes over behind it."""
    while start < stop:
        command = [sys.executable, __file__, "--serve", form, str(start), str(stop), "--only", only]
        environment = {**os.environ, "RELAX_TUNE_CACHE": cache, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        assert child.stdout is not None
        open_case: dict[str, Any] | None = None
        for line in child.stdout:
            if not line.startswith("{"):
                continue
            message = json.loads(line)
            if "begin" in message:
                open_case = message
            else:
                open_case = None
                yield message
        code = child.wait()
        if open_case is None:
            if code:
                raise SystemExit(
                    f"wanted the batch {start}:{stop} to run, found exit status {code}: {' '.join(command)}"
                )
            return
        yield {
            "case": open_case["case"],
            "form": form,
            "status": "crashed",
            "operators": [],
            "why": f"exit status {code}",
        }
        start = open_case["begin"] + 1


def environment() -> dict[str, str]:
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")),
        "",
    )
    compiler = subprocess.run(["gcc", "--version"], capture_output=True, text=True).stdout.splitlines()[:1]
    return {
        "onnx": version("onnx"), "numpy": version("numpy"), "python": platform.python_version(),
        "processor": cpu or platform.processor(), "compiler": compiler[0] if compiler else "",
    }  # fmt: skip


def summary(reports: Sequence[dict[str, Any]], env: dict[str, str]) -> str:
    """The Markdown page."""
    lines = ["# The ONNX node suite through compiled C", "", __doc__.split("\n\n")[2].replace("\n", " "), ""]
    lines += [__doc__.split("\n\n")[3].replace("\n", " ").split(" Exit status")[0], ""]
    lines += [f"* {k}: {v}" for k, v in env.items()]
    lines += [
        "",
        "| form | passed | folded or views | unsupported | random | wrong | failed or crashed | no dims |",
        "|---|" + "---:|" * 7,
    ]
    for form in FORMS:
        c = Counter(r["status"] for r in reports if r["form"] == form)
        bad = (c["wrong"], c["failed"] + c["crashed"])
        cells = (c["passed"], c["folded"], c["unsupported"], c["random"], *bad, c["no dims"])
        lines.append(f"| {form} | " + " | ".join(map(str, cells)) + " |")
    for status in BAD:
        bad = [r for r in reports if r["status"] == status]
        if bad:
            lines += ["", f"## {status.capitalize()}", ""]
            lines += [f"* `{r['case']}` ({r['form']}): {r.get('why', '')}" for r in bad]
    near = sorted(f"`{r['case']}` ({r['form']})" for r in reports if r["status"] == "passed" and "rounding" in r)
    if near:
        lines += [
            "",
            "## Counted as passed beyond the suite's tolerance, within two units of 16-bit floats",
            "",
            ", ".join(near),
        ]
    lines += [
        "",
        "## Unsupported, by operator",
        "",
        "Cases of the static form; an operator in several cases counts each.",
        "",
    ]
    by = Counter(o for r in reports if r["form"] == "static" and r["status"] == "unsupported" for o in r["operators"])
    lines.append(", ".join(f"{o} {n}" for o, n in sorted(by.items(), key=lambda x: (-x[1], x[0]))))
    for form in FORMS:
        lines += ["", f"## Passed, {form}", ""]
        names = [r["case"].removeprefix("test_") + ("*" if r.get("bound") else "") for r in reports
                 if r["form"] == form and r["status"] == "passed"]  # fmt: skip
        lines.append(", ".join(sorted(names)))
    return "\n".join([*lines, "", "`*`: inputs that decide shapes were bound as initializers.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression for whole case names without test_")
    parser.add_argument("--jobs", type=int, default=2, help="batches at a time")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], int(args.serve[1]), int(args.serve[2]), args.only)
        return
    only = f"test_({args.only})" if args.only else ""
    total, started = len(cases()), time.monotonic()
    reports: list[dict[str, Any]] = []
    step = BATCH if not only else total
    batches = [(form, start, min(start + step, total)) for form in args.forms for start in range(0, total, step)]
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(args.jobs) as pool:
        for (form, _, stop), found in zip(batches, pool.map(lambda b: list(run_batch(*b, only, cache)), batches)):
            reports += found
            for report in found:
                if only or report["status"] in BAD:
                    print(report["status"], form, report["case"], report.get("why", ""), flush=True)
            counts = dict(Counter(r["status"] for r in reports if r["form"] == form))
            print(f"{form} {stop}/{total}: {counts}", flush=True)
    seen = Counter((r["form"], r["case"]) for r in reports)
    if not only and (len(seen) != total * len(args.forms) or max(seen.values()) != 1):
        raise SystemExit(f"wanted one report for each of {total} cases in each form, found {len(seen)}; run again")
    bad = [r for r in reports if r["status"] in BAD]
    print(f"{time.monotonic() - started:.0f} s")
    if not only:
        env = environment()
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "onnx_backend.json").write_text(json.dumps({"environment": env, "cases": reports}, indent=0) + "\n")
        (RESULTS / "onnx_backend.md").write_text(summary(reports, env))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
