"""The node tests of the onnx package: imported, lowered, compiled as C and run on the C device.

    python -m experiments.families.onnx_backend                      (both forms; writes experiments/results/onnx_backend.{json,md})
    python -m experiments.families.onnx_backend --only 'reduce_.*'   (some cases; prints their status)

Each case runs in two forms: `static`, with the dims of the test, and `dynamic`, where every input dim larger than 1 is a symbol.
Dims of the same size get the same symbol, so that dims that must be equal are equal. Inputs that decide shapes or axes, such as
the shape of a Reshape, become initializers, because the importer needs them constant; the list below marks these cases.

A case passes only if compiled code ran and its results have the shapes and types of the suite and agree within the suite's
tolerances. "Compiled code ran" is checked on the graph after constant folding and dead-code elimination: at least one operator
other than a view or a copy must depend on the values of an input. A case without such an operator counts as
"folded or views"; its results are compared in the same way. "Right" is the sum of both.
The suite's relative tolerance of 1e-3 is about one unit in the last place of a 16-bit float: a case with 16-bit outputs also
passes if every element is within two units in the last place, and is listed. Cases whose results are random draws are not
compared. Kernels use the generic schedule; each batch of cases has a process, so that a crash costs one case.

The exit status is 1 if a result is wrong, a process crashed, or an error other than a refusal occurred.
"""

from __future__ import annotations

import argparse
import json
import os
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
from typing import Any

import numpy as np

from experiments.harness.pages import environment, write_page

FORMS = ("static", "dynamic")
BAD = ("wrong", "failed", "crashed")
BATCH = 157

# By operator, the positions of inputs that decide shapes and must be constants.
_AXES = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
         "ReduceLogSumExp", "ReduceSumSquare", "Squeeze", "Unsqueeze")  # fmt: skip
BOUND: dict[str, tuple[int, ...]] = {
    **{op: (1,) for op in (*_AXES, "Reshape", "Expand", "Tile", "Split", "Trilu", "OneHot", "CumSum", "CumProd", "TopK")},
    "Slice": (1, 2, 3, 4), "Pad": (1, 2, 3), "ConstantOfShape": (0,), "Range": (0, 1, 2), "Dropout": (1, 2),
    "CenterCropPad": (1,), "AffineGrid": (1,), "Resize": (1, 2, 3),
    "Col2Im": (1, 2), "MaxUnpool": (2,), "Upsample": (1,), "DFT": (1, 2), "STFT": (1, 3), "MelWeightMatrix": (0, 1, 2, 3, 4),
}  # fmt: skip
RANDOM = r"test_(training_dropout_(default|default_mask)|training_dropout(_mask)?|bernoulli.*)"
"""Cases whose results are random draws: not compared. Dropout with a ratio of 0 draws nothing, so it is compared."""
SMALL = {"test_dft_inverse": 1e-6, "test_dft_inverse_opset19": 1e-6}
"""Absolute tolerances of cases whose expected zeros have rounding errors larger than the suite's tolerance."""


def cases() -> list[Any]:
    """Return the cases of the node suite in their order."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(load_model_tests(kind="node"))


# Operators that may lie between an input and a position of BOUND.
ARITHMETIC = ("Max", "Min", "Add", "Sub", "Mul", "Div", "Concat", "Unsqueeze", "Squeeze", "Cast", "Where", "Identity")


def plain(value: Any) -> Any:
    """Return tensors and numbers as arrays, and other values (sequences, optionals) unchanged."""
    from onnx import TensorProto, numpy_helper

    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, (np.ndarray, np.generic, int, float, bool)) else value


def bound_inputs(model: Any, inputs: Sequence[Any]) -> tuple[Any, list[Any], list[str]]:
    """Return the model with its shape inputs as initializers, the values of the other inputs, and the names of the initializers."""
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
    """Make every input dim larger than 1 a symbol, one per size; return whether there is such a dim."""
    found = False
    for i in model.graph.input:
        for d in i.type.tensor_type.shape.dim:
            if d.dim_value > 1:
                d.dim_param = f"d{d.dim_value}"
                found = True
    return found


def computes(module: Any) -> bool:
    """Return whether an operator other than a view or a copy depends on an input after constant folding."""
    from relax_tune.ir.passes.graph.cleanup import DeadCode
    from relax_tune.ir.passes.graph.constant_fold import FoldConstants

    left = DeadCode()(FoldConstants()(module))
    main = left.functions["main"]
    return bodies_compute(left, main.bindings, set(main.params), {"main"})


def bodies_compute(module: Any, bindings: Any, fed: set[Any], seen: set[str]) -> bool:
    """Return whether one of the bindings computes from values that depend on inputs.

    Args:
        module: the module of the functions that the bindings call.
        bindings: bindings of a function or of a branch.
        fed: variables that depend on inputs; the function adds to them.
        seen: names of functions that are on the call stack.
    """
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
    """Return the largest difference in units in the last place; infinite if elements that are not finite differ."""
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True):
        return float("inf")
    a, b = found[finite].astype(np.float64), wanted[finite].astype(np.float64)
    return float(np.max(np.abs(a - b) / np.spacing(np.abs(wanted[finite])).astype(np.float64), initial=0.0))


def same(found: np.ndarray[Any, Any], wanted: Any, rtol: float, atol: float) -> str:
    """Return how two results differ, or an empty string if they agree."""
    from relax_tune.ir.core.dtype import is_floating

    wanted = np.asarray(wanted)
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"expected {wanted.dtype} {wanted.shape}, got {found.dtype} {found.shape}"
    try:
        if is_floating(found.dtype):
            np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(found, wanted)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


def attempt(case: Any, form: str, device: Any) -> dict[str, Any]:
    """Run a case in one form and return its report: `status`, and `why` if it did not pass."""
    from relax_tune.database.memory_store import MemoryStore
    from relax_tune.errors import RelaxTuneError
    from relax_tune.ir.core.dtype import is_floating
    from relax_tune.ir.core.struct_info import info_symbols
    from relax_tune.ir.frontend.onnx.importer import load_onnx
    from relax_tune.tuner.job.device_job import device_job
    from relax_tune.tuner.settings import Settings
    from relax_tune.tuner.task.allowed_sizes import Range

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
        # Nothing is tuned, so one size per symbol is enough. The lowered model lacks the symbols that the importer introduces
        # for joint dims: only the symbols of parameters get a size.
        spots = {v.name: Range(2, 2) for p in module.functions["main"].params for v in info_symbols(p.info)}
        job = device_job(module, device.info, MemoryStore(), Settings(target="c"))
        vars(job)["tasks"] = job.extract(spots)
        built = job.build("generic")
    except RelaxTuneError as error:
        return report | {"status": "unsupported", "why": f"{type(error).__name__}: {error}"[:600]}
    compiled = computes(module) and any(p.calls for p in built.programs.values())
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
    return report | {"status": "passed" if compiled else "folded"}


def serve(form: str, start: int, stop: int, only: str) -> None:
    """Run cases start .. stop-1; print a JSON line with the name before each case and one with the report after it."""
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
    """Yield the reports of a batch. If the child process dies, its case has crashed, and a new child continues after it."""
    while start < stop:
        command = [
            sys.executable,
            "-m",
            "experiments.families.onnx_backend",
            "--serve",
            form,
            str(start),
            str(stop),
            "--only",
            only,
        ]
        variables = {**os.environ, "RELAX_TUNE_CACHE": cache, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables)
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
                    f"expected the batch {start}:{stop} to run, got exit status {code}: {' '.join(command)}"
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


def facts() -> dict[str, str]:
    """Return the environment; call it before the cases run."""
    compiler = subprocess.run(["gcc", "--version"], capture_output=True, text=True).stdout.splitlines()[:1]
    return {
        **environment(), "onnx": version("onnx"), "numpy": version("numpy"), "compiler": compiler[0] if compiler else "",
    }  # fmt: skip


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown page."""
    lines = ["# The ONNX node suite through compiled C", "", __doc__.split("\n\n")[2].replace("\n", " "), ""]
    lines += [__doc__.split("\n\n")[3].replace("\n", " "), ""]
    lines += [
        "| form | right | passed | folded or views | unsupported | random | wrong | failed or crashed | no dims |",
        "|---|" + "---:|" * 8,
    ]
    for form in FORMS:
        c = Counter(r["status"] for r in reports if r["form"] == form)
        bad = (c["wrong"], c["failed"] + c["crashed"])
        cells = (c["passed"] + c["folded"], c["passed"], c["folded"], c["unsupported"], c["random"], *bad, c["no dims"])
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
            "## Passed within two units in the last place of 16-bit floats, not within the suite's tolerance",
            "",
            ", ".join(near),
        ]
    lines += [
        "",
        "## Unsupported, by operator",
        "",
        "Cases of the static form that contain the operator.",
        "",
    ]
    by = Counter(o for r in reports if r["form"] == "static" and r["status"] == "unsupported" for o in r["operators"])
    lines.append(", ".join(f"{o} {n}" for o, n in sorted(by.items(), key=lambda x: (-x[1], x[0]))))
    for form in FORMS:
        lines += ["", f"## Passed, {form}", ""]
        names = [r["case"].removeprefix("test_") + ("*" if r.get("bound") else "") for r in reports
                 if r["form"] == form and r["status"] == "passed"]  # fmt: skip
        lines.append(", ".join(sorted(names)))
    return "\n".join([*lines, "", "`*`: inputs that decide shapes became initializers.", ""])


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
    env = facts() if not only else {}
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
        raise SystemExit(f"expected one report for each of {total} cases in each form, got {len(seen)}; run again")
    bad = [r for r in reports if r["status"] in BAD]
    print(f"{time.monotonic() - started:.0f} s")
    if not only:
        record = {"environment": env, "cases": reports}
        write_page("onnx_backend", summary(reports).splitlines(), record, env, indent=0, quiet=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
