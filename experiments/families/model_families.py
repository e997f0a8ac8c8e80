"""Tiny random models of many families by torch.export, by ONNX and from folders: right, or refused by name.

    python -m experiments.families.model_families                    (all ways, writes experiments/results/model_families.{json,md})
    python -m experiments.families.model_families --only 'yolo_.*'   (some models, printed)
    python -m experiments.families.model_families --only 'yolo_.*' --update   (some models; the results of others stay)

It needs torch, transformers and onnxscript besides this package. The models are in `models.py`, `plain.py` and the modules
`more_*.py`.

Each model is exported by torch.export with dynamic dims (batch, and length or height and width), and from there by
torch.onnx.export with the same dims. Where that fails or changes the results, the model is first switched to another implementation of
attention or experts, as the page says. Models that transformers saves are also read from their folders: of a decoder the logits of
a prompt and of one more step are compared, of an encoder-decoder those behind its encoder. Each is imported, built for target
`c` with generic schedules, and run at four or five shapes: batch 1, length 1, and prime sizes among them. Results must agree with
torch at the same weights: floats within 1e-3 of the value plus 1e-4 of the largest of the tensor, integers and truth values
equal, and shapes and types alike.

Statuses: `right`; `refused`, an error of this package that names what it does not support; `export failed`, an error of torch before
this package sees the model; `exporter differs`, the result differs from torch but equals that of onnx's evaluator for the exported
model; `wrong`; `crashed`, another exception or a dead process. Models run in child processes; after one dies, a new one continues with
the next model. The exit status is 1 if a model is wrong or crashed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
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

from experiments.harness.pages import RESULTS, environment, write_page

WAYS = ("torch", "onnx", "folder")
BAD = ("wrong", "crashed")
EXAMPLE_SEED, CASE_SEED = 1, 2
LONGEST = {"n": 64, "m": 64, "past": 63, "h": 1024, "w": 1024}
LEAST = {"h": 64, "w": 64}
Report = dict[str, Any]
Array = np.ndarray[Any, Any]


def families() -> dict[str, Any]:
    from experiments.families.models import FAMILIES
    from experiments.families.more_media import MORE_MEDIA
    from experiments.families.more_text import MORE_TEXT
    from experiments.families.plain import PLAIN

    return {**FAMILIES, **PLAIN, **MORE_TEXT, **MORE_MEDIA}


# In the child


def as_tuple(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def exported(model: Any, family: Any) -> Any:
    """The program of torch.export; batch 1 and length 1 are among the shapes, so that neither is specialised."""
    import torch

    names = {name.split("*")[-1] for dims in family.dynamic for name in dims.values()}
    dims = {n: torch.export.Dim(n, min=family.least.get(n, LEAST.get(n, 1)), max=LONGEST.get(n)) for n in names}

    def dim(name: str) -> Any:
        factor, _, base = name.rpartition("*")
        return int(factor) * dims[base] if factor else dims[base]

    places: Any = tuple({axis: dim(name) for axis, name in d.items()} for d in family.dynamic)
    example = family.inputs(torch.Generator().manual_seed(EXAMPLE_SEED), family.shapes[0])

    def export(shapes: Any) -> Any:
        ask = {"prefer_deferred_runtime_asserts_over_guards": True} if family.deferred else {}
        return torch.export.export(model, example, dynamic_shapes=shapes, **ask)

    with torch.no_grad():
        try:
            return export(places)
        except torch._dynamo.exc.UserError as error:  # torch knows the relations that it wants between the dims
            if "Suggested fixes" not in str(error):
                raise
            try:
                refined = torch.export.dynamic_shapes.refine_dynamic_shapes_from_suggested_fixes(str(error), places)
            except Exception:  # it reads its own suggestions of computed dims wrongly
                raise error from None
            return export(refined)


def imported(program: Any, way: str) -> tuple[Any, Any]:
    """Return the module and the ONNX model, or None and the error of torch."""
    from relax_tune.ir.frontend.onnx.importer import load_onnx
    from relax_tune.ir.frontend.torch.importer import load_torch_export

    if way == "torch":
        return load_torch_export(program), None
    import torch

    try:
        proto = torch.onnx.export(program, dynamo=True, verbose=False).model_proto
    except Exception as error:
        return None, error
    return load_onnx(proto), proto


def from_folder(model: Any) -> Any:
    """The module of a model's folder; None where a model has none."""
    from experiments.families.folders import gives_hidden_states, write_folder
    from relax_tune.ir.frontend.load import load_model

    with tempfile.TemporaryDirectory() as folder:
        if not write_folder(model, Path(folder)):
            return None
        return load_model(folder, pooling="none" if gives_hidden_states(model) else None)


def by_evaluator(proto: Any, inputs: Sequence[Array]) -> list[Array]:
    """Return the results of onnx's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(proto).run(None, dict(zip((i.name for i in proto.graph.input), inputs, strict=True)))
    return list(map(np.asarray, found))


def difference(found: Array, wanted: Array) -> str:
    """Why two results differ; empty when they agree."""
    from relax_tune.ir.core.dtype import is_floating

    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"expected {wanted.dtype} {wanted.shape}, got {found.dtype} {found.shape}"
    if not is_floating(found.dtype):
        unequal = int(np.count_nonzero(found != wanted))
        return f"{unequal} of {found.size} elements unequal" if unequal else ""
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True):
        return "infinities or NaN at other places"
    a, b = found[finite].astype(np.float64), wanted[finite].astype(np.float64)
    largest = float(np.max(np.abs(b), initial=0.0))
    error = np.abs(a - b)
    if np.all(error <= 1e-3 * np.abs(b) + 1e-4 * largest):
        return ""
    return f"largest error {float(np.max(error)):.3g} of largest value {largest:.3g}"


def compared(module: Any, model: Any, family: Any, device: Any, proto: Any = None, folder: bool = False) -> Report:
    """Build, run at every shape, and compare with torch; where results differ, compare with onnx's evaluator of the exported model.

    folder: the module is from the model's folder, whose functions and results differ from the exported program's.
    """
    import torch

    from experiments.families.folders import folder_pairs
    from relax_tune.database.memory_store import MemoryStore
    from relax_tune.tuner.job.device_job import device_job
    from relax_tune.tuner.settings import Settings
    from relax_tune.tuner.task.allowed_sizes import Range

    # nothing is tuned: one shape per symbol keeps them few; a symbol of a multiple is none of the lowered model
    alone = {d for graph in module.graphs.values() for p in graph.params for d in getattr(p.info, "shape", None) or ()}
    spots = {b.var.name: Range(max(2, b.lower), max(2, b.lower)) for b in module.bounds if b.var in alone}
    job = device_job(module, device.info, MemoryStore(), Settings(target="c"))
    vars(job)["tasks"] = job.extract(spots)
    built = job.build("generic")
    opened = job.artifact(built).open(device)
    try:
        for shape in family.shapes:
            given = family.inputs(torch.Generator().manual_seed(CASE_SEED), shape)
            arrays = [t.numpy() for t in given]
            with torch.no_grad():
                if folder:
                    pairs = list(folder_pairs(module, model, opened.run, given))
                else:
                    wanted = as_tuple(model(*given))
                    pairs = list(zip(opened.run(arrays), (w.numpy() for w in wanted), strict=True))
            for place, (found, w) in enumerate(pairs):
                why = difference(np.asarray(found), w)
                if not why:
                    continue
                if proto is not None and not difference(found, by_evaluator(proto, arrays)[place]):
                    return {"status": "exporter differs", "why": f"shape {shape}, output {place}: {why}"}
                return {"status": "wrong", "why": f"shape {shape}, output {place}: {why}"}
    finally:
        opened.close()
    kernels = sum(len(p.kernels) for p in built.programs.values())
    return {"status": "right", "shapes": len(family.shapes), "kernels": kernels}


def first_line(error: BaseException, limit: int = 700) -> str:
    """The first line of a message, two where torch begins with a heading."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    return f"{type(error).__name__}: {' '.join(lines[: 2 if 'TORCH_LOGS' in lines[0] else 1]) if lines else ''}"[:limit]


def attempt(name: str, ways: Sequence[str], device: Any) -> Iterator[Report]:
    """The report of each way."""
    from relax_tune.errors import RelaxTuneError

    family = families()[name]
    for way in ways:
        started, report = time.monotonic(), {"model": name, "way": way}
        own = family.folder or family if way == "folder" else family
        try:
            model, program, failed = made(own, way)
            if way == "folder":
                module, proto = from_folder(model), None
                if module is None:
                    continue
            elif failed is not None:
                module, proto = None, failed
            else:
                module, proto = imported(program, way)
            if module is None:
                report |= {"status": "export failed", "why": first_line(proto)}
            else:
                report |= compared(module, model, own, device, proto, way == "folder")
                report |= {"set": own.for_onnx} if way == "onnx" and own.for_onnx else {}
        except RelaxTuneError as error:
            report |= {"status": "refused", "why": first_line(error)}
        except Exception as error:
            import traceback

            at = traceback.extract_tb(error.__traceback__)[-1]
            report |= {"status": "crashed", "why": f"{first_line(error)} ({Path(at.filename).name}:{at.lineno})"}
        yield report | {"secs": round(time.monotonic() - started, 1)}


def made(family: Any, way: str) -> tuple[Any, Any, Exception | None]:
    """A model with its weights, its exported program, and torch's error where it cannot be exported."""
    import torch

    from experiments.families.models import draw

    torch.manual_seed(0)
    model = draw(family.make())
    if way == "folder":
        return model, None, None
    for what, how in family.for_onnx.items() if way == "onnx" else ():
        getattr(model.inner, f"set_{what}_implementation")(how)
    try:
        return model, exported(model, family), None
    except Exception as error:
        return model, None, error


def serve(names: Sequence[str], ways: Sequence[str]) -> None:
    """Run models and print one JSON line for each way, the model's name in front of them."""
    import torch

    from relax_tune.runtime.device.registry import open_device

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    device = open_device("c")
    for name in names:
        print(json.dumps({"begin": name}), flush=True)
        for report in attempt(name, ways, device):
            print(json.dumps(report), flush=True)
        print(json.dumps({"end": name}), flush=True)
    device.close()


# In the parent


def run_all(names: Sequence[str], ways: Sequence[str], cache: str) -> Iterator[Report]:
    """The reports of models; a child that dies costs the ways of its model that are left."""
    left = list(names)
    while left:
        command = [sys.executable, "-m", "experiments.families.model_families", "--serve", *left, "--ways", *ways]
        variables = {**os.environ, "RELAX_TUNE_CACHE": cache, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables)
        assert child.stdout is not None
        current, missing = "", list(ways)
        for line in child.stdout:
            if not line.startswith("{"):
                continue
            message = json.loads(line)
            if "begin" in message:
                current, missing = message["begin"], list(ways)
                left.remove(current)
            elif "end" in message:
                missing = []
            else:
                missing.remove(message["way"])
                yield message
        code = child.wait()
        if not current:
            raise SystemExit(f"expected the models to run, got exit status {code}: {' '.join(command)}")
        for way in missing:
            yield {"model": current, "way": way, "status": "crashed", "why": f"exit status {code}"}


def run_side_by_side(names: Sequence[str], ways: Sequence[str], cache: str, jobs: int) -> Iterator[Report]:
    """The reports of models, several at a time, as they come."""
    found: queue.SimpleQueue[Report | None] = queue.SimpleQueue()

    def work(part: Sequence[str]) -> None:
        try:
            for report in run_all(part, ways, cache):
                found.put(report)
        finally:
            found.put(None)

    with ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(work, names[k::jobs]) for k in range(jobs)]
        left = jobs
        while left:
            report = found.get()
            if report is None:
                left -= 1
            else:
                yield report
        for task in tasks:
            task.result()


def facts() -> dict[str, str]:
    compiler = subprocess.run(["gcc", "--version"], capture_output=True, text=True).stdout.splitlines()[:1]
    packages = {p: version(p) for p in ("torch", "transformers", "onnx", "onnxscript", "numpy")}
    return {
        **environment(),
        **packages,
        "compiler": "".join(compiler),
    }


def summary(reports: Sequence[Report], measured: str = "") -> str:
    """The Markdown page."""
    parts = (__doc__ or "").split("\n\n")
    lines = ["# Tiny models of many families through compiled C", "", parts[3].replace("\n", " "), ""]
    lines += [parts[4].split(" Models run")[0].replace("\n", " ").strip(), ""]
    lines += [measured, ""] if measured else []
    statuses = ("right", "refused", "export failed", "exporter differs", "wrong", "crashed")
    lines += ["| way | " + " | ".join(statuses) + " |", "|---|" + "---:|" * len(statuses)]
    for way in WAYS:
        c = Counter(r["status"] for r in reports if r["way"] == way)
        lines.append(f"| {way} | " + " | ".join(str(c[s]) for s in statuses) + " |")
    lines += ["", "| model | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 1) + "|"]
    table = {(r["model"], r["way"]): r["status"] for r in reports}
    models = dict.fromkeys(r["model"] for r in reports)
    lines += [f"| {m} | " + " | ".join(table.get((m, way), "") for way in WAYS) + " |" for m in models]
    chosen = [(r["model"], f"{k}_implementation={v!r}") for r in reports for k, v in r.get("set", {}).items()]
    if chosen:
        lines += ["", "## Set before torch.onnx.export", "", *(f"* {m}: `{how}`" for m, how in chosen)]
    for status in statuses[1:]:
        some = [r for r in reports if r["status"] == status]
        if some:
            lines += ["", f"## {status.capitalize()}", ""]
            lines += [f"* {r['model']}, {r['way']}: `{r.get('why', '').replace('`', chr(39))[:400]}`" for r in some]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression for whole model names")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--jobs", type=int, default=2, help="models at a time")
    parser.add_argument("--update", action="store_true", help="with --only: put these results among the ones on file")
    parser.add_argument("--measured", default="", help="what the page says of when its parts were measured")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.ways)
        return
    every = list(families())
    names = [n for n in every if not args.only or re.fullmatch(args.only, n)]
    env = facts() if not args.only or args.update else {}
    started, reports = time.monotonic(), []
    with tempfile.TemporaryDirectory() as cache:
        for report in run_side_by_side(names, args.ways, cache, args.jobs):
            reports.append(report)
            print(
                report["status"],
                report["way"],
                report["model"],
                report.get("secs", ""),
                report.get("why", ""),
                flush=True,
            )
    print(dict(Counter((r["way"], r["status"]) for r in reports)), f"{time.monotonic() - started:.0f} s")
    path = RESULTS / "model_families.json"
    if not args.only or args.update:
        seen = {(r["model"], r["way"]): r for r in (json.loads(path.read_text())["cases"] if args.only else ())}
        seen |= {(r["model"], r["way"]): r for r in reports}
        kept = [seen[m, way] for m in every for way in WAYS if (m, way) in seen]
        record = {"environment": env, "cases": kept}
        write_page("model_families", summary(kept, args.measured).splitlines(), record, env, indent=0, quiet=True)
    sys.exit(1 if any(r["status"] in BAD for r in reports) else 0)


if __name__ == "__main__":
    main()
