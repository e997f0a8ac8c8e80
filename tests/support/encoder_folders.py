"""Encoders of tests/data as Hugging Face folders, at weights drawn by name, and torch's results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_encoder(
    data: Path, maker: Mapping[str, Any], root: Path, name: str, **changes: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Write one model of an archive, its configuration changed, and return its results by torch.

    maker: names of the script that made the archive"""
    with np.load(data) as archive:
        config = {**json.loads(archive[f"{name}/config"].tobytes()), **changes}
        shapes = json.loads(archive[f"{name}/tensors"].tobytes())
        results = {k.removeprefix(f"{name}/"): archive[k] for k in archive.files if k.startswith(f"{name}/")}
    save_file({k: maker["weight"](k, tuple(shape)) for k, shape in shapes.items()}, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps(config))
    return results
