"""The models of tests/data/encoder_decoders.npz as Hugging Face folders, and what torch made of them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

DATA = Path(__file__).parents[1] / "data"
MAKER = runpy.run_path(str(DATA / "make_encoder_decoders.py"))
SHAPES, PROMPT, GREEDY, BEAMS, START = (MAKER[n] for n in ("SHAPES", "PROMPT", "GREEDY", "BEAMS", "START"))
MODELS: tuple[str, ...] = tuple(MAKER["MODELS"])
inputs = MAKER["inputs"]


def write_encoder_decoder(folder: Path, name: str, **changes: Any) -> tuple[Path, dict[str, NDArray[Any]]]:
    """A model's folder, its configuration changed (a change of `...` removes the field), and what torch gives."""
    with np.load(DATA / "encoder_decoders.npz") as found:
        model = json.loads(found["models"].tobytes())[name]
        given = {k.removeprefix(f"{name}/"): found[k] for k in found.files if k.startswith(f"{name}/")}
    kept = {k: v for k, v in {**model["config"], **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file(
        {k: MAKER["weight"](name, k, tuple(shape)) for k, shape in model["shapes"].items()},
        folder / "model.safetensors",
    )
    return folder, given
