"""Makes generation.npz: what transformers generates with the decoders of tiny_decoders.npz, and its logits processors' results.

Needs torch and transformers:

    python tests/data/make_generation.py

For each of PROCESSED: `process/NAME`, the processed `scores()` (rows, vocabulary) f32. Of each decoder, for each of SEARCHED:
`MODEL/search/NAME/tokens`, (rows * results, added) i64 filled with the padding token, and `scores` (rows * results,) f32, for the prompts
`inputs(2, 7)`; for each of UNEVEN: `MODEL/uneven/NAME`, the tokens added to each of the prompts `uneven()` alone. A batch padded on
the left gives the same, unless a processor takes the padding for text, as that of repeated sequences does.
"""

from __future__ import annotations

import json
import runpy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

DECODERS = runpy.run_path(str(Path(__file__).with_name("make_tiny_decoders.py")))
VOCABULARY, inputs = DECODERS["VOCABULARY"], DECODERS["inputs"]
LENGTHS = (5, 2, 9, 5)
ADDED = 12
PAD = 36
PROCESSED: dict[str, dict[str, Any]] = {
    "temperature": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "top_k": {"do_sample": True, "top_k": 5},
    "top_p": {"do_sample": True, "top_k": 0, "top_p": 0.8},
    "top_p_none": {"do_sample": True, "top_k": 0, "top_p": 0.0},
    "min_p": {"do_sample": True, "top_k": 0, "min_p": 0.2},
    "repetition": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "ngram": {"no_repeat_ngram_size": 2},
    "unigram": {"no_repeat_ngram_size": 1},
    "min_new": {"min_new_tokens": 3, "eos_token_id": [4, 9]},
    "all": {
        "do_sample": True, "temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3, "min_new_tokens": 3, "eos_token_id": [4, 9],
    },
    "beams": {"do_sample": True, "top_k": 1, "top_p": 0.1, "min_p": 0.9, "num_beams": 2, "eos_token_id": [4, 9]},
}  # fmt: skip
SEARCHED: dict[str, dict[str, Any]] = {
    "plain": {"num_beams": 3, "num_return_sequences": 3},
    "longer": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0, "eos_token_id": [5], "pad_token_id": PAD},
    "shorter": {"num_beams": 2, "length_penalty": -1.0, "eos_token_id": [3, 11], "pad_token_id": PAD},
    "early": {
        "num_beams": 3, "num_return_sequences": 3, "early_stopping": True, "eos_token_id": [3, 11, 20], "pad_token_id": PAD,
    },
    "never": {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.5, "eos_token_id": [7, 8], "pad_token_id": PAD},
    "processed": {
        "num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4,
        "eos_token_id": [5, 6, 18], "pad_token_id": PAD,
    },
}  # fmt: skip
UNEVEN: dict[str, dict[str, Any]] = {
    "greedy": {"eos_token_id": [3, 11, 20], "pad_token_id": PAD},
    "processed": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "eos_token_id": [5, 6], "pad_token_id": PAD},
}


def history() -> np.ndarray[Any, Any]:
    """Tokens so far (3, 14) i64, two of which are new."""
    return np.random.default_rng(5).integers(0, 8, (3, 14), dtype=np.int64)


def scores() -> np.ndarray[Any, Any]:
    """Logits (3, VOCABULARY) f32."""
    return (np.random.default_rng(6).standard_normal((3, VOCABULARY)) * 2).astype(np.float32)


def uneven() -> list[np.ndarray[Any, Any]]:
    """Prompts of LENGTHS."""
    return [inputs(number + 1, length)[number] for number, length in enumerate(LENGTHS)]


def process(settings: dict[str, Any]) -> np.ndarray[Any, Any]:
    import torch
    import transformers

    config = transformers.GenerationConfig(**{"top_k": 0, **settings})
    config._eos_token_tensor = torch.tensor(settings["eos_token_id"]) if "eos_token_id" in settings else None
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODERS["SIZES"]))
    found = model._get_logits_processor(generation_config=config, input_ids_seq_length=12, device="cpu")
    return found(torch.from_numpy(history()), torch.from_numpy(scores())).numpy()


def load(name: str) -> Any:
    import torch
    import transformers

    family = {**DECODERS["MODELS"], **DECODERS["MORE"]}[name][0]
    with np.load(Path(__file__).with_name("tiny_decoders.npz")) as given:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(json.loads(given[f"{name}/config"].tobytes())))
            config = transformers.AutoConfig.from_pretrained(folder)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for key, value in model.named_parameters():
                value.copy_(torch.from_numpy(given[f"{name}/weights/{key}"]).float())
    model.generation_config = transformers.GenerationConfig(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return model


def main(out: Path) -> None:
    import torch

    found: dict[str, np.ndarray[Any, Any]] = {f"process/{n}": process(s) for n, s in PROCESSED.items()}
    for name in (*DECODERS["MODELS"], *DECODERS["MORE"]):
        model = load(name)
        prompt = torch.from_numpy(inputs(2, 7))
        given = {"max_new_tokens": ADDED, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
        for case, settings in SEARCHED.items():
            made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **given, **settings)
            found[f"{name}/search/{case}/tokens"] = made.sequences[:, 7:].numpy()
            found[f"{name}/search/{case}/scores"] = made.sequences_scores.numpy()
        for case, settings in UNEVEN.items():
            alone = [torch.from_numpy(row[None]) for row in uneven()]
            made = [model.generate(r, attention_mask=torch.ones_like(r), **given, **settings).sequences for r in alone]
            rows = np.full((len(alone), ADDED), PAD, np.int64)
            for at, row, whole in zip(rows, alone, made):
                at[: whole.shape[1] - row.shape[1]] = whole[0, row.shape[1] :].numpy()
            found[f"{name}/uneven/{case}"] = rows
        longest = max(LENGTHS)
        ids = np.stack([np.pad(row, (longest - len(row), 0), constant_values=PAD) for row in uneven()])
        mask = np.stack([np.arange(longest) >= longest - len(row) for row in uneven()]).astype(np.int64)
        made = model.generate(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **given, **UNEVEN["greedy"])
        assert (made.sequences[:, longest:].numpy() == found[f"{name}/uneven/greedy"]).all()
    np.savez_compressed(out, **found)


if __name__ == "__main__":
    main(Path(__file__).with_name("generation.npz"))
