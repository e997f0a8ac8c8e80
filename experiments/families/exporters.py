"""Files of exporters and of tools that rewrite ONNX: right beside ONNX Runtime, or refused and why.

    python -m experiments.families.exporters --make             (writes the files that the installed packages can make)
    python -m experiments.families.exporters                    (tries the files, writes experiments/results/exporters.{json,md})
    python -m experiments.families.exporters --only 'qdq.*/bert'   (some files, printed)
    python -m experiments.families.exporters --only 'qdq.*' --update   (some files; the results of the others stay)

It needs onnxruntime. The packages of exporters exclude one another in one Python, hence `--make` may be called in several: each adds
the files that it can make, and names the packages that are missing. `exporter_torch.py` and `exporter_others.py` list the exporters and
their models.

Each file is imported without bounds, as `load_model(path)` does, and run at four sizes of each free dim on random inputs, and at the
first size on edge inputs: zeros, numbers a hundred times as large, and integers of the least value. It runs in the interpreter and,
with `--build`, as a program for target `c` with generic schedules. The results are compared with ONNX Runtime's, without its
optimizer, as `wild.py` does: shapes and types are ONNX Runtime's, integers and truth values are equal, and floats are within 1e-3 of
the largest value (2e-2 in a file of 16-bit floats), or within four times the difference that ONNX Runtime's optimizer makes, or twice
the difference that weights or inputs make that are moved by one unit in the last place (`moved`; inf where integers differ then, such
as places of equal scores).

Statuses: `right`; `refused`, an error of this package; `wrong`; `crashed`, another exception; `no peer`, ONNX Runtime does not run the
file, or its result is not determined by the standard; `not written`, the exporter failed before this package sees the file. The exit
status is 1 if a file is wrong or crashed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from experiments.families.exporter_others import OTHERS
from experiments.families.exporter_torch import TORCH, Exporter
from experiments.families.wild import CLOSE, OF_MOVED, OF_OPTIMISER, Peer, deviations, moved_text
from experiments.harness.pages import RESULTS, environment, write_page

LIMIT_SECS = 300
CLOSE_HALF = 2e-2
CLOSE_OF: Mapping[str, float] = {"svc": 5e-3}
"""Of probabilities of three classes, whose iteration ONNX Runtime ends at a residual of 0.005 / classes."""
BAD = ("wrong", "crashed")
Result = dict[str, Any]
Array = np.ndarray[Any, Any]


def exporters() -> Mapping[str, Exporter]:
    return {**TORCH, **OTHERS}


def cache_folder() -> Path:
    """Return the folder of the files: `EXPORTER/MODEL.onnx`, and `cases/MODEL.npz`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "relax-tune-exporters"


def stored_cases(folder: Path, name: str) -> list[dict[str, Array]]:
    """Return the inputs of a model by case, in the order of its inputs."""
    cases: dict[int, dict[str, Array]] = {}
    with np.load(folder / "cases" / f"{name}.npz") as arrays:
        for key in arrays:
            case, _, given = key.partition("/")
            cases.setdefault(int(case), {})[given] = arrays[key]
    return [cases[k] for k in sorted(cases)]


# Making files


def one_line(error: BaseException, length: int = 200) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:length]


def _made(folder: Path, exporter: str, model: str) -> None:
    path = folder / exporter / f"{model}.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    note = path.with_suffix(".txt")
    note.unlink(missing_ok=True)
    os.chdir(path.parent)  # tools leave files in the current folder
    try:
        exporters()[exporter].make(folder, model, path)
    except Exception as error:
        path.unlink(missing_ok=True)
        note.write_text(one_line(error))


def in_process(target: Any, arguments: Sequence[Any], limit_secs: float) -> str:
    """Run a function in a process of its own; return "" or how it ended."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    process.join(limit_secs)
    if process.is_alive():
        process.kill()
        process.join()
        return f"more than {limit_secs:.0f} s"
    return f"exit status {process.exitcode}" if process.exitcode else ""


def missing_packages(exporter: Exporter) -> list[str]:
    return [p for p in exporter.packages if find_spec(p) is None]


def make(folder: Path, only: str, again: bool) -> None:
    """Write the files that the installed packages can make, and print those that are missing."""
    for name, exporter in exporters().items():
        missing = missing_packages(exporter)
        for model in exporter.models:
            path = folder / name / f"{model}.onnx"
            if (only and not re.search(only, f"{name}/{model}")) or (path.exists() and not again):
                continue
            if missing:
                print(f"{name}: missing {', '.join(missing)}", flush=True)
                break
            for package in exporter.packages:  # once, before the processes of the files
                import_module(package)
            ended = in_process(_made, (folder, name, model), LIMIT_SECS)
            note = path.with_suffix(".txt")
            if ended:
                path.unlink(missing_ok=True)
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(ended)
            print(f"{name}/{model}: {note.read_text() if note.exists() else 'written'}", flush=True)


# Trying files


def fitted(proto: Any, case: Mapping[str, Array]) -> dict[str, Array] | None:
    """Return a case by the names of the inputs of a file and in its types; None where a fixed dim differs."""
    import onnx

    constants = {t.name for t in proto.graph.initializer}
    given = [i for i in proto.graph.input if i.name not in constants]
    arrays = [case[i.name] for i in given] if all(i.name in case for i in given) else list(case.values())
    if len(arrays) != len(given):
        arrays = arrays[: len(given)]  # an input that no node reads was left off
    feeds = {}
    for i, a in zip(given, arrays, strict=True):
        dims = [d.dim_value if d.HasField("dim_value") else None for d in i.type.tensor_type.shape.dim]
        if len(dims) != a.ndim or any(d is not None and d != n for d, n in zip(dims, a.shape)):
            return None
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type))
        feeds[i.name] = a.astype(dtype)
    return feeds


def as_array(value: Any) -> Array:
    """Return a result of ONNX Runtime as an array; of dictionaries, as of ZipMap, their values."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return np.array([[*one.values()] for one in value], np.float32)
    return np.asarray(value)


def operators(proto: Any) -> list[str]:
    """Return the operators of other domains in a file."""
    return sorted({f"{n.domain}.{n.op_type}" for n in proto.graph.node if n.domain not in ("", "ai.onnx")})


def exact_copy(path: Path) -> Path:
    """Return a file whose products of weights in blocks take activations as they are; at level 4 they are rounded to 8 bits first."""
    import onnx

    proto = onnx.load(str(path))
    levels = [a for n in proto.graph.node for a in n.attribute if a.name == "accuracy_level" and a.i]
    if not levels:
        return path
    for a in levels:
        a.i = 0
    copy = path.with_suffix(".exact")
    onnx.save(proto, str(copy))
    return copy


class Runtime(Peer):
    """ONNX Runtime, with its optimizer where that takes the file, and without."""

    def __init__(self, path: Path) -> None:
        self.path, self.least = exact_copy(path), 1
        path = self.path
        plain = self._session(str(path), optimised=False)
        try:
            self.sessions, self.optimised = [self._session(str(path)), plain], True
        except Exception:  # its optimizer takes fewer files than it runs
            self.sessions, self.optimised = [plain, plain], False

    def _session(self, model: str | bytes, optimised: bool = True, threads: int = 1, exact: bool = True) -> Any:
        return super()._session(model, optimised and getattr(self, "optimised", True), threads, exact)


def _halves(proto: Any) -> bool:
    half = {10, 16}
    return any(t.data_type in half for t in proto.graph.initializer) or any(
        i.type.tensor_type.elem_type in half for i in proto.graph.input
    )


def _within(errors: Sequence[float], limits: Sequence[float], least: float) -> bool:
    return all(e <= max(limit, least) for e, limit in zip(errors, limits, strict=True))


def _judged(
    peer: Runtime, feeds: Sequence[Mapping[str, Array]], found: Sequence[Sequence[Array]], close: float
) -> Result:
    """Compare results by case with ONNX Runtime's."""
    worst, moved = 0.0, 0.0
    for k, (call, own) in enumerate(zip(feeds, found, strict=True)):
        wanted = [as_array(a) for a in peer.run(call, optimised=False)]
        plain = deviations([as_array(a) for a in peer.run(call)], wanted)
        away = deviations(own, wanted)
        near = [max(close, OF_OPTIMISER * p) for p in plain]
        if not moved and not _within(away, near, 0.0):
            moved = peer.spread(feeds)
        if not _within(away, near, OF_MOVED * moved):
            shapes = [(f.shape, w.shape) for f, w in zip(map(np.asarray, own), wanted) if f.shape != w.shape]
            kinds = [(str(f.dtype), str(w.dtype)) for f, w in zip(map(np.asarray, own), wanted) if f.dtype != w.dtype]
            return {
                "status": "wrong",
                "error": max(away),
                "why": f"case {k}: {max(away):.1e}, moved {moved:.1e} {shapes} {kinds}",
            }
        worst = max(worst, *away)
    return {"status": "right", "error": worst, "moved": moved, "cases": len(feeds)}


def attempt(folder: Path, path: Path, build: bool) -> Result:
    """Import and run one file."""
    import onnx

    import relax_tune as rt
    from relax_tune.errors import RelaxTuneError
    from relax_tune.ir.interp.interp_graph import run_function

    proto = onnx.load(str(path))
    feeds = [f for c in stored_cases(folder, path.stem) if (f := fitted(proto, c)) is not None]
    facts: Result = {"operators": operators(proto)}
    peer: Runtime | None = None
    try:
        peer = Runtime(path)
        problems = [_problem(peer, f) for f in feeds]
        feeds = [f for f, problem in zip(feeds, problems, strict=True) if not problem]
        facts["peer"] = next(filter(None, problems), "")
    except Exception as error:
        facts["peer"] = one_line(error)
    try:
        module = rt.load_model(path)
        if peer is None or not feeds:
            return facts | {"status": "no peer", "why": facts["peer"] or "no case fits its fixed dims"}
        as_list = lambda r: list(r) if isinstance(r, (tuple, list)) else [r]
        results = [as_list(run_function(module, "main", list(f.values()))) for f in feeds]
        close = CLOSE_HALF if _halves(proto) else CLOSE_OF.get(path.stem, CLOSE)
        judged = _judged(peer, feeds, results, close)
        if judged["status"] == "wrong" and _overflowed(proto):
            return facts | {
                "status": "no peer",
                "why": "a scale of inf, whose results depend on the integer that NaN becomes",
            }
        if build and judged["status"] == "right":
            artifact = rt.build(module, target="c", db="memory://", policy="generic", self_test=False)
            with artifact.open() as model:
                results = [list(model.run(list(f.values()))) for f in feeds]
            judged = _judged(peer, feeds, results, close) | {"built": True}
        return facts | judged
    except RelaxTuneError as error:
        status = "no peer" if peer is None or not feeds else "refused"
        return facts | {"status": status, "why": facts["peer"] if status == "no peer" else str(error)}


def _overflowed(proto: Any) -> bool:
    """Return whether a scale of integers is not finite: 0 times it is NaN, and what integer NaN becomes is left open by the standard."""
    import onnx

    scales = {n.input[1] for n in proto.graph.node if n.op_type == "DequantizeLinear"}
    arrays = (onnx.numpy_helper.to_array(t) for t in proto.graph.initializer if t.name in scales)
    return any(not np.isfinite(a.astype(np.float64)).all() for a in arrays)


def _problem(peer: Runtime, feeds: Mapping[str, Array]) -> str:
    """Return why ONNX Runtime does not run a case; "" if it does."""
    try:
        peer.run(feeds, optimised=False)
        peer.run(feeds)
    except Exception as error:
        return one_line(error)
    return ""


def _child(folder: Path, path: Path, build: bool, out: Path) -> None:
    try:
        result = attempt(folder, path, build)
    except Exception as error:
        result = {"status": "crashed", "why": one_line(error, 300), "trace": traceback.format_exc()[-2500:]}
    out.write_text(json.dumps(result, default=float))


def tried(folder: Path, path: Path, build: bool, limit_secs: float) -> Result:
    """Try a file in a process of its own."""
    out = path.with_suffix(".result.json")
    out.unlink(missing_ok=True)
    ended = in_process(_child, (folder, path, build, out), limit_secs)
    result: Result = json.loads(out.read_text()) if out.exists() else {"status": "crashed", "why": ended}
    out.unlink(missing_ok=True)
    return result


# The page


def row(r: Result) -> str:
    why = " ".join(str(r.get("why", "")).split())[:260].replace("|", "\\|")
    error = f" ({r['error']:.0e}{moved_text(r)})" if r.get("error") else ""
    kind = "" if r["status"] != "right" else "interpreter, C" if r.get("built") else "interpreter"
    names = " ".join(o.rpartition(".")[2] for o in r.get("operators", ()))
    return f"| {r['exporter']} | {r['model']} | {r['status']}{f': {why}' if why else error} | {kind} | {names} |"


def page(results: Sequence[Result], missing: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of the page."""
    about = (__doc__ or "").split("\n\n")
    kinds = Counter(r["status"] for r in results)
    counts = [f"* files: {len(results)}; " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())]
    commits = Counter(r["commit"] for r in results)
    if len(commits) > 1:
        counts.append("* tried at several commits: " + ", ".join(f"{n} files at {c}" for c, n in commits.most_common()))
    counts += [f"* {name}: not tried; missing {', '.join(packages)}" for name, packages in missing.items()]
    head = [
        "| exporter | model | status (largest error) | run by | operators of other domains |",
        "|---|---|---|---|---|",
    ]
    text = [" ".join(p.split()) for p in about[2:5]]
    return [
        "# Files of exporters and tools",
        "",
        *(x for p in text for x in (p, "")),
        *counts,
        "",
        *head,
        *map(row, results),
    ]


def save(results: Mapping[tuple[str, str], Result], facts: Mapping[str, Any]) -> None:
    """Write the page and its record, in the order of the exporters."""
    places = {name: at for at, name in enumerate(exporters())}
    ordered = sorted(results.values(), key=lambda r: (places.get(r["exporter"], len(places)), r["model"]))
    tried_ones = {r["exporter"] for r in ordered}
    missing = {n: p for n, e in exporters().items() if n not in tried_ones and (p := missing_packages(e))}
    write_page("exporters", page(ordered, missing), {"environment": dict(facts), "results": ordered}, facts, quiet=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--make", action="store_true", help="write the files")
    parser.add_argument("--again", action="store_true", help="with --make: those that are there, too")
    parser.add_argument("--only", default="", help="a regular expression that EXPORTER/MODEL contains")
    parser.add_argument(
        "--update", action="store_true", help="write the page; the results on record of other files stay"
    )
    parser.add_argument("--build", action="store_true", help="also build and run programs for target c")
    parser.add_argument("--limit-secs", type=float, default=LIMIT_SECS, help="most seconds for one file")
    parser.add_argument("--folder", type=Path, default=None, help="folder of the files")
    args = parser.parse_args()
    folder = (args.folder or cache_folder()).resolve()
    if args.make:
        make(folder, args.only, args.again)
        return 0
    if find_spec("onnxruntime") is None:
        parser.error("onnxruntime is not installed in this Python")
    for module in ("onnx", "onnxruntime", "relax_tune.ir.frontend.load", "relax_tune.ir.interp.interp_graph"):
        import_module(module)  # once, before the processes of the files
    facts = environment()
    results: dict[tuple[str, str], Result] = {}
    if args.update and (RESULTS / "exporters.json").exists():
        record = json.loads((RESULTS / "exporters.json").read_text())
        results = {(r["exporter"], r["model"]): r for r in record["results"]}
    tried_now = []
    for name, exporter in exporters().items():
        for model in exporter.models:
            path = folder / name / f"{model}.onnx"
            note = path.with_suffix(".txt")
            if (args.only and not re.search(args.only, f"{name}/{model}")) or not (path.exists() or note.exists()):
                continue
            failed = {"status": "not written", "why": note.read_text() if note.exists() else ""}
            result = failed if note.exists() else tried(folder, path, args.build, args.limit_secs)
            result |= {"exporter": name, "model": model, "commit": facts["commit"]}
            print(row(result), result.pop("trace", ""), flush=True)
            results[name, model] = result
            tried_now.append(result)
            if args.update:  # a long run that is stopped has its results
                save(results, facts)
    if args.update or not args.only:
        save(results, facts)
    print(", ".join(f"{n} {kind}" for kind, n in Counter(r["status"] for r in tried_now).most_common()))
    return int(any(r["status"] in BAD for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
