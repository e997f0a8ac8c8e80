"""Further models of `model_families.py` of transformers: a text model of each family that `models.py` does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from experiments.families.models import (
    BERT,
    BN,
    EAGER,
    EXPERTS,
    GPT,
    HIDDEN,
    LLAMA,
    SPECIAL,
    T5,
    TEXT,
    WORDS,
    Call,
    Call3,
    Family,
    decoder,
    encoder,
    ids,
    lazily,
    text,
)

FOUR = ((2, 16), (1, 4), (1, 7), (3, 13), (4, 48))
EIGHT = ((2, 16), (1, 8), (1, 11), (3, 13), (4, 48))
SMALL: dict[str, Any] = dict(d_model=32, num_layers=2, num_heads=4, vocab_size=WORDS, **SPECIAL)
SEQ2SEQ: dict[str, Any] = dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    vocab_size=WORDS,
    max_position_embeddings=64,
    decoder_start_token_id=2,
    **SPECIAL,
)
GEMMA_HEADS: dict[str, Any] = dict(LLAMA, head_dim=8)
LATENT: dict[str, Any] = dict(
    LLAMA,
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
ROPE_LINEAR: dict[str, Any] = dict(rope_type="linear", factor=2.0, rope_theta=10000.0)
ROPE_YARN: dict[str, Any] = dict(rope_type="yarn", factor=4.0, rope_theta=10000.0, original_max_position_embeddings=32)


def translator(name: str, names: str = "input_ids attention_mask decoder_input_ids", **config: Any) -> Family:
    inner = lazily(name, config)

    def inputs(g: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        return (*text(g, shape), ids(g, shape[0], (shape[1] + 2) // 2))

    make = lambda: Call3(inner(), names, "logits", use_cache=False)
    return Family(make, inputs, (BN, BN, {0: "b", 1: "m"}), TEXT)


def tokens(
    name: str,
    result: str = "logits",
    shapes: Sequence[tuple[int, ...]] = TEXT,
    calling: Mapping[str, Any] | None = None,
    **config: Any,
) -> Family:
    """A model of tokens without a mask."""
    inner = lazily(name, config)
    make = lambda: Call(inner(), "input_ids", result, **(calling or {}))
    return Family(make, lambda g, s: (ids(g, *s),), (BN,), shapes)


def boxes() -> Family:
    """Text with the place of each word on its page."""
    inner = lazily("LiltModel", dict(BERT, hidden_size=48, max_2d_position_embeddings=64, channel_shrink_ratio=2))

    def inputs(g: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        low = torch.randint(0, 30, (*shape, 2), generator=g)
        size = torch.randint(0, 30, (*shape, 2), generator=g)
        words, mask = text(g, shape)
        return words, torch.cat([low, low + size], dim=-1), mask

    make = lambda: Call3(inner(), "input_ids bbox attention_mask", HIDDEN)
    return Family(make, inputs, (BN, BN, BN), TEXT)


MORE_TEXT: dict[str, Family] = {
    # encoders of text
    "roberta_classes": encoder("RobertaForSequenceClassification", "logits", **BERT, pad_token_id=1),
    "bert_tokens": encoder("BertForTokenClassification", "logits", **BERT, num_labels=5),
    "bert_mlm": encoder("BertForMaskedLM", "logits", **BERT),
    "deberta_v1": encoder(
        "DebertaModel",
        **BERT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=-1,
        position_biased_input=False,
    ),
    "squeezebert": encoder("SqueezeBertModel", **BERT, embedding_size=32),
    "fnet": tokens("FNetModel", HIDDEN, **BERT),
    "funnel": replace(
        encoder(
            "FunnelBaseModel",
            d_model=32,
            n_head=4,
            d_head=8,
            d_inner=64,
            vocab_size=WORDS,
            block_sizes=[1, 1],
            num_decoder_layers=1,
        ),
        shapes=FOUR,
        least={"n": 4},
    ),
    "nystromformer": encoder("NystromformerModel", **BERT, num_landmarks=8, segment_means_seq_len=8),
    "roformer": encoder("RoFormerModel", **BERT, embedding_size=32),
    "convbert": encoder("ConvBertModel", **BERT, embedding_size=32, conv_kernel_size=3, head_ratio=2),
    "big_bird": encoder("BigBirdModel", **BERT, attention_type="original_full"),
    "xlm": encoder(
        "XLMModel", emb_dim=32, n_layers=2, n_heads=4, vocab_size=WORDS, n_words=WORDS, max_position_embeddings=64
    ),
    "flaubert": encoder("FlaubertModel", emb_dim=32, n_layers=2, n_heads=4, n_words=WORDS, max_position_embeddings=64),
    "xlnet": encoder("XLNetModel", d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=WORDS),
    "ibert": encoder("IBertModel", **BERT),
    "megatron_bert": encoder("MegatronBertModel", **BERT),
    "rembert": encoder("RemBertModel", **BERT, input_embedding_size=24, output_embedding_size=24),
    "ernie": encoder("ErnieModel", **BERT),
    "esm": encoder("EsmModel", **BERT, pad_token_id=1, position_embedding_type="rotary", mask_token_id=WORDS - 1),
    "eurobert": encoder("EuroBertModel", **LLAMA),
    "lilt": boxes(),
    "xmod": encoder("XmodModel", **BERT, languages=["en_XX", "de_DE"], default_language="en_XX"),
    "mra": encoder("MraModel", **BERT),
    "splinter": encoder("SplinterModel", **BERT),
    "luke": encoder("LukeModel", **BERT, entity_vocab_size=16, entity_emb_size=16),
    "canine": replace(
        encoder("CanineModel", **BERT, local_transformer_stride=8, num_hash_buckets=64), shapes=EIGHT, least={"n": 8}
    ),
    "nomic_bert": encoder("NomicBertModel", **BERT),
    "mpnet_qa": encoder("MPNetForQuestionAnswering", "start_logits end_logits", **BERT),
    # decoders
    "gptj": decoder("GPTJForCausalLM", **GPT, rotary_dim=4),
    "gpt_neo": decoder(
        "GPTNeoForCausalLM",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=64,
        vocab_size=WORDS,
        **SPECIAL,
    ),
    "gpt_bigcode": decoder("GPTBigCodeForCausalLM", **GPT),
    "codegen": decoder("CodeGenForCausalLM", **GPT, rotary_dim=4),
    "ctrl": decoder("CTRLLMHeadModel", n_embd=32, n_layer=2, n_head=4, dff=64, n_positions=64, vocab_size=WORDS),
    "mpt": decoder(
        "MptForCausalLM", d_model=32, n_layers=2, n_heads=4, max_seq_len=64, vocab_size=WORDS, expansion_ratio=2
    ),
    "biogpt": decoder("BioGptForCausalLM", **BERT, **SPECIAL),
    "xglm": decoder(
        "XGLMForCausalLM",
        d_model=32,
        num_layers=2,
        attention_heads=4,
        ffn_dim=64,
        vocab_size=WORDS,
        max_position_embeddings=64,
        **SPECIAL,
    ),
    "olmo": decoder("OlmoForCausalLM", **LLAMA),
    "olmo2": decoder("Olmo2ForCausalLM", **LLAMA),
    "olmo3": replace(decoder("Olmo3ForCausalLM", **LLAMA, sliding_window=8), for_onnx=EAGER),
    "olmoe": decoder("OlmoeForCausalLM", **LLAMA, num_experts=4, num_experts_per_tok=2, experts="batched_mm"),
    "cohere": decoder("CohereForCausalLM", **LLAMA),
    "cohere2": replace(decoder("Cohere2ForCausalLM", **LLAMA, sliding_window=8), for_onnx=EAGER),
    "granite": decoder("GraniteForCausalLM", **LLAMA),
    "granitemoe": decoder("GraniteMoeForCausalLM", **LLAMA, **EXPERTS),
    "glm": decoder("GlmForCausalLM", **GEMMA_HEADS),
    "glm4": decoder("Glm4ForCausalLM", **GEMMA_HEADS),
    "helium": decoder("HeliumForCausalLM", **GEMMA_HEADS),
    "stablelm": decoder("StableLmForCausalLM", **LLAMA),
    "starcoder2": decoder("Starcoder2ForCausalLM", **LLAMA),
    "persimmon": decoder("PersimmonForCausalLM", **BERT, **SPECIAL),
    "phi": decoder("PhiForCausalLM", **LLAMA),
    "nemotron": decoder("NemotronForCausalLM", **LLAMA),
    "smollm3": decoder("SmolLM3ForCausalLM", **LLAMA),
    "ernie4_5": decoder("Ernie4_5ForCausalLM", **GEMMA_HEADS),
    "exaone4": replace(decoder("Exaone4ForCausalLM", **LLAMA, sliding_window=8), for_onnx=EAGER),
    "arcee": decoder("ArceeForCausalLM", **LLAMA),
    "apertus": decoder("ApertusForCausalLM", **LLAMA),
    "bitnet": decoder("BitNetForCausalLM", **LLAMA),
    "seed_oss": decoder("SeedOssForCausalLM", **GEMMA_HEADS),
    "hunyuan_dense": decoder("HunYuanDenseV1ForCausalLM", **GEMMA_HEADS),
    "llama_linear": decoder("LlamaForCausalLM", **LLAMA, rope_parameters=ROPE_LINEAR),
    "llama_yarn": decoder("LlamaForCausalLM", **LLAMA, rope_parameters=ROPE_YARN),
    "llama_classes": tokens(
        "LlamaForSequenceClassification", "logits", **LLAMA, num_labels=5, calling={"use_cache": False}
    ),
    "qwen2_moe": decoder(
        "Qwen2MoeForCausalLM",
        **LLAMA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        experts="batched_mm",
    ),
    "deepseek_v2": decoder("DeepseekV2ForCausalLM", **LATENT, experts="batched_mm"),
    "deepseek_v3": decoder("DeepseekV3ForCausalLM", **LATENT, experts="batched_mm"),
    "gpt_oss": replace(
        decoder("GptOssForCausalLM", **GEMMA_HEADS, **EXPERTS, sliding_window=8, experts="batched_mm"), for_onnx=EAGER
    ),
    "dbrx": decoder(
        "DbrxForCausalLM",
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        vocab_size=WORDS,
        attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, hidden_size=32),
    ),
    "jetmoe": decoder("JetMoeForCausalLM", **LLAMA, kv_channels=8, num_local_experts=4, num_experts_per_tok=2),
    "phimoe": decoder("PhimoeForCausalLM", **LLAMA, **EXPERTS),
    "lfm2": decoder("Lfm2ForCausalLM", **LLAMA, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "recurrent_gemma": decoder(
        "RecurrentGemmaForCausalLM",
        **LLAMA,
        lru_width=32,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
    ),
    "jamba": decoder(
        "JambaForCausalLM",
        **LLAMA,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_d_conv=4,
        use_mamba_kernels=False,
    ),
    "diffllama": decoder("DiffLlamaForCausalLM", **GEMMA_HEADS),
    "doge": decoder("DogeForCausalLM", **LLAMA),
    "bert_decoder": decoder("BertLMHeadModel", **BERT, is_decoder=True),
    # encoders with decoders
    "bart": translator("BartForConditionalGeneration", **SEQ2SEQ),
    "mbart": translator("MBartForConditionalGeneration", **SEQ2SEQ),
    "marian": translator("MarianMTModel", **SEQ2SEQ),
    "pegasus": translator("PegasusForConditionalGeneration", **SEQ2SEQ),
    "m2m_100": translator("M2M100ForConditionalGeneration", **SEQ2SEQ),
    "blenderbot": translator("BlenderbotForConditionalGeneration", **SEQ2SEQ),
    "blenderbot_small": translator("BlenderbotSmallForConditionalGeneration", **SEQ2SEQ),
    "plbart": translator("PLBartForConditionalGeneration", **SEQ2SEQ),
    "mvp": translator("MvpForConditionalGeneration", **SEQ2SEQ),
    "prophetnet": translator(
        "ProphetNetForConditionalGeneration",
        hidden_size=32,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=WORDS,
        max_position_embeddings=64,
        ngram=2,
        **SPECIAL,
        decoder_start_token_id=2,
    ),
    "mt5": replace(translator("MT5ForConditionalGeneration", **T5), for_onnx=EAGER),
    "umt5": replace(translator("UMT5ForConditionalGeneration", **T5), for_onnx=EAGER),
    "longt5": translator("LongT5ForConditionalGeneration", **T5, local_radius=4),
    "switch": translator(
        "SwitchTransformersForConditionalGeneration",
        **T5,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    "fsmt": translator(
        "FSMTForConditionalGeneration", **SEQ2SEQ, langs=["en", "de"], src_vocab_size=WORDS, tgt_vocab_size=WORDS
    ),
}
