"""Makes tiny_encoders.npz: encoders with random weights, and their last hidden states by the original framework.

Needs torch and transformers:

    python tests/data/make_tiny_encoders.py

Of each model of MODELS: `NAME/config` (config.json as bytes), `NAME/weights/TENSOR` in float16 (which the model computed with,
widened), and for every shape of SHAPES the last hidden state of `inputs(b, n)`, which the tests repeat: (b, n, hidden) f32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = ((1, 1), (2, 7), (3, 16))
VOCABULARY, PADDING, POSITIONS = 23, 1, 18
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS, "initializer_range": 0.4, "pad_token_id": PADDING,
}  # fmt: skip
SHORT = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "vocab_size": VOCABULARY, "activation": "relu",
         "max_position_embeddings": POSITIONS, "initializer_range": 0.4, "pad_token_id": PADDING}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", {**SIZES, "layer_norm_eps": 1e-5, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", SHORT),
}


def inputs(b: int, n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Token ids (b, n) i64, each row but the first padded at its end, and a mask of what is no padding."""
    lengths = np.maximum(n - 2 * np.arange(b), 1)
    mask = (np.arange(n) < lengths[:, None]).astype(np.int64)
    ids = np.random.default_rng([b, n]).integers(PADDING + 1, VOCABULARY, (b, n), dtype=np.int64)
    return np.where(mask == 1, ids, PADDING), mask


def main(out: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    results: dict[str, np.ndarray[Any, Any]] = {}
    for name, (family, options) in MODELS.items():
        config = getattr(transformers, f"{family}Config")(**options)
        more = {} if name == "distilbert" else {"add_pooling_layer": False}
        model = getattr(transformers, f"{family}Model")(config, **more).eval()
        with torch.no_grad():
            for key, value in model.named_parameters():
                value.copy_((torch.randn_like(value) * 0.3 + (1 if key.endswith("orm.weight") else 0)).half().float())
                results[f"{name}/weights/{key}"] = value.half().numpy()
            for b, n in SHAPES:
                ids, mask = map(torch.from_numpy, inputs(b, n))
                results[f"{name}/hidden_{b}_{n}"] = model(input_ids=ids, attention_mask=mask).last_hidden_state.numpy()
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            text = Path(folder, "config.json").read_bytes()
        results[f"{name}/config"] = np.frombuffer(text, np.uint8)
    np.savez_compressed(out, **results)


if __name__ == "__main__":
    main(Path(__file__).with_name("tiny_encoders.npz"))
