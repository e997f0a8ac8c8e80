"""Makes tiny_heads.npz: encoders with a head and random weights, and their logits by the original framework.

Needs torch and transformers:

    python tests/data/make_tiny_heads.py

Of each family and head: `NAME/config` (config.json as bytes), `NAME/weights/TENSOR` in float16 (which the model computed with,
widened), and for every shape the logits of `inputs(b, n)` of make_tiny_encoders.py with the token types `types(b, n)`.
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ENCODERS = runpy.run_path(str(Path(__file__).with_name("make_tiny_encoders.py")))
HEADS = {
    "MaskedLM": {},
    "SequenceClassification": {"num_labels": 3},
    "TokenClassification": {"num_labels": 5},
    "QuestionAnswering": {},
}
NAMES = [f"{family}-{head}" for family in ENCODERS["MODELS"] for head in HEADS]
SHAPES = ENCODERS["SHAPES"]


def types(b: int, n: int) -> np.ndarray[Any, Any]:
    """Token types (b, n) i64: 1 from the middle of a row on."""
    return np.broadcast_to((np.arange(n) >= n // 2).astype(np.int64), (b, n)).copy()


def main(out: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    results: dict[str, np.ndarray[Any, Any]] = {}
    for name in NAMES:
        family, head = name.split("-")
        prefix, options = ENCODERS["MODELS"][family]
        layers = {"n_layers": 1} if family == "distilbert" else {"num_hidden_layers": 1}
        config = getattr(transformers, f"{prefix}Config")(**{**options, **layers, **HEADS[head]})
        model = getattr(transformers, f"{prefix}For{head}")(config).eval()
        with torch.no_grad():
            for key, value in model.named_parameters():
                scale = 1 if key.endswith(("orm.weight", "norm.weight")) else 0
                value.copy_((torch.randn_like(value) * 0.3 + scale).half().float())
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                from safetensors.numpy import load_file

                tensors = load_file(Path(folder, "model.safetensors"))
                results |= {f"{name}/weights/{key}": value.astype(np.float16) for key, value in tensors.items()}
                results[f"{name}/config"] = np.frombuffer(Path(folder, "config.json").read_bytes(), np.uint8)
            for b, n in SHAPES:
                ids, mask = map(torch.from_numpy, ENCODERS["inputs"](b, n))
                more = {"token_type_ids": torch.from_numpy(types(b, n))} if family == "bert" else {}
                output = model(input_ids=ids, attention_mask=mask, **more)
                parts = [output.start_logits, output.end_logits] if head == "QuestionAnswering" else [output.logits]
                results |= {f"{name}/logits_{b}_{n}_{k}": p.numpy() for k, p in enumerate(parts)}
    np.savez_compressed(out, **results)


if __name__ == "__main__":
    main(Path(__file__).with_name("tiny_heads.npz"))
