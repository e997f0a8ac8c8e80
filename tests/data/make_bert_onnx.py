"""Exports a sentence encoder to ONNX with torch's exporter and writes what torch says of a few inputs.

    python tests/data/make_bert_onnx.py tiny tests/data/tiny_bert.onnx        (torch, transformers, onnx, onnxscript)
    python tests/data/make_bert_onnx.py /path/to/minilm-folder minilm.onnx

Beside `<name>.onnx` lies `<name>.npz`: ids_0, mask_0, embedding_0, ids_1 ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = ((1, 1), (2, 7), (3, 13), (1, 32))


def example(b: int, n: int, vocabulary: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Token ids and a mask that hides the end of every row but the first."""
    ids = np.random.default_rng([b, n]).integers(0, vocabulary, (b, n))
    return ids, (np.arange(n) < np.maximum(n - np.arange(b), 1)[:, None]).astype(np.int64)


def exported(which: str, attention: str = "sdpa") -> tuple[Any, Any]:
    """(the ONNX model, the torch module): of a tiny random BERT, or of a Hugging Face folder. Opset 18, dynamic dims."""
    import io

    import onnx
    import torch
    from transformers import AutoModel, BertConfig, BertModel

    class Encoder(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(pooled, p=2, dim=1)

    torch.manual_seed(0)
    if which == "tiny":
        config = BertConfig(
            vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=48, attn_implementation=attention,
        )  # fmt: skip
        inner = BertModel(config, add_pooling_layer=False)
        with torch.no_grad():
            for p in inner.parameters():
                p.copy_(torch.randn_like(p) * 0.3)
    else:
        inner = AutoModel.from_pretrained(which, attn_implementation=attention)
    encoder = Encoder(inner.eval()).eval()
    positions = int(inner.config.max_position_embeddings)
    dims = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seq", max=positions)}
    inputs = tuple(torch.from_numpy(a) for a in example(2, 7, inner.config.vocab_size))
    out = io.BytesIO()
    torch.onnx.export(
        encoder, inputs, out, dynamo=True, opset_version=18, input_names=["input_ids", "attention_mask"],
        output_names=["sentence_embedding"], dynamic_shapes=(dims, dims), external_data=False, verbose=False,
    )  # fmt: skip
    model = onnx.load_from_string(out.getvalue())
    for part in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output, model.graph):
        del part.metadata_props[:]  # where in the exporting program each node came from
    return model, encoder


def main(which: str, out: str) -> None:
    import onnx
    import torch

    model, encoder = exported(which)
    onnx.save(model, out)
    found = {}
    for k, (b, n) in enumerate(SHAPES):
        ids, mask = example(b, n, encoder.inner.config.vocab_size)
        with torch.no_grad():
            embedding = encoder(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
        found |= {f"ids_{k}": ids, f"mask_{k}": mask, f"embedding_{k}": embedding}
    np.savez_compressed(Path(out).with_suffix(".npz"), **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
