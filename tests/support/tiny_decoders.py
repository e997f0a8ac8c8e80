"""The decoders of tests/data/tiny_decoders.npz as Hugging Face folders, and what torch made of them."""

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
    with np.load(DATA / "tiny_decoders.npz") as found:
        config = json.loads(found[f"{name}/config"].tobytes())
        start = f"{name}/weights/"
        weights = {k.removeprefix(start): found[k] for k in found.files if k.startswith(start)}
        given = {k.removeprefix(f"{name}/"): found[k] for k in found.files if k.startswith((f"{name}/l", f"{name}/t"))}
    return config, weights, given


def write(folder: Path, name: str, **changes: Any) -> tuple[Path, Arrays]:
    """A model's folder, its configuration changed (a change of `...` removes the field), and what torch gives."""
    config, weights, given = parts(name)
    kept = {k: v for k, v in {**config, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file(weights, folder / "model.safetensors")
    return folder, given


def generated(name: str) -> Arrays:
    """What transformers generates with one model: `search/CASE/tokens` and `scores`, `uneven/CASE`."""
    with np.load(DATA / "generation.npz") as found:
        return {k.removeprefix(f"{name}/"): found[k] for k in found.files if k.startswith(f"{name}/")}
