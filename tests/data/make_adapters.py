"""Write adapters.npz: LoRA adapters of tiny models, and the results of peft's merged models.

    pip install peft==0.21.2 torch transformers
    PYTHONPATH=.:src python tests/data/make_adapters.py

An entry `CASE/config` is adapter_config.json, `CASE/tensors/NAME` a tensor of adapter_model.safetensors, `CASE/expected` the result of
the merged model for `IDS`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

IDS = np.array([[2, 5, 7, 3, 6], [4, 9, 1, 8, 5]])
ALPHA = {"r": 4, "lora_alpha": 6, "init_lora_weights": False}
EMBEDDED = ["embed_tokens", "v_proj"]
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "bert": ("bert", "", "AutoModel", {"target_modules": ["query", "value", "intermediate.dense"]}),
    "bert_biases": ("bert", "", "AutoModel", {
        "target_modules": r".*layer\.\d.*\.dense", "bias": "all", "use_rslora": True,
        "rank_pattern": {"layer.1.output.dense": 2}, "alpha_pattern": {"layer.0.output.dense": 5},
    }),
    "classifier": ("head", "SequenceClassification", "AutoModelForSequenceClassification", {
        "target_modules": ["query"], "task_type": "SEQ_CLS",
    }),
    "llama": ("decoder", "llama", "AutoModelForCausalLM", {"target_modules": "all-linear", "use_rslora": True}),
    "llama_tables": ("decoder", "llama", "AutoModelForCausalLM", {"target_modules": EMBEDDED, "modules_to_save": ["lm_head"]}),
    "gpt2": ("family", "gpt2", "AutoModelForCausalLM", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "t5": ("pair", "t5", "AutoModelForSeq2SeqLM", {"target_modules": ["q", "wo"]}),
}  # fmt: skip
"""By name: the kind and name of the model (`tests/support`), its class in transformers, and fields of LoraConfig."""


def write_base(folder: Path, kind: str, name: str) -> Path:
    """Write the folder of a case's model."""
    from tests.support import decoder_families, encoder_decoders, text_folders, tiny_decoders
    from tests.tuner.cli.cli_model import make_bert

    folder.mkdir(parents=True, exist_ok=True)
    if kind == "bert":
        return make_bert(folder)
    if kind == "head":
        return text_folders.write_head(folder, name)
    if kind == "pair":
        return encoder_decoders.write_encoder_decoder(folder, name)[0]
    return (tiny_decoders.write if kind == "decoder" else decoder_families.write_family)(folder, name)[0]


def record(case: str, folder: Path) -> dict[str, Any]:
    """Adapt a model with random matrices, save the adapter, merge it and return what is stored."""
    import peft
    import torch
    import transformers
    from safetensors.numpy import load_file

    kind, name, model_class, fields = CASES[case]
    base = write_base(folder / "base", kind, name)
    torch.manual_seed(len(case))
    model = getattr(transformers, model_class).from_pretrained(base, dtype=torch.float32).eval()
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{**ALPHA, **fields}))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:  # matrices, biases and heads that training would change
                parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder / "adapter")
    ids = torch.from_numpy(IDS)
    more = {"decoder_input_ids": ids[:, :3]} if kind == "pair" else {}
    with torch.no_grad():
        out = adapted.merge_and_unload()(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    config = (folder / "adapter" / "adapter_config.json").read_text()
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    return {
        f"{case}/config": np.frombuffer(config.encode(), np.uint8),
        f"{case}/expected": (out.last_hidden_state if model_class == "AutoModel" else out.logits).numpy(),
        **{f"{case}/tensors/{n}": t for n, t in tensors.items()},
    }


if __name__ == "__main__":
    stored: dict[str, Any] = {}
    for each in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            stored |= record(each, Path(temporary))
    path = Path(__file__).with_name("adapters.npz")
    np.savez_compressed(path, **stored)
    print(path, path.stat().st_size, file=sys.stderr)
