"""CONTRIBUTING's recipe for a family of models, followed literally in a copy of the importers: one product file changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
TABLE = Path("frontend") / "hf" / "families" / "decoders.py"
HIDDEN, HEADS, GROUPS, INNER, VOCABULARY, LAYERS, SIZE, SCALE = 16, 4, 2, 24, 31, 2, 4, 0.25
CONFIG = {
    "model_type": "kestrel", "architectures": ["KestrelForCausalLM"], "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "intermediate_size": INNER, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS,
    "max_position_embeddings": 32, "norm_eps": 1e-5, "logit_scale": SCALE,
}  # fmt: skip
SCRIPT = """
import sys
import numpy as np
from relax_tune.ir.frontend.hf.families import decoders
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.reference import evaluate_function

folder = sys.argv[1]
assert decoders.__file__.startswith(folder), decoders.__file__
module = load_model(folder + "/model")
with np.load(folder + "/expected.npz") as case:
    ids, expected = case["ids"], case["logits"]
logits, *cache = evaluate_function(module, [ids[:, :-1]], "prefill")
np.testing.assert_allclose(logits, expected[:, -2:-1], rtol=1e-5, atol=1e-5)
logits, *_ = evaluate_function(module, [ids[:, -1:], *cache], "decode")
np.testing.assert_allclose(logits, expected[:, -1:], rtol=1e-5, atol=1e-5)
"""
Array = NDArray[np.float64]


def tensors() -> dict[str, NDArray[np.float32]]:
    """Return random weights by the names of the entry."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        for part, out in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (out * SIZE, HIDDEN)
            shapes[f"{layer}.self_attn.{part}_proj.bias"] = (out * SIZE,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes |= {f"{layer}.mlp.fc1.weight": (INNER, HIDDEN), f"{layer}.mlp.fc2.weight": (HIDDEN, INNER)}
    for norm in ("norm", *(f"layers.{i}.{n}_layernorm" for i in range(LAYERS) for n in ("input", "post_attention"))):
        shapes |= {f"model.{norm}.weight": (HIDDEN,), f"model.{norm}.bias": (HIDDEN,)}
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape).astype(np.float32) * np.float32(0.4) for name, shape in shapes.items()}


def expected_logits(weights: dict[str, NDArray[np.float32]], ids: NDArray[np.int64]) -> Array:
    """Compute the logits of all positions in NumPy: parallel blocks, grouped-query attention, rotary positions, relu squared."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    n = ids.shape[1]
    angles = np.arange(n)[:, None] / 10000.0 ** (np.arange(0, SIZE, 2) / SIZE)
    cos, sin = np.cos(angles), np.sin(angles)

    def linear(x: Array, name: str) -> Array:
        return np.asarray(x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0))

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return np.asarray(scaled * w[f"{name}.weight"] + w[f"{name}.bias"])

    def heads(x: Array, name: str, rotary: bool = True) -> Array:
        y = linear(x, name).reshape(len(x), n, -1, SIZE).transpose(0, 2, 1, 3)
        first, second = np.split(y, 2, -1)
        y = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1) if rotary else y
        return np.repeat(y, HEADS // y.shape[1], 1)

    x = w["model.embed_tokens.weight"][ids]
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        read, at = norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn"
        q, k, v = (heads(read, f"{at}.{part}_proj", part != "v") for part in "qkv")
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(SIZE) + np.triu(np.full((n, n), -np.inf), 1)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        context = (share / share.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        inner = np.maximum(linear(norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.fc1"), 0) ** 2
        x = x + linear(context, f"{at}.o_proj") + linear(inner, f"{layer}.mlp.fc2")
    logits: Array = norm(x, "model.norm") @ w["model.embed_tokens.weight"].T * SCALE
    return logits


def copy_of_package(folder: Path) -> Path:
    """Build a source tree whose `ir` is a copy and whose other folders are links; return the copy."""
    package = folder / "relax_tune"
    package.mkdir()
    for entry in (ROOT / "src" / "relax_tune").iterdir():
        if entry.name not in ("ir", "__pycache__"):
            (package / entry.name).symlink_to(entry.resolve())
    shutil.copytree(ROOT / "ir", package / "ir", ignore=shutil.ignore_patterns("__pycache__"))
    return package / "ir"


@pytest.mark.process
@pytest.mark.slow
def test_family_added_by_recipe_gives_right_logits(tmp_path: Path) -> None:
    (entry,) = re.findall(r"\n## A family of models\n.*?```py\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    table = copy_of_package(tmp_path) / TABLE
    text = table.read_text()
    end = text.rindex("}  # fmt: skip")
    table.write_text(text[:end] + entry + text[end:])

    weights, ids = tensors(), np.random.default_rng(6).integers(0, VOCABULARY, (2, 6))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, tmp_path / "model" / "model.safetensors")
    np.savez(tmp_path / "expected.npz", ids=ids, logits=expected_logits(weights, ids))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
