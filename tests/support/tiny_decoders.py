"""The decoders of tests/data/tiny_decoders.npz as Hugging Face folders, and torch's results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

DATA = Path(__file__).parents[1] / "data"
MAKER = runpy.run_path(str(DATA / "make_tiny_decoders.py"))
SHAPES, PROMPTS, ADDED, VOCABULARY = (MAKER[n] for n in ("SHAPES", "PROMPTS", "ADDED", "VOCABULARY"))
MODELS: tuple[str, ...] = tuple(MAKER["MODELS"])
MORE: tuple[str, ...] = tuple(MAKER["MORE"])
LLAMA3: dict[str, Any] = MAKER["LLAMA3"]
ids = MAKER["inputs"]
GENERATED = runpy.run_path(str(DATA / "make_generation.py"))
Arrays = dict[str, NDArray[Any]]


def parts(name: str) -> tuple[dict[str, Any], Arrays, Arrays]:
    """The configuration, weights, and what torch gives of one model: `logits_B_N`, `tokens_B_N`."""
    with np.load(DATA / "tiny_decoders.npz") as archive:
        config = json.loads(archive[f"{name}/config"].tobytes())
        start = f"{name}/weights/"
        weights = {k.removeprefix(start): archive[k] for k in archive.files if k.startswith(start)}
        expected = {
            k.removeprefix(f"{name}/"): archive[k] for k in archive.files if k.startswith((f"{name}/l", f"{name}/t"))
        }
    return config, weights, expected


def write(folder: Path, name: str, **changes: Any) -> tuple[Path, Arrays]:
    """A model's folder, its configuration changed (a change of `...` removes the field), and what torch gives."""
    config, weights, expected = parts(name)
    fields = {k: v for k, v in {**config, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(weights, folder / "model.safetensors")
    return folder, expected


def generated(name: str) -> Arrays:
    """What transformers generates with one model: `search/CASE/tokens` and `scores`, `uneven/CASE`."""
    with np.load(DATA / "generation.npz") as archive:
        return {k.removeprefix(f"{name}/"): archive[k] for k in archive.files if k.startswith(f"{name}/")}
