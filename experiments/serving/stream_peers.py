"""The peers of `streams.py`: continuous batching of openvino-genai, and llama.cpp's batches of several sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from experiments.harness.e2e_cases import Array, Decoder
from experiments.serving.openvino_decoder import write_openvino
from experiments.serving.streams import ADDED, POSITIONS, STREAMS, THREADS, decoder_at
from experiments.stronger.llama import write_decoder

Generate = Callable[[list[list[int]]], list[list[int]]]
TEXTS = max(STREAMS)


def write_files(work: Path, d: Decoder) -> None:
    if not (work / "openvino" / "openvino_model.xml").exists():
        write_openvino(work / "openvino", d, POSITIONS)
    if not (work / "llama.gguf").exists():
        write_decoder(work / "llama.gguf", "f32", d, POSITIONS)


def open_peer(name: str, work: Path, beginning: Sequence[int]) -> Generate:
    kind, _, caches = name.partition(".")
    if kind == "openvino":
        return _openvino(work / "openvino", caches or "f32")
    return LlamaBatches(work / "llama.gguf", caches == "", decoder_at(work).vocabulary, beginning)


def _openvino(folder: Path, caches: str) -> Generate:
    import openvino
    import openvino_genai as genai

    settings = genai.SchedulerConfig()
    settings.enable_prefix_caching = True
    settings.max_num_seqs = TEXTS
    settings.cache_size = 1
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": caches, "INFERENCE_NUM_THREADS": THREADS}
    pipeline = genai.ContinuousBatchingPipeline(folder, settings, "CPU", properties)
    config = genai.GenerationConfig(max_new_tokens=ADDED, ignore_eos=True, do_sample=False)
    config.set_eos_token_id(0)  # a valid one is required, also where it is ignored

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        tensors = [openvino.Tensor(np.array([p], np.int64)) for p in prompts]
        return [list(r.m_generation_ids[0]) for r in pipeline.generate(tensors, [config] * len(prompts))]

    return generate


class LlamaBatches:
    """Sequences of a context of llama.cpp that are computed together; the last sequence holds the shared beginning.

    Args:
        file: The GGUF file.
        exact: Keys and values in float32, without flash attention, which rounds them; otherwise llama.cpp's defaults.
        vocabulary: Number of logits of a token.
        beginning: Tokens at the beginning of all prompts.
    """

    def __init__(self, file: Path, exact: bool, vocabulary: int, beginning: Sequence[int]) -> None:
        import llama_cpp as c

        self.c, self.vocabulary, self.beginning = c, vocabulary, list(beginning)
        c.llama_backend_init()
        options = c.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = c.llama_model_load_from_file(str(file).encode(), options)
        own = c.llama_context_default_params()
        own.n_threads = own.n_threads_batch = THREADS
        own.n_ctx = (TEXTS + 1) * POSITIONS
        own.n_seq_max, own.kv_unified = TEXTS + 1, True  # sequences share the cells of a beginning
        if exact:
            own.type_k = own.type_v = c.GGML_TYPE_F32
            own.flash_attn_type = 0
        self.context = c.llama_init_from_model(self.model, own)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not open {file.name}")
        self.memory = c.llama_get_memory(self.context)
        self.batch = c.llama_batch_init(own.n_batch, 0, 1)
        self._compute([(TEXTS, 0, self.beginning)])

    def _compute(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> Array:
        """Compute tokens of sequences (number, first position, tokens); return the logits after the last one of each."""
        batch, at = self.batch, 0
        for number, start, tokens in rows:
            for place, token in enumerate(tokens):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, start + place, 1
                batch.seq_id[at][0], batch.logits[at] = number, place == len(tokens) - 1
                at += 1
        batch.n_tokens = at
        if code := self.c.llama_decode(self.context, batch):
            raise RuntimeError(f"llama.cpp: status {code} for {at} tokens")
        logits = self.c.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (len(rows) * self.vocabulary,)).reshape(len(rows), self.vocabulary)

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        start = len(self.beginning)
        for number in range(len(prompts)):
            self.c.llama_memory_seq_rm(self.memory, number, -1, -1)
            self.c.llama_memory_seq_cp(self.memory, TEXTS, number, -1, -1)
        rows = [(number, start, prompt[start:]) for number, prompt in enumerate(prompts)]
        texts: list[list[int]] = [[] for _ in prompts]
        for _ in range(ADDED):
            for text, token in zip(texts, self._compute(rows).argmax(-1).tolist(), strict=True):
                text.append(token)
            rows = [(number, place + len(tokens), texts[number][-1:]) for number, place, tokens in rows]
        return texts
