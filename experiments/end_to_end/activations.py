"""MiniLM with int8 activations (`--activations int8`), its float32 build, and both of ONNX Runtime.

    python -m experiments.end_to_end.activations --work FOLDER --peer-python PYTHON [--trials 16] [--rounds 5]

FOLDER/minilm holds model.onnx, as `e2e.py` exports it; our records are added to FOLDER/c.db. ONNX Runtime's int8 model is the result of
`quantize_dynamic`: weights with a scale per column, activations with one scale and zero point per tensor. Cosines, least and mean,
compare embeddings of sentences of this repository's pages with our float32 build's. Contenders take turns on two threads. Writes
results/activations.json and .md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import Contender, in_rounds, serve, summary
from experiments.harness.e2e_cases import SIZES, decoder_of, geomean, head, inputs
from experiments.harness.pages import environment, write_page

KINDS = ("ours.f32", "ours.int8", "onnxruntime.f32", "onnxruntime.int8")


def runner(kind: str, folder: Path) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function of ids and mask."""
    if kind.startswith("ours"):
        from relax_tune.runtime.artifact import load_artifact

        model = load_artifact(folder / f"{kind}.rta").open()
        return model.run
    import onnxruntime

    path = folder / ("model.onnx" if kind.endswith("f32") else "model.int8.onnx")
    if not path.exists():
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(folder / "model.onnx", path, per_channel=True, weight_type=QuantType.QInt8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))


def answers(kind: str, folder: Path) -> Any:
    run = runner(kind, folder)
    sentences = [(a["ids"], a["mask"]) for a in map(np.load, sorted((folder / "sentences").glob("*.npz")))]

    def answer(case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        if case == "sentences":
            found = [np.asarray(run(s)[0], float).ravel() for s in sentences]
            return lambda: None, lambda: [x for f in found for x in f.tolist()]
        given = list(inputs("minilm", int(case), decoder_of(False)))
        return lambda: run(given), lambda: head(run(given))

    return answer


def prepare(folder: Path, trials: int) -> dict[str, str]:
    """Tune and build both of ours, and write the tokens of the sentences; return the notes of the int8 build."""
    from experiments.end_to_end import e2e, quality
    from relax_tune.database.store import open_store
    from relax_tune.tuner.job.device_job import device_job
    from relax_tune.tuner.job.devices import open_runner
    from relax_tune.tuner.quality.activation_loss import with_activation_loss
    from relax_tune.tuner.settings import Settings

    (folder / "sentences").mkdir(exist_ok=True)
    for number, call in enumerate(quality.calls()):
        np.savez(folder / "sentences" / f"{number:03}.npz", ids=call["input_ids"], mask=call["attention_mask"])
    module, notes = e2e.imported("minilm", folder), {}
    with open_store(f"sqlite:///{folder.parent / 'c.db'}") as store:
        for kind in ("f32", "int8"):
            settings = Settings(target="c", trials=trials, activations=kind)
            own = open_runner(settings)
            job = device_job(module, own.device_info(), store, settings)
            print(kind, job.tune(own).trials, "candidates", file=sys.stderr)
            built = with_activation_loss(job, job.tested_build(own))
            own.close()
            job.artifact(built).save(folder / f"ours.{kind}.rta")
            notes[kind] = "; ".join(built.notes)
    return notes


def cosines(found: Sequence[float], exact: Sequence[float]) -> list[float]:
    a, b = (np.reshape(x, (-1, 384)) for x in (found, exact))
    return [float(x @ y / np.sqrt((x @ x) * (y @ y))) for x, y in zip(a, b)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.work / "minilm"
    if args.serve:
        serve(answers(args.serve, folder))
        return
    if args.peer_python is None:
        parser.error("expected --peer-python PYTHON, of an environment with onnxruntime and onnx")
    before, notes = environment(), prepare(folder, args.trials)
    made = []
    for kind in KINDS:
        python = sys.executable if kind.startswith("ours") else args.peer_python
        made.append(
            Contender(
                kind, [python, "-m", "experiments.end_to_end.activations", "--work", str(args.work), "--serve", kind]
            )
        )
    embedded = {c.name: c.time("sentences", 1) for c in made}
    near = {n: cosines(e["head"], embedded[KINDS[0]]["head"]) for n, e in embedded.items() if "head" in e}
    times = summary(in_rounds(made, [str(n) for n in SIZES], args.rounds, 5, tolerance=2.0))
    for c in made:
        c.close()
    record = {"environment": before, "times": times, "cosines": near, "notes": notes, "trials": args.trials}
    write_page("activations", page(record), record, before)


def page(record: Any) -> list[str]:
    lines = [
        "# MiniLM with int8 activations",
        "",
        f"Written by `experiments/end_to_end/activations.py`, {record['trials']} trials per task; medians in milliseconds, in turns.",
        "",
        "| tokens | "
        + " | ".join(KINDS)
        + " | ours.int8 against ours.f32 | against the best int8 or f32 of ONNX Runtime |",
        "|---" * (len(KINDS) + 3) + "|",
    ]
    gains, leads = [], []
    for case, row in record["times"].items():
        ms = {n: row[n]["median_us"] / 1000 for n in KINDS if n in row}
        gains.append(ms["ours.f32"] / ms["ours.int8"])
        leads.append(min(v for n, v in ms.items() if n.startswith("onnx")) / ms["ours.int8"])
        cells = [f"{ms[n]:.2f}" if n in ms else "-" for n in KINDS]
        lines.append(f"| {case} | " + " | ".join(cells) + f" | {gains[-1]:.2f} | {leads[-1]:.2f} |")
    lines += [
        "",
        f"Geometric means: {geomean(gains):.2f} of our float32 build, {geomean(leads):.2f} of ONNX Runtime's best.",
    ]
    for name, found in record["cosines"].items():
        lines.append(
            f"Embeddings of {len(found)} sentences, {name}: cosine {min(found):.6f} at least, {np.mean(found):.6f} in the mean."
        )
    told = record["notes"]["int8"]
    return [*lines, "", f"The build says: {told}", "", json.dumps(record["environment"])]


if __name__ == "__main__":
    main()
