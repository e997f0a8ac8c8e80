"""Cost of a decoder's caches per step: on the device and extended in place, passed in and out, or copied by a kernel.

    python -m experiments.end_to_end.decode_caches --work FOLDER [--target c] [--trials 4] [--rounds 7]

A Llama-style decoder with weights from a seed, four layers, grouped heads, one row and eight. `session`: a session (in place). `run`:
`Model.run`, whose results are the next arguments. `copied`: the same with a build that concatenates into fresh memory. Steps at growing
numbers of past positions, in turns; the median of rounds. Writes results/decode_caches_TARGET.json and .md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.decoder_folder import write_folder
from experiments.harness.e2e_cases import Decoder
from experiments.harness.pages import environment, write_page
from relax_tune.database.store import open_store
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.passes.pipeline import lower, passes_for
from relax_tune.runtime.model import Model
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import device_info, open_runner
from relax_tune.tuner.settings import Settings

DECODER, POSITIONS = Decoder(layers=4, vocabulary=1000), 8200
PAST = (64, 256, 1024, 4096, 8000)
ROWS = (1, 8)
STEPS = 8


def built(job: DeviceJob, name: str, work: Path) -> Model:
    """Tune tasks without records, then build, save and open the model."""
    runner = open_runner(job.settings)
    job.tune(runner)
    runner.close()
    path = work / f"{name}.rta"
    artifact = job.artifact(job.build())
    artifact.save(path)
    return artifact.open()


def caches(rows: int, past: int) -> list[np.ndarray]:
    rng, shape = np.random.default_rng([rows, past]), (rows, DECODER.groups, past, DECODER.head_size)
    return [rng.standard_normal(shape, np.float32) for _ in range(2 * DECODER.layers)]


def stepped(run: Callable[[], Any]) -> float:
    """Median seconds of a few steps."""
    found = []
    for _ in range(STEPS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def fed(model: Model, ids: np.ndarray, state: list[np.ndarray]) -> Callable[[], Any]:
    """A step of calls that are fed with their own results."""

    def step() -> None:
        _, *state[:] = model.run([ids, *state], "decode")

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", default="c")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    before = environment()
    args.work.mkdir(parents=True, exist_ok=True)
    module = load_model(
        write_folder(args.work / "llama", DECODER, POSITIONS),
        bounds={"b": (1, 8), "n": (1, 64), "m": (0, POSITIONS - 100)},
    )
    settings = Settings(target=args.target, trials=args.trials)
    times: dict[str, dict[str, list[float]]] = {}
    with open_store(f"sqlite:///{args.work / f'{args.target}.db'}") as store:
        info = device_info(args.target)
        kept, plain = (device_job(module, info, store, settings) for _ in range(2))
        vars(plain.model)["lowered"] = lower(module, passes_for())
        with built(kept, "kept", args.work) as own, built(plain, "plain", args.work) as other:
            for _ in range(args.rounds):
                for rows in ROWS:
                    ids = np.ones((rows, 1), np.int64)
                    for past in PAST:
                        case = times.setdefault(f"{rows} x {past}", {"session": [], "run": [], "copied": []})
                        with own.session(caches(rows, past), "decode") as session:
                            session.run([ids])
                            case["session"].append(stepped(lambda ids=ids, session=session: session.run([ids])))
                        for name, model in (("run", own), ("copied", other)):
                            step = fed(model, ids, caches(rows, past))
                            step()
                            case[name].append(stepped(step))
    found = {case: {n: statistics.median(s) for n, s in by.items()} for case, by in times.items()}
    write(args.target, found, before)


def write(target: str, found: Mapping[str, Mapping[str, float]], before: Mapping[str, Any]) -> None:
    lines = [
        f"# A decoder's caches, {target}", "",
        "Written by `experiments/end_to_end/decode_caches.py`, which describes the comparison. Milliseconds per step, medians in "
        "turns.", "",
        "| rows x past | session | run | copied | copied / session | copied / run |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for case, by in found.items():
        cells = [f"{by[n] * 1e3:.3g}" for n in ("session", "run", "copied")]
        gains = [f"{by['copied'] / by[n]:.2f}" for n in ("session", "run")]
        lines.append(f"| {case} | {' | '.join([*cells, *gains])} |")
    write_page(f"decode_caches_{target}", lines, {"times": found, "environment": before}, before)


if __name__ == "__main__":
    main()
