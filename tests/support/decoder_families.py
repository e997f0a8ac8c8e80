"""The decoders of tests/data/decoder_families.npz as Hugging Face folders, and torch's results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

DATA = Path(__file__).parents[1] / "data"
MAKER = runpy.run_path(str(DATA / "make_decoder_families.py"))
SHAPES, PROMPT, ADDED, VOCABULARY, KEPT = (MAKER[n] for n in ("SHAPES", "PROMPT", "ADDED", "VOCABULARY", "KEPT"))
MODELS: tuple[str, ...] = tuple(MAKER["MODELS"])
HYBRIDS = (
    "mamba2",
    "bamba",
    "granitemoehybrid",
    "granitemoehybrid_dense",
    "falcon_h1",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "rwkv",
)
"""Models with states of one size, which have no program that extends caches only."""
inputs = MAKER["inputs"]


def write_family(folder: Path, name: str, **changes: Any) -> tuple[Path, dict[str, NDArray[Any]]]:
    """A model's folder, its configuration changed (a change of `...` removes the field), and what torch gives."""
    with np.load(DATA / "decoder_families.npz") as archive:
        model = json.loads(archive["models"].tobytes())[name]
        expected = {
            k.removeprefix(f"{name}/"): archive[k] for k in archive.files if k.startswith((f"{name}/l", f"{name}/t"))
        }
    config = {k: v for k, v in {**model["config"], **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: MAKER["weight"](name, k, tuple(shape)) for k, shape in model["shapes"].items()},
        folder / "model.safetensors",
    )
    return folder, expected
