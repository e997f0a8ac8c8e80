"""MiniLM tuned on each OpenCL driver of a processor, and ONNX Runtime and OpenVINO, on two threads.

    python -m experiments.end_to_end.opencl_drivers --work FOLDER --peer-python PYTHON [--openvino-python PYTHON] [--prefix ENVIRONMENT]
        [--drivers wheel,debian,rusticl,intel] [--trials 16] [--rounds 5]

`--peer-python` has torch, transformers, onnxscript and onnxruntime, `--openvino-python` has openvino and numpy, and ENVIRONMENT is the
folder of one with the wheels of Intel's runtime. The processes that tune and time a driver see no other driver; its build takes turns
with the peers, and torch eager gives the reference results in the first round. The page lists drivers that are not installed.

Exports, records and times stay in FOLDER; `--again` measures all times again. The page shows all drivers that were timed in FOLDER.
Writes results/opencl_drivers.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import Answer, Contender, in_rounds, serve, summary
from experiments.harness.e2e_cases import decoder_of, geomean, head, inputs, ratios
from experiments.harness.pages import environment, write_page

DRIVERS = ("wheel", "debian", "rusticl", "intel")
PEERS = ("onnxruntime", "openvino")
REFERENCE, OURS = "torch-eager", "ours"
LENGTHS = (1, 16, 64, 128, 512)
THREADS, REPEATS, TOLERANCE, GOAL = 2, 3, 1e-3, 1.0
Run = Callable[[Sequence[Any]], Sequence[Any]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def driver_of(name: str) -> Any:
    """Return the driver of a name of DRIVERS."""
    from tests.support.opencl_drivers import DRIVERS as OTHERS
    from tests.support.opencl_drivers import Driver

    wheel = Driver("PoCL's wheel", "PoCL 3.0", "pip install 'relax-tune[opencl]'")
    return dict(zip(DRIVERS, (wheel, *OTHERS), strict=True))[name]


def variables(name: str, folder: Path, prefix: str) -> dict[str, str] | None:
    """Return the environment variables that restrict a process to a driver; None if the driver is not installed."""
    drivers = folder / "icd"
    drivers.mkdir(parents=True, exist_ok=True)
    if name != "wheel":
        found: dict[str, str] | None = driver_of(name).environment(drivers.resolve(), prefix)
        return found
    from relax_tune.runtime.device.opencl import all_devices

    listed = any(driver_of(name).part in label for label, _ in all_devices())
    return {"OCL_ICD_VENDORS": f"{drivers.resolve()}/"} if listed else None


def tune(name: str, work: Path, trials: int, caches: Any) -> None:
    """Measure what the driver's database lacks and save its artifact; return the figures of tuning."""
    from experiments.end_to_end import e2e
    from relax_tune.database.store import open_store
    from relax_tune.tuner.job.device_job import device_job
    from relax_tune.tuner.job.devices import open_runner
    from relax_tune.tuner.settings import Settings

    folder, module = work / name, e2e.imported("minilm", work / "minilm")
    done = json.loads((folder / "tuned.json").read_text()) if (folder / "tuned.json").exists() else {}
    settings = Settings(target=f"opencl:{driver_of(name).part}", trials=trials, caches=caches)
    with open_store(f"sqlite:///{folder / 'records.db'}") as store:
        runner = open_runner(settings)
        job = device_job(module, runner.device_info(), store, settings)
        found = job.tune(runner, lambda p: say(f"  {p.task[:48]:48} {p.trials:4}"))
        built = job.tested_build(runner)
        runner.close()
        job.artifact(built).save(folder / "model.rta")
    fingerprint = dict(job.device.fingerprint)
    told = {
        "version": f"{fingerprint['platform'].split('  ')[0]}, driver {fingerprint['driver']}",
        "device": fingerprint["device"],
        "trials": trials,
        "caches": caches,
        "candidates": done.get("candidates", 0) + found.trials,
        "secs": round(done.get("secs", 0) + found.wall_secs),
        "problems": [": ".join(p) for p in found.problems],
        "notes": list(built.notes),
    }
    (folder / "tuned.json").write_text(json.dumps(told))


def runner_of(kind: str, work: Path) -> Run:
    """Return a function of ids and mask."""
    if kind in DRIVERS:
        from relax_tune.runtime.artifact import load_artifact

        return load_artifact(work / kind / "model.rta").open(device=f"opencl:{driver_of(kind).part}").run
    path = str(work / "minilm" / "model.onnx")
    if kind == "openvino":
        import openvino

        # its default is bfloat16 where the processor has it: others would be compared with another precision
        hints = {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        request = openvino.Core().compile_model(path, "CPU", hints).create_infer_request()
        return lambda arrays: list(request.infer(dict(enumerate(arrays))).values())
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))


def answers(kind: str, work: Path) -> Answer:
    """Return the cases of a contender, each a length."""
    run = runner_of(kind, work)

    def answer(case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        given = list(inputs("minilm", int(case), decoder_of(False)))
        return lambda: run(given), lambda: head([np.asarray(r) for r in run(given)])

    return answer


def offered(own: Mapping[str, str], *arguments: str) -> list[str]:
    """Return a command that calls this script with more variables."""
    return [
        "env",
        *(f"{k}={v}" for k, v in own.items()),
        sys.executable,
        "-m",
        "experiments.end_to_end.opencl_drivers",
        *arguments,
    ]


def timed(name: str, own: Mapping[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """Time a driver's build and the peers in turns; why some were not timed, by contender."""
    before = environment()
    work, cases = str(args.work), [str(n) for n in LENGTHS]
    eager = ["-m", "experiments.end_to_end.peers", "serve", REFERENCE, "minilm", str(args.work / "minilm")]
    made = [Contender(REFERENCE, [args.peer_python, *eager], rounds=1)]
    try:
        for peer, python in (("onnxruntime", args.peer_python), ("openvino", args.openvino_python)):
            if python is not None:
                made.append(
                    Contender(
                        peer, [python, "-m", "experiments.end_to_end.opencl_drivers", "--work", work, "--serve", peer]
                    )
                )
        made.append(Contender(OURS, offered(own, "--work", work, "--serve", name)))
        times = summary(in_rounds(made, cases, args.rounds, REPEATS, TOLERANCE))
    finally:
        for c in made:
            c.close()
    failed = {}
    for c in made:
        missing = [n for n in cases if c.name not in times[n]]
        if missing:
            failed[c.name] = f"failed, or gave other numbers than {REFERENCE}, at {', '.join(missing)}"
    return {"times": times, "failed": failed, "environment": before, "rounds": args.rounds}


def measured(name: str, args: argparse.Namespace) -> None:
    """Tune and time one driver, and write the results to its folder."""
    folder = args.work / name
    own = variables(name, folder, args.prefix)
    if own is None:
        say(f"{driver_of(name).name}: not installed: {driver_of(name).install}")
        return
    done = json.loads((folder / "tuned.json").read_text()) if (folder / "tuned.json").exists() else {}
    if (done.get("trials"), done.get("caches")) != (args.trials, args.caches):
        (folder / "times.json").unlink(missing_ok=True)
        arguments = ("--work", str(args.work), "--tune", name, "--trials", str(args.trials), "--caches", args.caches)
        subprocess.run(offered(own, *arguments), check=True)
    if args.again or not (folder / "times.json").exists():
        say(f"{driver_of(name).name}: timing")
        (folder / "times.json").write_text(json.dumps(timed(name, own, args)))


def missing_line(name: str, prefix: str, work: Path) -> str:
    """Return the line of a driver without times."""
    driver = driver_of(name)
    if variables(name, work / name, prefix) is None:
        return f"{driver.name} is not installed: `{driver.install}`."
    return f"{driver.name} is installed and was not timed: `--drivers {name}`."


def page(found: Mapping[str, Any], missing: Sequence[str]) -> list[str]:
    """Return a table of drivers, a table of times, and the drivers that could not be timed."""
    lines = [
        "# OpenCL drivers: MiniLM",
        "",
        f"Written by `experiments/end_to_end/opencl_drivers.py`: medians in milliseconds on {THREADS} threads, each driver in turns "
        "with the peers.",
        "",
        "| driver | version | device | trials per task | candidates | seconds of tuning |",
        "|---" * 6 + "|",
    ]
    for r in found.values():
        t = r["tuning"]
        cells = (r["driver"], t["version"], t["device"], t["trials"], t["candidates"], t["secs"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| driver | contender | " + " | ".join(f"n={n}" for n in LENGTHS) + " | geometric mean |"]
    lines += ["|---" * (len(LENGTHS) + 3) + "|"]
    means = {}
    for r in found.values():
        medians = {case: {c: v["median_us"] / 1000 for c, v in row.items()} for case, row in r["times"].items()}
        for contender in (OURS, *PEERS):
            cells = [f"{row[contender]:.2f}" if contender in row else "-" for row in medians.values()]
            lines.append(f"| {r['driver']} | {contender} | " + " | ".join(cells) + " | |")
        against = ratios(medians, OURS, PEERS)
        means[r["driver"]] = geomean(list(against.values()))
        cells = [f"{against[n]:.2f}" if n in against else "-" for n in medians]
        lines.append(
            f"| {r['driver']} | **best peer / ours** | " + " | ".join(cells) + f" | {means[r['driver']]:.2f} |"
        )
    lines.append("")
    compared = {n: m for n, m in means.items() if m == m}
    if compared:
        best = max(compared, key=lambda n: compared[n])
        lines += [f"Best driver: {best}, {compared[best]:.2f} of the best peer (goal: {GOAL}).", ""]
    for r in found.values():
        told = [f"{c}: {why}" for c, why in r["failed"].items()] + r["tuning"]["problems"] + r["tuning"]["notes"]
        lines += [f"{r['driver']}, {text}" for text in told]
    lines += missing
    return lines


def options() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python", help="a Python with torch, transformers, onnxscript and onnxruntime")
    parser.add_argument("--openvino-python", help="a Python with openvino; left out without it")
    parser.add_argument("--prefix", default=sys.prefix, help="the environment with the wheels of Intel's runtime")
    parser.add_argument("--drivers", default=",".join(DRIVERS))
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--caches", choices=("warm", "model"), default="model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--again", action="store_true", help="time what was timed before")
    parser.add_argument("--tune", choices=DRIVERS, help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=(*DRIVERS, *PEERS), help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = options()
    args = parser.parse_args()
    if args.serve:
        serve(answers(args.serve, args.work))
        return
    if args.tune:
        tune(args.tune, args.work, args.trials, args.caches)
        return
    names = args.drivers.split(",")
    if unknown := set(names) - set(DRIVERS):
        parser.error(f"--drivers: expected some of {', '.join(DRIVERS)}, got {', '.join(sorted(unknown))}")
    if args.peer_python is None:
        parser.error("expected --peer-python PYTHON, of an environment with torch, transformers and onnxruntime")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    from experiments.end_to_end import e2e

    (args.work / "minilm").mkdir(parents=True, exist_ok=True)
    if failed := e2e.prepare("minilm", args.work, args.peer_python, False, False):
        raise SystemExit(f"minilm: no model for the peers: {failed}")
    for name in names:
        measured(name, args)
    found, missing = {}, []
    for name in DRIVERS:
        folder = args.work / name
        if not (folder / "times.json").exists():
            missing.append(missing_line(name, args.prefix, args.work))
            continue
        tuning = json.loads((folder / "tuned.json").read_text())
        found[name] = {
            "driver": driver_of(name).name,
            "tuning": tuning,
            **json.loads((folder / "times.json").read_text()),
        }
    measured_on = {r["driver"]: r["environment"] for r in found.values()}
    write_page("opencl_drivers", page(found, missing), {"drivers": found, "missing": missing}, measured_on)


if __name__ == "__main__":
    main()
