"""Tasks of tiny models by every way to import them: records are shared as far as the keys of the tasks are equal.

    python -m experiments.families.ways_in                     (writes experiments/results/ways_in.md)
    python -m experiments.families.ways_in --only 'gpt2|vit'   (some models, printed)

It needs torch, transformers and onnxscript besides this package. The models are those of `models.py`.

A model is read from its folder, as a program of torch.export, and as the ONNX file that torch.onnx.export writes of the same program,
with the same bounds. Each is lowered, and the keys of its tasks are compared. A key is the hash of the normalised text of a tensor
function, in which names of symbols, buffers and weights do not occur.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.harness.pages import write_page

MODELS = {
    "sentence_mean": "MiniLM-like sentence encoder", "vit": "ViT", "llama31": "Llama", "gpt2": "GPT-2", "t5_encoder": "T5 encoder",
    "resnet50": "ResNet",
}  # fmt: skip
WAYS = ("folder", "torch", "onnx")
REASONS = """
## Why tasks differ

* An ONNX `Gather` allows negative indices, which count from the end: the table of words is read at `where(i < 0, i + rows, i)`.
  Folders and torch have no negative tokens.
* torch's exporter to ONNX turns the booleans of a mask into 0 and the lowest finite number. A row that sees no column is then the
  mean of all values; by torch and from a folder it is 0. Attention with that mask, and the mask, are separate tasks.
* The functions of a decoder's folder keep keys and values, take one token at a time, and have no mask of padding: their attention,
  rotation and caches differ from those of a program that gives the logits of all positions under a mask.
* Programs of torch compute the tables of a rotation from positions when they run. A folder's tables are weights.
* T5 of torch computes the buckets of relative positions when it runs. From a folder they are a table by distance. Its mask and its
  biases are added up once from a folder, and within attention by torch. torch.onnx.export fails on it.
* A ResNet's folder multiplies pooled vectors as one row of a matrix for each image, and torch as rows of one matrix.
"""
Tasks = Mapping[str, tuple[str, str]]


def modules(name: str) -> Iterator[tuple[str, Any]]:
    """The imported model by way, or the error that stops a way."""
    import torch

    from experiments.families.model_families import exported, first_line, from_folder
    from experiments.families.models import FAMILIES, draw
    from relax_tune.errors import RelaxTuneError
    from relax_tune.ir.frontend.onnx.importer import load_onnx
    from relax_tune.ir.frontend.torch.importer import load_torch_export

    family: Any = FAMILIES[name]
    torch.manual_seed(0)
    model: Any = draw(family.make())
    program = exported(model, family)
    try:
        yield "folder", from_folder(model)
    except RelaxTuneError as error:
        yield "folder", first_line(error, 120)
    from_torch = load_torch_export(program)
    yield "torch", from_torch
    try:
        proto = torch.onnx.export(program, dynamo=True, verbose=False).model_proto
    except Exception as error:
        yield "onnx", f"torch.onnx.export: {first_line(error, 120)}"
        return
    symbols = [b.var.name for b in load_onnx(proto).bounds]
    bounds = {s: (b.lower, b.upper) for s, b in zip(symbols, from_torch.bounds, strict=True) if b.upper is not None}
    yield "onnx", load_onnx(proto, bounds)


def tasks_of(module: Any) -> Tasks:
    """The name and the parameters of each task, by key."""
    from relax_tune.ir.passes.pipeline import lower
    from relax_tune.tuner.task.extract import extract_tasks

    found = {}
    for task in extract_tasks(lower(module)):
        signature = re.search(r"def main\((.*)\):", task.text)
        parts = re.findall(
            r"(?:Buffer|Const)\((\([^()]*(?:\([^()]*\)[^()]*)*\)), (\w+)", signature[1] if signature else ""
        )
        found[task.key] = task.func.name, " ".join(f"{dtype}{dims}" for dims, dtype in parts)
    return found


def report(name: str, found: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A row of the table, and the tasks that some ways lack."""
    tasks = {way: tasks_of(m) for way, m in found.items() if not isinstance(m, str)}
    every: dict[str, tuple[str, str]] = {}
    for own in tasks.values():
        every.update(own)
    having = {key: [w for w in WAYS if key in tasks.get(w, ())] for key in every}
    shared = sum(len(ways) == len(tasks) for ways in having.values())
    counts = [str(len(tasks[w])) if w in tasks else "-" for w in WAYS]
    pairs = [
        str(len(tasks[a].keys() & tasks[b].keys())) if a in tasks and b in tasks else "-"
        for a, b in (("folder", "torch"), ("torch", "onnx"), ("folder", "onnx"))
    ]
    lines = [
        f"* {', '.join(ways)}: `{every[key][0]}` {every[key][1]}"
        for key, ways in having.items()
        if len(ways) < len(tasks)
    ]
    failed = [f"* {way}: {why}" for way, why in found.items() if isinstance(why, str)]
    return f"| {MODELS[name]} | {' | '.join([*counts, *pairs, str(shared)])} |", failed + sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression for whole model names")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from experiments.families.model_families import facts

    rows, details = [], []
    for name, title in MODELS.items():
        if args.only and not re.fullmatch(args.only, name):
            continue
        row, lines = report(name, dict(modules(name)))
        print("\n".join([row, *lines]), flush=True)
        rows.append(row)
        details += [f"## {title}", "", *(lines or ["Every way gives the same tasks."]), ""]
    if not args.only:
        about = (__doc__ or "").split("\n\n")[3].replace("\n", " ").strip()
        head = [
            "| model | folder | torch | ONNX | folder and torch | torch and ONNX | folder and ONNX | all |",
            "|---" + "|---:" * 7 + "|",
        ]
        page = ["# Tasks by way in", "", about, "", *head, *rows, REASONS.rstrip(), "", *details]
        write_page("ways_in", "\n".join(page).rstrip().splitlines(), None, facts(), quiet=True)


if __name__ == "__main__":
    sys.exit(main())
