"""Makes encoder_decoders.npz: what the original framework gives for a small encoder-decoder of each family.

Needs torch and transformers:

    python tests/data/make_encoder_decoders.py [NAME ...]

Given names, only these models are computed.

`models` is JSON as bytes: of each model of MODELS its config.json, and the shape of each weight of its file; `weight` of
make_decoder_families.py draws the values, also in the tests. For every shape of SHAPES `NAME/logits_B_S_N` holds the logits (b, n,
vocabulary) of `inputs`. `NAME/greedy` and `NAME/beams` are what generation gives with GREEDY and BEAMS, for `inputs` of PROMPT.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

weight = runpy.run_path(str(Path(__file__).with_name("make_decoder_families.py")))["weight"]
SHAPES = ((2, 7, 4), (1, 1, 1), (1, 32, 16))
PROMPT = (3, 6, 1)
VOCABULARY = 41
GREEDY: dict[str, Any] = {
    "max_new_tokens": 9,
    "forced_bos_token_id": 5,
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [9, 11],
}
BEAMS: dict[str, Any] = {
    "max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 2, "forced_eos_token_id": 2,
    "length_penalty": 1.3,
}  # fmt: skip
START: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 3}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, **START,
}  # fmt: skip
GATED: dict[str, Any] = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 20, "decoder_ffn_dim": 24, "max_position_embeddings": 32, **START,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    **{k: v for k, v in BART.items() if k != "max_position_embeddings"}, "num_mel_bins": 5, "max_source_positions": 6,
    "max_target_positions": 24, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip

BERT: dict[str, Any] = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 37,
    "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 24, "n_layer": 1, "n_head": 2, "n_positions": 40, "vocab_size": 37,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
VIT: dict[str, Any] = {
    "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
TROCR: dict[str, Any] = {
    "model_type": "trocr", "d_model": 24, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": 37,
    "max_position_embeddings": 40, "cross_attention_hidden_size": 16,
}  # fmt: skip
WAVES: dict[str, Any] = {
    "model_type": "wav2vec2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "conv_dim": [6, 8], "conv_stride": [3, 2], "conv_kernel": [5, 3], "num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 2,
    "vocab_size": 9,
}  # fmt: skip
MASKED: dict[str, Any] = {
    **WAVES, "feat_extract_norm": "layer", "do_stable_layer_norm": True, "add_adapter": True, "num_adapter_layers": 2,
    "hidden_size": 12, "output_hidden_size": 16,
}  # fmt: skip
MBART: dict[str, Any] = {"model_type": "mbart", **{k: v for k, v in BART.items() if "encoder" not in k}}
MOONSHINE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": 20, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2, "max_position_embeddings": 24,
    **{**START, "decoder_start_token_id": 3},
}  # fmt: skip
GENERATES = {"is_decoder": True, "add_cross_attention": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", T5),
    "t5_gated": ("T5", GATED),
    "mt5": ("MT5", GATED),
    "umt5": ("UMT5", {**GATED, "num_decoder_layers": 2}),
    "bart": ("Bart", BART),
    "bart_scaled": ("Bart", {**BART, "scale_embedding": True, "activation_function": "relu"}),
    "bart_untied": ("Bart", {**BART, "tie_word_embeddings": False}),
    "mbart": ("MBart", BART),
    "plbart": ("PLBart", BART),
    "pegasus": ("Pegasus", {**BART, "scale_embedding": True}),
    "marian": ("Marian", {**BART, "scale_embedding": True, "activation_function": "swish"}),
    "marian_separate": ("Marian", {**BART, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37}),
    "blenderbot": ("Blenderbot", BART),
    "blenderbot_small": ("BlenderbotSmall", BART),
    "m2m_100": ("M2M100", BART),
    "whisper": ("Whisper", WHISPER),
    "pair_bert": ("EncoderDecoder", {"encoder": BERT, "decoder": {**BERT, **GENERATES}}),
    "pair_gpt2": ("EncoderDecoder", {"encoder": BERT, "decoder": {**GPT2, **GENERATES}}),
    "pair_trocr": ("VisionEncoderDecoder", {"encoder": VIT, "decoder": {**TROCR, **GENERATES}}),
    "pair_speech": ("SpeechEncoderDecoder", {"encoder": MASKED, "decoder": {**MBART, **GENERATES}}),
    "pair_speech_bart": (
        "SpeechEncoderDecoder",
        {
            "encoder": WAVES,
            "decoder": {**MBART, "model_type": "bart", **GENERATES, "scale_embedding": True, "d_model": 24},
        },
    ),
    "moonshine": ("Moonshine", MOONSHINE),
    "moonshine_biased": ("Moonshine", {**MOONSHINE, "attention_bias": True, "tie_word_embeddings": False}),
}
KINDS = {
    "Marian": "MarianMTModel", "EncoderDecoder": "EncoderDecoderModel", "VisionEncoderDecoder": "VisionEncoderDecoderModel",
    "SpeechEncoderDecoder": "SpeechEncoderDecoderModel",
}  # fmt: skip


def inputs(name: str, b: int, s: int, n: int) -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """What the encoder reads, by name, and the first tokens (b, n) of the text. Every source but the first is shorter than s."""
    drawn = np.random.RandomState(100 * b + 10 * s + n)
    ids = drawn.randint(4, 37, (b, s)).astype(np.int64)
    mask = np.ones((b, s), np.int64)
    for row in range(1, b):
        mask[row, max(1, s - 2 * row) :] = 0
    prompt = np.concatenate([np.full((b, 1), 3), drawn.randint(4, 37, (b, n - 1))], axis=1).astype(np.int64)
    if name == "whisper":
        features = drawn.uniform(-1, 1, (b, WHISPER["num_mel_bins"], 2 * WHISPER["max_source_positions"]))
        return {"input_features": features.astype(np.float32)}, prompt
    if name == "pair_trocr":
        return {"pixel_values": drawn.uniform(-1, 1, (b, 3, 8, 8)).astype(np.float32)}, prompt
    if name.startswith(("moonshine", "pair_speech")):
        samples = (900 if "moonshine" in name else 40) + (211 if "moonshine" in name else 13) * s
        sound = drawn.uniform(-1, 1, (b, samples)).astype(np.float32)
        heard = np.arange(samples) < (samples - 5 * s * np.arange(b))[:, None]
        masked = {} if name == "pair_speech_bart" else {"attention_mask": heard.astype(np.int64)}
        return {"input_values": np.where(heard, sound, np.float32(0)), **masked}, prompt
    return {"input_ids": np.where(mask == 1, ids, 1), "attention_mask": mask}, prompt


def computed(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """The description of one model, and its arrays."""
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file
    from transformers.generation import GenerationMixin

    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**options)
    kind = getattr(transformers, KINDS.get(family, f"{family}ForConditionalGeneration"))
    results: dict[str, np.ndarray[Any, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        kind(config).save_pretrained(folder)
        path = Path(folder, "model.safetensors")
        shapes = {key: list(value.shape) for key, value in load_file(path).items()}
        save_file(
            {key: weight(name, key, tuple(shape)) for key, shape in shapes.items()}, path, metadata={"format": "pt"}
        )
        if name == "t5_gated":  # what folders of T5 1.1 say, and transformers no longer writes
            fields = json.loads(Path(folder, "config.json").read_text())
            Path(folder, "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": False}))
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        config = json.loads(Path(folder, "config.json").read_text())
        model.generation_config = transformers.GenerationConfig(**START)
        for b, s, n in SHAPES:
            source, prompt = inputs(name, b, s, n)
            given = {key: torch.from_numpy(value) for key, value in source.items()}
            logits = model(**given, decoder_input_ids=torch.from_numpy(prompt), use_cache=False).logits
            results[f"{name}/logits_{b}_{s}_{n}"] = logits.numpy()
        source, prompt = inputs(name, *PROMPT)
        given = {key: torch.from_numpy(value) for key, value in source.items()}
        for what, settings in (("greedy", GREEDY), ("beams", BEAMS)):
            # Whisper's own generation is for audio of any length
            results[f"{name}/{what}"] = GenerationMixin.generate(model, **given, do_sample=False, **settings).numpy()
    return {"config": config, "shapes": shapes}, results


def main(out: Path, names: list[str]) -> None:
    results: dict[str, np.ndarray[Any, Any]] = dict(np.load(out)) if names else {}
    texts: dict[str, Any] = json.loads(results.pop("models").tobytes()) if names else {}
    for name in names or MODELS:
        texts[name], arrays = computed(name)
        results |= arrays
    np.savez_compressed(out, models=np.frombuffer(json.dumps(texts).encode(), np.uint8), **results)


if __name__ == "__main__":
    main(Path(__file__).with_name("encoder_decoders.npz"), sys.argv[1:])
