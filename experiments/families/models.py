"""The models of `model_families.py` that transformers has, tiny, by family. `plain.py` has models that it lacks.

Hidden size 32, 2 layers, vocabulary 199; weights are random, with standard deviation 1/sqrt(fan in).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

WORDS = 199
TEXT = ((2, 16), (1, 1), (1, 7), (3, 13), (4, 48))  # the first is the one that is exported
STATIC_IMAGE = ((2, 64, 64), (1, 64, 64), (3, 64, 64), (5, 64, 64))
IMAGE = ((2, 64, 96), (1, 64, 64), (3, 67, 101), (1, 128, 160), (2, 89, 64))


@dataclass(frozen=True)
class Family:
    """A model, its inputs at a shape, and the dims of each input that are dynamic (axis: name).

    least: the smallest sizes that torch.export allows for dims, where they are above 1
    deferred: torch.export checks at run time what it cannot prove of the dims
    folder: the whole model that a folder holds, if this model is a part of it
    for_onnx: `attn` or `experts` implementation to set before torch.onnx can export the model
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, tuple[int, ...]], tuple[Tensor, ...]]
    dynamic: tuple[Mapping[int, str], ...]
    shapes: Sequence[tuple[int, ...]]
    least: Mapping[str, int] = field(default_factory=dict)
    deferred: bool = False
    folder: Family | None = None
    for_onnx: Mapping[str, str] = field(default_factory=dict)


def draw(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw all weights at random: matrices by fan in, scales near 1, biases near 0, running statistics of norms too.

    Not those that are never trained: transformers computes some of them when it loads a folder."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if name.endswith("A_log") or not p.requires_grad:
                continue
            if p.ndim > 1:
                p.copy_(noise / math.sqrt(math.prod(p.shape[1:])))
            else:
                p.copy_(0.1 * noise + (1.0 if name.endswith(("weight", "scale", "gamma")) else 0.0))
        for name, b in model.named_buffers():
            if name.endswith("running_mean"):
                b.copy_(0.1 * torch.randn(b.shape, generator=g))
            elif name.endswith("running_var"):
                b.copy_(1 + 0.1 * torch.rand(b.shape, generator=g))
    return model.eval()


# Forms of a call


class Call(nn.Module):
    """A model called by keywords, whose result is one of its fields."""

    def __init__(self, inner: nn.Module, names: str, result: str, **fixed: Any) -> None:
        super().__init__()
        self.inner, self.names, self.result, self.fixed = inner, names.split(), result, fixed

    def forward(self, a: Tensor) -> Any:
        return self._call(a)

    def _call(self, *given: Tensor) -> Any:
        out = self.inner(**dict(zip(self.names, given)), **self.fixed)
        found = tuple(getattr(out, r) for r in self.result.split())
        return found[0] if len(found) == 1 else found


class Call2(Call):
    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self._call(a, b)


class Call3(Call):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Any:
        return self._call(a, b, c)


class Sentence(nn.Module):
    """Mean pooling, perhaps a dense layer, and length 1, as sentence-transformers does."""

    def __init__(self, inner: nn.Module, dense: bool) -> None:
        super().__init__()
        self.inner, self.dense = inner, nn.Linear(32, 24) if dense else None

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.inner(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        if self.dense is not None:
            pooled = torch.tanh(self.dense(pooled))
        return nn.functional.normalize(pooled, p=2.0, dim=1)


class Step(nn.Module):
    """One step of a decoder with its cache as tensors: the past in, the grown past out."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, k0: Tensor, v0: Tensor, k1: Tensor, v1: Tensor) -> tuple[Tensor, ...]:
        from transformers import DynamicCache

        past = DynamicCache()
        past.update(k0, v0, 0)
        past.update(k1, v1, 1)
        out = self.inner(input_ids=ids, past_key_values=past, use_cache=True)
        grown = out.past_key_values.layers
        return (out.logits, *(t for layer in grown for t in (layer.keys, layer.values)))


# Inputs


def ids(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(3, WORDS, shape, generator=g)


def padded(g: torch.Generator, b: int, n: int) -> Tensor:
    """A mask of rows of several lengths, at least one of them full."""
    lengths = torch.randint(1, n + 1, (b, 1), generator=g)
    lengths[0] = n
    return (torch.arange(n) < lengths).long()


def text(g: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return ids(g, *shape), padded(g, *shape)


def image(g: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return (torch.randn(shape[0], 3, *shape[1:], generator=g),)


BN = {0: "b", 1: "n"}
HW = {0: "b", 2: "h", 3: "w"}


def lazily(name: str, config: Mapping[str, Any], attention: str | None = None) -> Callable[[], nn.Module]:
    """A maker of a transformers model by the name of its class."""

    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        settings = dict(config)
        experts = settings.pop("experts", None)
        own = kind.config_class(**settings)
        if attention:
            own._attn_implementation = attention
        if experts:
            own._experts_implementation = experts
        return kind(own)

    return make


def encoder(name: str, result: str = "last_hidden_state", attention: str | None = None, **config: Any) -> Family:
    inner = lazily(name, config, attention)
    make = lambda: Call2(inner(), "input_ids attention_mask", result)
    return Family(make, text, (BN, BN), TEXT)


def decoder(name: str, attention: str | None = None, **config: Any) -> Family:
    inner = lazily(name, config, attention)
    make = lambda: Call2(inner(), "input_ids attention_mask", "logits", use_cache=False)
    return Family(make, text, (BN, BN), TEXT)


def vision(name: str, result: str, shapes: Sequence[tuple[int, ...]], fixed: Any = (), **config: Any) -> Family:
    inner = lazily(name, config)
    make = lambda: Call(inner(), "pixel_values", result, **dict(fixed))
    return Family(make, image, ({0: "b"} if shapes is STATIC_IMAGE else HW,), shapes)


def step(name: str, heads: int, **config: Any) -> Family:
    inner = lazily(name, config)
    past = {0: "b", 2: "past"}

    def inputs(g: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        b, p = shape
        return (ids(g, b, 1), *(torch.randn(b, heads, p, 8, generator=g) for _ in range(4)))

    return Family(lambda: Step(inner()), inputs, ({0: "b"}, past, past, past, past), TEXT, deferred=True)


# Configurations

BERT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=WORDS, max_position_embeddings=64
)  # fmt: skip
LLAMA: dict[str, Any] = dict(
    BERT, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, num_local_experts=4)
QWEN_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8)
GPT: dict[str, Any] = dict(
    n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=WORDS, bos_token_id=1, eos_token_id=2
)
T5: dict[str, Any] = dict(
    d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=WORDS, decoder_start_token_id=0
)  # fmt: skip
WHISPER: dict[str, Any] = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
    decoder_ffn_dim=64, vocab_size=WORDS, num_mel_bins=8, max_source_positions=24, max_target_positions=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
VIT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=64, patch_size=16
)  # fmt: skip
SPECIAL: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
ROPE3: dict[str, Any] = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip


def sentence(dense: bool) -> Family:
    inner = lazily("BertModel", BERT)
    return Family(lambda: Sentence(inner(), dense), text, (BN, BN), TEXT)


def t5_full() -> Family:
    inner = lazily("T5ForConditionalGeneration", T5)

    def inputs(g: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        return (*text(g, shape), ids(g, shape[0], (shape[1] + 2) // 2))

    make = lambda: Call3(inner(), "input_ids attention_mask decoder_input_ids", "logits", use_cache=False)
    return Family(make, inputs, (BN, BN, {0: "b", 1: "m"}), TEXT)


def whisper_encoder() -> Family:
    whole = lazily("WhisperModel", WHISPER)

    def make() -> nn.Module:
        model: Any = whole()
        return Call(model.encoder, "input_features", "last_hidden_state")

    frames = lambda g, s: (torch.randn(s[0], 8, 48, generator=g),)
    return Family(make, frames, ({0: "b"},), ((2,), (1,), (3,), (5,)))


def whisper_decoder() -> Family:
    whole = lazily("WhisperModel", WHISPER)

    def make() -> nn.Module:
        model: Any = whole()
        return Call2(model.decoder, "input_ids encoder_hidden_states", "last_hidden_state", use_cache=False)

    inputs = lambda g, s: (ids(g, *s), torch.randn(s[0], 24, 32, generator=g))
    return Family(make, inputs, (BN, {0: "b"}), TEXT, folder=whisper_full())


def whisper_full() -> Family:
    inner = lazily("WhisperForConditionalGeneration", WHISPER)
    make = lambda: Call2(inner(), "input_features decoder_input_ids", "logits", use_cache=False)
    inputs = lambda g, s: (torch.randn(s[0], 8, 48, generator=g), ids(g, *s))
    return Family(make, inputs, ({0: "b"}, BN), TEXT)


def wav2vec2() -> Family:
    config = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=WORDS, conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        do_stable_layer_norm=False,
    )  # fmt: skip
    inner = lazily("Wav2Vec2Model", config)
    wave = lambda g, s: (torch.randn(*s, generator=g),)
    make = lambda: Call(inner(), "input_values", "last_hidden_state")
    return Family(make, wave, ({0: "b", 1: "20*samples"},), ((2, 400), (1, 320), (3, 640), (1, 1020)), {"samples": 4})


def clip_text() -> Family:
    config = dict(BERT, **SPECIAL)
    return encoder("CLIPTextModel", "last_hidden_state pooler_output", **config)


MODERN: dict[str, Any] = dict(
    BERT, **SPECIAL, cls_token_id=1, sep_token_id=2, local_attention=8, global_attn_every_n_layers=2
)  # fmt: skip
GEMMA: dict[str, Any] = dict(LLAMA, head_dim=8)
GEMMA_WINDOW: dict[str, Any] = dict(GEMMA, sliding_window=8, query_pre_attn_scalar=8)
SWIN: dict[str, Any] = dict(image_size=64, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4)
CONVNEXT: dict[str, Any] = dict(hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 2, 1], num_labels=7)
SEGFORMER: dict[str, Any] = dict(
    num_encoder_blocks=3, depths=[1, 1, 1], sr_ratios=[4, 2, 1], hidden_sizes=[16, 24, 32], patch_sizes=[7, 3, 3],
    strides=[4, 2, 2], num_attention_heads=[1, 2, 4], mlp_ratios=[2, 2, 2], decoder_hidden_size=16, num_labels=7,
)  # fmt: skip
RESNET: dict[str, Any] = dict(
    embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 2, 1, 1], layer_type="bottleneck"
)
EFFICIENT: dict[str, Any] = dict(
    image_size=64, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320, num_labels=7, dropout_rate=0.0,
    drop_connect_rate=0.0,
)  # fmt: skip
MAMBA: dict[str, Any] = dict(
    hidden_size=32, state_size=8, num_hidden_layers=2, vocab_size=WORDS, use_mambapy=False, use_cache=False, **SPECIAL
)  # fmt: skip
HIDDEN = "last_hidden_state"
EAGER: dict[str, str] = {"attn": "eager"}
BATCHED: dict[str, str] = {"experts": "batched_mm"}

FAMILIES: dict[str, Family] = {
    "bert": encoder("BertModel", f"{HIDDEN} pooler_output", **BERT),
    "bert_qa": encoder("BertForQuestionAnswering", "start_logits end_logits", **BERT),
    "sentence_mean": sentence(False),
    "sentence_dense": sentence(True),
    "mpnet": encoder("MPNetModel", **BERT),
    "distilbert": encoder(
        "DistilBertModel", dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=WORDS, max_position_embeddings=64
    ),
    "xlm_roberta": encoder("XLMRobertaModel", **BERT, pad_token_id=1),
    "albert": encoder("AlbertModel", **BERT, embedding_size=16),
    "electra": encoder("ElectraModel", **BERT, embedding_size=16),
    "deberta_v3": encoder(
        "DebertaV2Model", attention="eager", **BERT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16,
        position_biased_input=False, share_att_key=True, norm_rel_ebd="layer_norm", max_relative_positions=-1,
    ),
    "mobilebert": replace(
        encoder(
            "MobileBertModel", **dict(BERT, num_attention_heads=2), embedding_size=16, intra_bottleneck_size=16,
            num_feedforward_networks=2,
        ),
        shapes=((2, 16), (1, 3), (1, 7), (3, 13), (4, 48)), least={"n": 3},
    ),
    "modernbert": replace(encoder("ModernBertModel", **MODERN), for_onnx=EAGER),
    "longformer": encoder("LongformerModel", attention="eager", **BERT, attention_window=8, **SPECIAL),
    "llama31": decoder("LlamaForCausalLM", **LLAMA, rope_parameters=ROPE3),
    "mistral": replace(decoder("MistralForCausalLM", **LLAMA, sliding_window=8), for_onnx=EAGER),
    "phi3": decoder("Phi3ForCausalLM", **LLAMA),
    "gemma": decoder("GemmaForCausalLM", **GEMMA),
    "gemma2": decoder("Gemma2ForCausalLM", attention="eager", **GEMMA_WINDOW),
    "gemma3": replace(
        decoder("Gemma3ForCausalLM", **GEMMA_WINDOW, layer_types=["sliding_attention", "full_attention"]), for_onnx=EAGER
    ),
    "qwen2": decoder("Qwen2ForCausalLM", **LLAMA),
    "qwen3": decoder("Qwen3ForCausalLM", **LLAMA, head_dim=8),
    "mixtral": replace(decoder("MixtralForCausalLM", **LLAMA, **EXPERTS), for_onnx=BATCHED),
    "qwen3_moe": replace(decoder("Qwen3MoeForCausalLM", **LLAMA, **QWEN_EXPERTS), for_onnx=BATCHED),
    "mixtral_batched": decoder("MixtralForCausalLM", **LLAMA, **EXPERTS, experts="batched_mm"),
    "gpt2": decoder("GPT2LMHeadModel", **GPT),
    "gpt_neox": decoder("GPTNeoXForCausalLM", **BERT, rotary_pct=0.25, **SPECIAL),
    "falcon": decoder("FalconForCausalLM", **BERT, **SPECIAL),
    "falcon_alibi": decoder("FalconForCausalLM", **BERT, **SPECIAL, alibi=True, new_decoder_architecture=False),
    "bloom": decoder("BloomForCausalLM", attention="eager", hidden_size=32, n_layer=2, n_head=4, vocab_size=WORDS, **SPECIAL),
    "opt": decoder(
        "OPTForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, vocab_size=WORDS,
        max_position_embeddings=64, word_embed_proj_dim=32, **SPECIAL,
    ),
    "llama_step": step("LlamaForCausalLM", 2, **LLAMA),
    "gpt2_step": step("GPT2LMHeadModel", 4, **GPT),
    "t5_encoder": replace(encoder("T5EncoderModel", **T5), for_onnx=EAGER),
    "t5_full": replace(t5_full(), for_onnx=EAGER),
    "whisper_encoder": whisper_encoder(),
    "whisper_decoder": whisper_decoder(),
    "wav2vec2": wav2vec2(),
    "clip_text": clip_text(),
    "clip_vision": vision("CLIPVisionModel", f"{HIDDEN} pooler_output", STATIC_IMAGE, **VIT),
    "siglip_vision": vision("SiglipVisionModel", f"{HIDDEN} pooler_output", STATIC_IMAGE, **VIT),
    "vit": vision("ViTForImageClassification", "logits", STATIC_IMAGE, **VIT, num_labels=7),
    "vit_hw": vision("ViTModel", HIDDEN, IMAGE, {"interpolate_pos_encoding": True}, **VIT),
    "dinov2": vision("Dinov2Model", HIDDEN, STATIC_IMAGE, **VIT),
    "swin": replace(vision("SwinModel", f"{HIDDEN} pooler_output", STATIC_IMAGE, **SWIN), for_onnx=EAGER),
    "convnext": vision("ConvNextForImageClassification", "logits", IMAGE, **CONVNEXT),
    "segformer": vision("SegformerForSemanticSegmentation", "logits", IMAGE, **SEGFORMER),
    "resnet50": vision("ResNetForImageClassification", "logits", IMAGE, **RESNET, num_labels=7),
    "efficientnet": vision("EfficientNetForImageClassification", "logits", IMAGE, **EFFICIENT),
    "mamba_hf": Family(
        lambda: Call(lazily("MambaForCausalLM", MAMBA)(), "input_ids", "logits", use_cache=False),
        lambda g, s: (ids(g, s[0], 16),), ({0: "b"},), ((2,), (1,), (3,), (5,)),  # its scan is unrolled at the example's length
    ),
}  # fmt: skip
