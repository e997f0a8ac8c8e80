"""Makes minilm_reference.npz: embeddings by the original framework, to compare our own against.

Needs torch, transformers and the folder of all-MiniLM-L6-v2 (config.json, model.safetensors, tokenizer.json):

    python tests/data/make_minilm_reference.py FOLDER

For every (b, n) of SHAPES: token ids and ragged masks from `inputs(b, n)`, which the tests repeat, and the embeddings.
Then four sentences with the ids of the model's tokenizer. Mean pooling over the mask and L2 normalisation are written out
here as sentence-transformers defines them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = ((1, 1), (1, 7), (2, 16), (3, 128), (8, 300), (1, 512))
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A fast auburn fox leapt across a sleepy hound.",
    "Symbolic shapes let one program serve every length.",
    "Rain is expected in the evening.",
)
VOCABULARY = 30522


def inputs(b: int, n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Token ids and mask for one shape: the first row is full, the others have a random length of at least 1."""
    rng = np.random.default_rng([b, n])
    ids = rng.integers(0, VOCABULARY, (b, n), dtype=np.int64)
    lengths = rng.integers(1, n + 1, b)
    lengths[0] = n
    return ids, (np.arange(n)[None, :] < lengths[:, None]).astype(np.int64)


def main(folder: Path, out: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    model = AutoModel.from_pretrained(str(folder), attn_implementation="eager").eval()

    def embed(ids: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        m = torch.from_numpy(mask)
        with torch.no_grad():
            x = model(input_ids=torch.from_numpy(ids), attention_mask=m).last_hidden_state
            weight = m[:, :, None].to(x.dtype)
            pooled = (x * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(pooled, p=2, dim=1, eps=1e-12).numpy()

    found = {f"embeddings_{b}_{n}": embed(*inputs(b, n)) for b, n in SHAPES}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(SENTENCES))
    ids = np.array([e.ids for e in encoded], np.int64)
    mask = np.array([e.attention_mask for e in encoded], np.int64)
    found |= {"sentence_ids": ids, "sentence_mask": mask, "sentence_embeddings": embed(ids, mask)}
    np.savez_compressed(out, **found)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python make_minilm_reference.py FOLDER")
    main(Path(sys.argv[1]), Path(__file__).with_name("minilm_reference.npz"))
