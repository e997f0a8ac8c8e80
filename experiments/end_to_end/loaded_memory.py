"""Memory of processes that load a model and call it: ours, an earlier commit's, ONNX Runtime's and OpenVINO's.

    python -m experiments.end_to_end.loaded_memory --work FOLDER --peer-python PYTHON [--before CHECKOUT] [--only CASE,...]

Models of the sizes of BERT base, GPT-2, ViT base and ResNet-50 with weights from a seed (`memory_models`, which the peers' Python runs).
Ours are built without records (`policy="predicted"`), with kernels compiled for this processor; the builds stay in the folder. Int8 is
ours with `activations="int8"`, and `quantize_dynamic` of ONNX Runtime for the peers. Each case is a new process: it imports the runtime,
loads the model, and calls it 21 times with a batch of 1 and 128 tokens, or an image of 224 x 224. The peers' decoder is a prefill that
returns no caches; with `decode`, ours runs a step after each prefill, over the same weights.

Memory is VmHWM and smaps_rollup of the process: the peak, and what is resident at the end, by anonymous memory and by files. Nothing is
timed. `weights` and `activations` are the planned bytes. Writes results/loaded_memory.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.harness.pages import ROOT, environment, write_page

CASES = ("bert", "bert.int8", "gpt2", "gpt2.decode", "gpt2.int8", "gpt2.int8.decode", "vit", "resnet50")
CALLS = 20
PEERS = ("onnxruntime", "openvino")
BUILD = """
import sys, relax_tune as rt
folder, path, int8 = sys.argv[1:]
bounds = {"bert": {"b": (1, 8), "n": (1, 512)}, "gpt2": {"b": (1, 1), "n": (1, 512), "m": (1, 511)}}
name = folder.rpartition("/")[2]
model = rt.load_model(folder, bounds=bounds.get(name, {"b": (1, 8)}))
more = {"activations": "int8"} if int8 == "int8" else {}
rt.build(model, target="c", db="memory://", policy="predicted", cpu=["native"], self_test=False, **more).save(path)
"""


def built(case: str, work: Path, checkout: Path, name: str) -> Path:
    """Return the artifact of a case, built by a checkout unless it is there."""
    model, int8 = case.partition(".")[0], "int8" if "int8" in case else ""
    path = work / name / f"{model}{int8 and '.int8'}.rta"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        _run([sys.executable, "-W", "ignore", "-c", BUILD, str(work / model), str(path), int8], checkout)
    return path


def measured(kind: str, case: str, path: Path, python: str, checkout: Path = ROOT) -> dict[str, Any] | None:
    """Return what one process says; None if the runtime cannot run the model."""
    child = str(Path(__file__).with_name("memory_child.py"))
    try:
        return dict(json.loads(_run([python, child, kind, case, str(path), str(CALLS)], checkout).splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        print(f"{kind}, {case}: {error.stderr[-2000:]}", file=sys.stderr)
        return None


def _run(command: Sequence[str], checkout: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{checkout / 'src'}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def case_of(case: str, work: Path, peer_python: str, before: Path | None) -> dict[str, Any]:
    """Measure all runtimes on one case."""
    records = {"now": measured("relax-tune", case, built(case, work, ROOT, "now"), sys.executable)}
    if before is not None:
        path = built(case, work, before, "before")
        records["before"] = measured("relax-tune", case, path, sys.executable, before)
    if "decode" not in case:
        onnx = work / case.partition(".")[0] / ("int8.onnx" if "int8" in case else "model.onnx")
        records |= {peer: measured(peer, case, onnx, peer_python) for peer in PEERS}
    return {name: record for name, record in records.items() if record is not None}


def page(results: dict[str, dict[str, Any]]) -> list[str]:
    columns = ("before", "now", *PEERS)
    lines = [
        "# Memory of loaded models",
        "",
        "Written by `experiments/end_to_end/loaded_memory.py`, which describes the cases; MB.",
    ]
    lines += [
        "",
        "Peak of the process:",
        "",
        f"| model | {' | '.join(columns)} | now / weights and activations |",
        "|---" * 6 + "|",
    ]
    for case, records in results.items():
        peaks = " | ".join(f"{records[c]['steps']['again']['peak']:.0f}" if c in records else "-" for c in columns)
        planned = sum(records["now"]["sizes"].values())
        lines.append(f"| {case} | {peaks} | {records['now']['steps']['again']['peak'] / planned:.2f} |")
    lines += ["", "Ours now, and where it is:", ""]
    lines += ["| model | weights | activations | imported | loaded | anonymous | files |", "|---" * 7 + "|"]
    for case, records in results.items():
        now, sizes = records["now"]["steps"], records["now"]["sizes"]
        parts = (sizes["weights"], sizes["activations"], now["imported"]["resident"], now["loaded"]["resident"])
        numbers = (*parts, now["again"]["anonymous"], now["again"]["files"])
        lines.append(f"| {case} | {' | '.join(f'{x:.0f}' for x in numbers)} |")
    lines += [
        "",
        "The interpreter, NumPy and relax_tune take about 50 MB, which is most of what small models need beyond their weights.",
    ]
    lines += [
        "GPT-2 in float32 has its table in two layouts (154 MB each), for lookups and for the product that shares it."
    ]
    lines += ["OpenVINO's int8 is the ONNX file of `quantize_dynamic`, too; files of its own tools were not measured."]
    same = [c for c, f in results.items() if "before" in f and f["before"]["result"] == f["now"]["result"]]
    return [*lines, "", f"Results of the same bits as before: {', '.join(same) or 'none'}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--only", default=",".join(CASES))
    arguments = parser.parse_args()
    facts, work = environment(), arguments.work.resolve()
    models = [arguments.peer_python, "-W", "ignore", "-m", "experiments.end_to_end.memory_models", str(work)]
    _run(models, ROOT)
    results = {c: case_of(c, work, arguments.peer_python, arguments.before) for c in arguments.only.split(",")}
    write_page("loaded_memory", page(results), {"environment": facts, "cases": results}, facts)


if __name__ == "__main__":
    main()
