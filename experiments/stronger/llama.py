"""llama.cpp for `peers.py`: the models' weights as GGUF files, and calls of its C functions through llama-cpp-python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.decoder_folder import decoder_weights
from experiments.harness.e2e_cases import Array, Decoder
from experiments.stronger.cases import BATCH, DECODER, LENGTH, POSITIONS, THREADS, given, numbers

LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
DECODER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ENCODER_LAYER = {
    "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
}  # fmt: skip
ENCODER_NAMES = {
    "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
}  # fmt: skip
FULL = ("position_embd.weight", "token_types.weight")


def add_tensor(writer: Any, name: str, array: Array, kind: str) -> None:
    """Add a tensor, matrices in the kind of the file, all else in float32."""
    from gguf import GGMLQuantizationType, quants

    stored = "F32" if array.ndim < 2 or name in FULL else kind.upper()
    chosen = GGMLQuantizationType[stored]
    writer.add_tensor(name, quants.quantize(np.ascontiguousarray(array, np.float32), chosen), raw_dtype=chosen)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def paired(weight: Array, heads: int) -> Array:
    """Reorder the rows of a projection from halves to neighbours, as llama.cpp's rotary embedding of a llama reads them."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_decoder(file: Path, kind: str, d: Decoder = DECODER, positions: int = POSITIONS) -> None:
    """Write the Llama-style decoder."""
    from gguf import GGUFWriter

    writer = GGUFWriter(file, "llama")
    writer.add_context_length(positions)
    writer.add_embedding_length(d.width)
    writer.add_block_count(d.layers)
    writer.add_feed_forward_length(d.inner)
    writer.add_head_count(d.heads)
    writer.add_head_count_kv(d.groups)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(d.head_size)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(d.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    for name, array in decoder_weights(d).items():
        own = name.removesuffix(".weight")
        if own.startswith("model.layers."):
            number, part = own.removeprefix("model.layers.").split(".", 1)
            turned = {"attn_q": d.heads, "attn_k": d.groups}.get(LAYER[part])
            array = array if turned is None else paired(array, turned)
            own = f"blk.{number}.{LAYER[part]}"
        else:
            own = DECODER_NAMES[own]
        add_tensor(writer, f"{own}.weight", array, kind)
    finish(writer)


def write_encoder(file: Path, folder: Path, kind: str) -> None:
    """Write MiniLM."""
    from gguf import GGUFWriter, PoolingType
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors")
    layers = 1 + max(int(n.split(".")[2]) for n in weights if n.startswith("encoder.layer."))
    vocabulary, width = weights["embeddings.word_embeddings.weight"].shape
    writer = GGUFWriter(file, "bert")
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(weights["encoder.layer.0.intermediate.dense.weight"].shape[0])
    writer.add_head_count(width // 32)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.MEAN)
    writer.add_token_type_count(weights["embeddings.token_type_embeddings.weight"].shape[0])
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("no_vocab")
    for name, array in weights.items():
        own, _, last = name.rpartition(".")
        if own.startswith("encoder.layer."):
            number, part = own.removeprefix("encoder.layer.").split(".", 1)
            own = f"blk.{number}.{ENCODER_LAYER[part]}"
        elif own in ENCODER_NAMES:
            own = ENCODER_NAMES[own]
        else:
            continue  # the pooler, which sentence embeddings do without
        add_tensor(writer, f"{own}.{last}", array, kind)
    finish(writer)


class Context:
    """An open model with room for the cases. exact: keys and values in float32"""

    def __init__(self, file: Path, encoder: bool, exact: bool) -> None:
        import llama_cpp as c

        self.c, self.encoder = c, encoder
        c.llama_backend_init()
        options = c.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = c.llama_model_load_from_file(str(file).encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {file.name}")
        own = c.llama_context_default_params()
        own.n_threads = own.n_threads_batch = THREADS
        own.n_ctx = own.n_batch = own.n_ubatch = POSITIONS
        if encoder:
            own.embeddings, own.n_seq_max, own.kv_unified = True, BATCH, True
        if exact:
            own.type_k = own.type_v = c.GGML_TYPE_F32
            own.flash_attn_type = 0  # it rounds
        self.context = c.llama_init_from_model(self.model, own)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not open {file.name}")
        self.batch = c.llama_batch_init(POSITIONS, 0, 1)

    def __call__(self, ids: Array, start: int = 0) -> None:
        """Run rows of ids from a position on. Of an encoder each row is a sequence; else the last token gives logits."""
        batch, (rows, length) = self.batch, ids.shape
        batch.n_tokens = rows * length
        for at, token in enumerate(ids.ravel().tolist()):
            row, place = divmod(at, length)
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, start + place, 1
            batch.seq_id[at][0], batch.logits[at] = row, self.encoder or place == length - 1
        run = self.c.llama_encode if self.encoder else self.c.llama_decode
        if code := run(self.context, batch):
            raise RuntimeError(f"llama.cpp: status {code} for {rows} x {length} tokens from {start}")

    def forget(self, start: int) -> None:
        """Drop keys and values from a position on."""
        self.c.llama_memory_seq_rm(self.c.llama_get_memory(self.context), 0, start, -1)

    def logits(self) -> Array:
        return np.array(np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, -1), (DECODER.vocabulary,)))

    def embeddings(self, rows: int) -> Array:
        width = self.c.llama_model_n_embd(self.model)
        found = [np.ctypeslib.as_array(self.c.llama_get_embeddings_seq(self.context, r), (width,)) for r in range(rows)]
        return np.array([x / np.linalg.norm(x) for x in found])


def answers(kind: str, model: str, folder: Path) -> tuple[Callable[[str], tuple[Callable[..., Any], ...]], str]:
    """Return the cases of a file, and llama.cpp's description of the instructions that it uses."""
    context = Context(folder / f"{kind}.gguf", model == "minilm", kind == "f32")

    def answer(case: str) -> tuple[Callable[..., Any], ...]:
        if model == "decode":
            return steps(context, case, folder)
        ids = given(model, case, folder)[0]

        def once() -> Array:
            if model == "prefill":
                context.forget(0)
            context(ids)
            return context.embeddings(len(ids)) if model == "minilm" else context.logits()

        return once, lambda: numbers(once())

    return answer, context.c.llama_print_system_info().decode().strip()


def steps(context: Context, case: str, folder: Path) -> tuple[Callable[[], Any], Callable[[], Sequence[float]], Any]:
    """Return a step after the tokens of a case, and a function that restores their keys and values."""
    with np.load(folder / f"past-{case}.npz") as kept:
        past, token = kept["past_ids"], kept["id"]
    place = [0]

    def restore() -> None:
        context.forget(0)
        context(past)
        place[0] = past.shape[1]

    def step() -> Array:
        context(token, place[0])
        place[0] += 1
        return context.logits()

    return step, lambda: numbers(step()), restore
