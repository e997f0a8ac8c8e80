"""Makes tiny_series.npz: results of forecasters of time series by the original framework.

Needs torch and transformers:

    python tests/data/make_tiny_series.py [NAME ...]

Of each model of MODELS: `NAME/config` (config.json as bytes), `NAME/tensors` (the names and shapes of its weights as JSON; `weight`
draws them), and of case `K` its results `NAME/K/0`, `NAME/K/1` ..., by `inputs(case, config)`. Given names, only these models are
computed. A model whose name ends in `computed` has the timescales that the framework computes; its file has none.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FAMILIES = runpy.run_path(str(Path(__file__).with_name("make_tiny_families.py")))
weight = FAMILIES["weight"]
TIMESFM = {
    "patch_length": 8, "context_length": 64, "horizon_length": 5, "freq_size": 3, "num_hidden_layers": 2, "hidden_size": 16,
    "intermediate_size": 24, "head_dim": 6, "num_attention_heads": 2, "quantiles": [0.1, 0.5, 0.9],
}  # fmt: skip
PLACED = {**TIMESFM, "use_positional_embedding": True, "min_timescale": 2, "max_timescale": 500}
MISSING = {**TIMESFM, "pad_val": -7.0, "tolerance": 0.125}
# (rows, steps); rows are padded as `inputs` says
PREDICTED, BARE = ((1, 64), (3, 40), (6, 61), (1, 1), (2, 9)), ((1, 8), (7, 40), (2, 64))
MODELS: dict[str, tuple[str, dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "timesfm": ("TimesFmModelForPrediction", {**TIMESFM, "rms_norm_eps": 0.25}, PREDICTED),
    "timesfm-missing": ("TimesFmModelForPrediction", MISSING, PREDICTED),
    "timesfm-placed": ("TimesFmModelForPrediction", PLACED, PREDICTED),
    "timesfm-computed": ("TimesFmModelForPrediction", {**PLACED, "quantiles": []}, PREDICTED),
    "timesfm-bare": ("TimesFmModel", TIMESFM, BARE),
    "timesfm-bare-missing": ("TimesFmModel", MISSING, BARE),
    "timesfm-bare-placed": ("TimesFmModel", PLACED, BARE),
    "timesfm-bare-computed": ("TimesFmModel", PLACED, BARE),
}
RESULTS = "mean_predictions", "full_predictions", "last_hidden_state", "loc", "scale"


def inputs(case: tuple[int, ...], config: dict[str, Any]) -> dict[str, Array]:
    """Every input of a model by its name.

    The first row is whole; later rows are padded in front. Rows of bare models also have padding in the middle, padding alone, steps
    of the missing value, and constant patches."""
    rng, (b, s) = np.random.default_rng(case), case
    values = rng.standard_normal(case) * 3 + np.arange(b)[:, None] * 2 + np.sin(np.arange(s))
    padded = np.arange(s) < np.minimum(13 * np.arange(b), s - 1)[:, None]
    if config["architectures"] == ["TimesFmModel"] and b > 5:
        padded[2, 9:20], padded[3] = True, True
        padded[4] = np.arange(s) >= 2
        values[5] = 4.0
    values[0, s // 2] = config["pad_val"]
    return {
        "past_values": values.astype(np.float32),
        "past_values_padding": padded.astype(np.int64),
        "freq": (np.arange(b, dtype=np.int64) % config["freq_size"])[:, None],
    }


def main(out: Path, names: list[str]) -> None:
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    stored: dict[str, Array] = dict(np.load(out)) if out.exists() else {}
    stored = {k: v for k, v in stored.items() if k.partition("/")[0] in MODELS}
    for name in names or MODELS:
        kind, options, cases = MODELS[name]
        cls = getattr(transformers, kind)
        with tempfile.TemporaryDirectory() as folder:
            cls(cls.config_class(**options)).save_pretrained(folder)
            path = Path(folder, "model.safetensors")
            drawn = load_file(path)
            shapes = {k: v.shape for k, v in drawn.items()}
            if name.endswith("computed"):
                shapes = {k: shape for k, shape in shapes.items() if not k.endswith("inv_timescales")}
            save_file({**drawn, **{k: weight(k, shape) for k, shape in shapes.items()}}, path, {"format": "pt"})
            model = cls.from_pretrained(folder, attn_implementation="eager").eval()
            text = Path(folder, "config.json").read_bytes()
        stored = {k: v for k, v in stored.items() if k.partition("/")[0] != name}
        stored[f"{name}/config"] = np.frombuffer(text, np.uint8)
        stored[f"{name}/tensors"] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
        for number, case in enumerate(cases):
            given = {k: torch.from_numpy(v) for k, v in inputs(case, json.loads(text)).items()}
            with torch.no_grad():
                if kind.endswith("ForPrediction"):
                    rows = zip(given["past_values"], given["past_values_padding"], strict=True)
                    series = [values[padding == 0] for values, padding in rows]
                    output = model(series, given["freq"][:, 0].tolist())
                    output.last_hidden_state = None
                else:
                    output = model(**given)
            parts = [getattr(output, r) for r in RESULTS if getattr(output, r, None) is not None]
            stored |= {f"{name}/{number}/{k}": part.numpy() for k, part in enumerate(parts)}
    np.savez_compressed(out, **stored)


if __name__ == "__main__":
    main(Path(__file__).with_name("tiny_series.npz"), sys.argv[1:])
