"""Tokens per second of 1, 4 and 16 texts that are generated at a time, beside OpenVINO GenAI and llama.cpp.

    python -m experiments.serving.streams_peers --work FOLDER [--tiny] [--effort quick] [--rounds 5] [--out NAME]

A Llama-style decoder with weights from a seed, in float32, two threads. All texts arrive at once, with prompts of 16 to 64 tokens, and get
64 tokens each, the likeliest ones. A time is that of all tokens of all texts, prompts included. Contenders run in processes of their own,
one after the other in each round:

* `paged`: `rt.generate` over paged caches, texts together; `apart`: contiguous caches, texts one by one;
* `openvino`: GenAI's `ContinuousBatchingPipeline` (openvino-genai, gguf) with keys and values in float32;
* `llama`: llama.cpp (llama-cpp-python, gguf), a sequence for each text, prompts in one batch, then a token of each in every step.

Contenders whose packages are missing are left out. The page states how many texts got the tokens of `apart`; rounding may change a few.
Without `--out` the results are only printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import relax_tune as rt
from experiments.harness.decoder_folder import write_folder
from experiments.harness.e2e_cases import Decoder, decoder_of
from experiments.harness.pages import environment, write_page
from experiments.stronger.llama import write_decoder

STREAMS, ADDED, POSITIONS, THREADS = (1, 4, 16), 64, 256, 2
NEEDS: Mapping[str, tuple[str, ...]] = {
    "paged": (), "apart": (), "openvino": ("openvino_genai", "gguf"), "llama": ("llama_cpp", "gguf"),
}  # fmt: skip
BOUNDS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "paged": {"t": (1, 256), "r": (1, 16), "w": (1, POSITIONS // 16)},
    "apart": {"b": (1, 1), "n": (1, 64), "m": (0, POSITIONS - 1)},
}
GGUF = "decoder.gguf"
Generate = Callable[[list[list[int]]], list[list[int]]]
"""Returns the added tokens of prompts."""


def prompts_of(count: int, vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(1, vocabulary, rng.integers(16, 65)).tolist() for _ in range(count)]


def ours(kind: str, work: Path) -> Generate:
    model = rt.load(work / f"{kind}.rta", threads=THREADS)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        together = [prompts] if kind == "paged" else [[p] for p in prompts]
        rows = [row for part in together for row in rt.generate(model, part, ADDED)]
        return [row[len(p) :].tolist() for p, row in zip(prompts, rows, strict=True)]

    return generate


def openvino(work: Path) -> Generate:
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching, scheduler.max_num_seqs = 1, True, max(STREAMS)
    hints = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = genai.ContinuousBatchingPipeline(str(work / GGUF), scheduler, "CPU", hints)
    config = genai.GenerationConfig(max_new_tokens=ADDED, ignore_eos=True, do_sample=False)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        inputs = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        return [list(r.m_generation_ids[0]) for r in pipeline.generate(inputs, [config] * len(inputs))]

    return generate


def llama(work: Path) -> Generate:
    import llama_cpp as c

    c.llama_backend_init()
    options = c.llama_model_default_params()
    options.n_gpu_layers = 0
    model = c.llama_model_load_from_file(str(work / GGUF).encode(), options)
    own = c.llama_context_default_params()
    own.n_threads = own.n_threads_batch = THREADS
    own.n_seq_max = max(STREAMS)
    own.n_ctx = own.n_batch = own.n_ubatch = max(STREAMS) * POSITIONS
    own.kv_unified = True
    own.type_k = own.type_v = c.GGML_TYPE_F32
    context = c.llama_init_from_model(model, own)
    if not context:
        raise RuntimeError("llama.cpp could not open the decoder")
    batch, vocabulary = c.llama_batch_init(own.n_batch, 0, 1), decoder_at(work).vocabulary

    def step(tokens: Sequence[Sequence[int]], places: Sequence[int]) -> list[int]:
        """Compute the next tokens of all texts; return the likeliest one after each."""
        at, last = 0, []
        for row, (more, start) in enumerate(zip(tokens, places, strict=True)):
            for n, token in enumerate(more):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, start + n, 1
                batch.seq_id[at][0], batch.logits[at] = row, n + 1 == len(more)
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        if code := c.llama_decode(context, batch):
            raise RuntimeError(f"llama.cpp: status {code}")
        rows = (c.llama_get_logits_ith(context, i) for i in last)
        return [int(np.ctypeslib.as_array(row, (vocabulary,)).argmax()) for row in rows]

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        places, news = [0] * len(prompts), list(map(list, prompts))
        texts: list[list[int]] = [[] for _ in prompts]
        for _ in range(ADDED):
            following = step(news, places)
            places = [place + len(new) for place, new in zip(places, news)]
            news = [[token] for token in following]
            for text, token in zip(texts, following):
                text.append(token)
        return texts

    return generate


def decoder_at(work: Path) -> Decoder:
    return decoder_of(work.joinpath("tiny").exists())


def run(contender: str, work: Path) -> None:
    """Print seconds and tokens of every number of texts, as JSON."""
    peers: Mapping[str, Callable[[Path], Generate]] = {"openvino": openvino, "llama": llama}
    generate = peers[contender](work) if contender in peers else ours(contender, work)
    results = {}
    for count in STREAMS:
        prompts = prompts_of(count, decoder_at(work).vocabulary)
        generate(prompts)  # the first call of a shape may compile or allocate
        start = time.perf_counter()
        texts = generate(prompts)
        results[count] = {"secs": time.perf_counter() - start, "texts": texts}
    print(json.dumps(results))


def prepare(work: Path, tiny: bool, effort: str) -> list[str]:
    """Write the model of every contender; return the contenders whose packages are there."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "tiny").touch() if tiny else (work / "tiny").unlink(missing_ok=True)
    decoder = decoder_of(tiny)
    folder = write_folder(work / "decoder", decoder, POSITIONS)
    for kind, bounds in BOUNDS.items():
        model = rt.load_model(folder, bounds=bounds, kv_cache="paged" if kind == "paged" else "contiguous")
        store = f"sqlite:///{work / 'records.db'}"
        if effort != "none":
            rt.tune(model, target="c", db=store, effort=effort)
        rt.build(model, target="c", db=store if effort != "none" else "memory://").save(work / f"{kind}.rta")
    present = [name for name, needs in NEEDS.items() if all(map(find_spec, needs))]
    if {"openvino", "llama"} & set(present):
        write_decoder(work / GGUF, "f32", decoder, POSITIONS)
    return present


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a decoder of two narrow layers, to try the script")
    parser.add_argument("--effort", default="quick", help="of tuning; none: predicted kernels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--contender", choices=NEEDS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.contender:
        run(a.contender, a.work)
        return
    facts = environment()
    contenders = prepare(a.work, a.tiny, a.effort)
    times: dict[str, dict[int, list[float]]] = {n: {count: [] for count in STREAMS} for n in contenders}
    texts: dict[str, Any] = {}
    for _ in range(a.rounds):
        for name in contenders:
            command = [sys.executable, "-m", "experiments.serving.streams_peers", "--work", a.work, "--contender", name]
            variables = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
            done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True, env=variables)
            found = json.loads(done.stdout.splitlines()[-1])
            for count in STREAMS:
                times[name][count].append(found[str(count)]["secs"])
            texts[name] = found
    lines = page(times, {n: agreement(texts[n], texts["apart"]) for n in contenders}, a.rounds)
    print("\n".join(lines))
    if a.out:
        write_page(a.out, lines, {"seconds": times, "environment": facts}, facts)


def agreement(texts: Any, reference: Any) -> str:
    pairs = [pair for count in reference for pair in zip(texts[count]["texts"], reference[count]["texts"])]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def page(times: Mapping[str, Mapping[int, list[float]]], same: Mapping[str, str], rounds: int) -> list[str]:
    lines = ["# Texts generated at a time", ""]
    lines += [
        f"Tokens per second, medians of {rounds} rounds; {ADDED} tokens a text (`experiments/serving/streams_peers.py`).",
        "",
    ]
    lines += [
        f"| | {' | '.join(f'{n} texts' for n in STREAMS)} | texts as `apart` |",
        "|---|" + "---|" * (len(STREAMS) + 1),
    ]
    for name, by in times.items():
        rates = [f"{count * ADDED / statistics.median(by[count]):.0f}" for count in STREAMS]
        lines.append(f"| {name} | {' | '.join(rates)} | {same[name]} |")
    return lines


if __name__ == "__main__":
    main()
