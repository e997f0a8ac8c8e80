"""Models for `loaded_memory`, with weights from a seed: Hugging Face folders, and ONNX files for the peers.

    python -m experiments.end_to_end.memory_models FOLDER

Runs in an environment with torch, transformers, onnx, onnxscript and onnxruntime; files that are there stay. The ONNX file of the decoder
is its prefill: it returns the scores of the last position, and no caches. `int8.onnx` is ONNX Runtime's dynamic quantisation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from onnxruntime.quantization import QuantType, quantize_dynamic

MODELS = {
    "bert": (transformers.BertModel, transformers.BertConfig()),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config()),
    "vit": (transformers.ViTForImageClassification, transformers.ViTConfig(num_labels=1000)),
    "resnet50": (transformers.ResNetForImageClassification, transformers.ResNetConfig(num_labels=1000)),
}
QUANTISED = ("bert", "gpt2")


class Exported(torch.nn.Module):
    """A model whose one result the peers compute."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.model, transformers.GPT2LMHeadModel):
            # a mask, without which the model looks for packed sequences by an operator that ONNX lacks
            return self.model(x, attention_mask=torch.ones_like(x), use_cache=False, logits_to_keep=1).logits
        result = self.model(x)
        return result.last_hidden_state if hasattr(result, "last_hidden_state") else result.logits


def example(name: str) -> tuple[torch.Tensor, dict[int, str]]:
    """Return an argument and its dynamic dims."""
    if name in ("bert", "gpt2"):
        return torch.randint(0, 1000, (2, 16)), {0: "b", 1: "n"}
    return torch.randn(2, 3, 224, 224), {0: "b"}


def export(model: torch.nn.Module, name: str, path: Path, fold: bool) -> None:
    """Write an ONNX file unless it is there. Folding stores the transposed table of a tied product a second time."""
    if not path.exists():
        x, dims = example(name)
        names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": dims}}
        torch.onnx.export(model, (x,), str(path), dynamo=False, opset_version=18, do_constant_folding=fold, **names)


def write(name: str, folder: Path) -> None:
    cls, config = MODELS[name]
    torch.manual_seed(0)
    if not (folder / "config.json").exists():
        cls(config).save_pretrained(folder)
    model = Exported(cls.from_pretrained(folder)).eval()
    export(model, name, folder / "model.onnx", fold=name != "gpt2")
    if name in QUANTISED and not (folder / "int8.onnx").exists():
        # The quantisation takes products of stored weights only.
        export(model, name, folder / "folded.onnx", fold=True)
        quantize_dynamic(folder / "folded.onnx", folder / "int8.onnx", weight_type=QuantType.QInt8)


if __name__ == "__main__":
    for model_name in MODELS:
        write(model_name, Path(sys.argv[1]) / model_name)
        print(model_name, flush=True)
