"""Tokens per second of 1, 4 and 16 texts that are generated at a time, beside openvino-genai and llama.cpp.

    python -m experiments.serving.streams --work FOLDER --peer-python PYTHON [--tiny] [--tune-minutes 4] [--rounds 7] [--out NAME]

A Llama-style decoder with weights from a seed, in float32, two threads. All texts arrive at once. Their prompts begin with the same
`SHARED` tokens, which every contender has in its caches from earlier texts, and go on with 16 to 64 tokens of their own, which are new in
every call. Each text gets `ADDED` tokens, the likeliest ones. A time is that of all tokens of all texts, prompts included.

Contenders run in processes of their own, which call them without HTTP and without a tokenizer, one after the other in each round:

* `ours`: the paged decoder of `relax-tune serve`, tuned by `relax-tune tune --effort quick` for the served shapes (`--profile`);
* `ours.untuned`: the same, built without records;
* `openvino`: ContinuousBatchingPipeline of openvino-genai with caches in float32, and `openvino.u8` with its default, 8 bits;
* `llama`: llama.cpp's batches of several sequences with caches in float32, and `llama.f16` with its defaults, caches in float16 and
  flash attention. A step has a token of every text, and new prompts as a whole.

`--peer-python` has openvino, openvino-genai, llama-cpp-python and gguf. The page states how many texts got the tokens of `ours`: the
weights are random, so that the two likeliest tokens may differ by less than rounding does. Without `--out` the results are only printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.contenders import PAUSE_SECS, Contender, serve
from experiments.harness.decoder_folder import write_folder
from experiments.harness.e2e_cases import Decoder, decoder_of
from experiments.harness.pages import environment, write_page

STREAMS, SHARED, ADDED, POSITIONS, THREADS = (1, 4, 16), 64, 64, 256, 2
BOUNDS = {"t": (1, 256), "r": (1, 16), "w": (1, POSITIONS // 16)}
OURS = ("ours", "ours.untuned")
PEERS = ("openvino", "openvino.u8", "llama", "llama.f16")
Generate = Callable[[list[list[int]]], list[list[int]]]
"""Returns the added tokens of prompts."""
SELF = ["-m", "experiments.serving.streams"]


def shared_beginning(vocabulary: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(0).integers(1, vocabulary, SHARED)]


def prompts_of(count: int, call: int, vocabulary: int) -> list[list[int]]:
    """Return the prompts of a call, counted from 1; no two calls have a text in common."""
    rng, beginning = np.random.default_rng([count, call]), shared_beginning(vocabulary)
    return [beginning + rng.integers(1, vocabulary, rng.integers(16, 65)).tolist() for _ in range(count)]


def ours(file: Path, shapes: Any = None) -> Generate:
    import relax_tune as rt
    from relax_tune.runtime.generation.paged import PagedDecoder, paged_steps
    from relax_tune.runtime.generation.stopping import StopRules

    decoder = PagedDecoder(rt.load(file, threads=THREADS, shapes=shapes))
    config = rt.GenerationConfig(max_new_tokens=ADDED)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        steps = paged_steps(decoder, prompts, config, StopRules(config, None))
        texts = list(next(steps))
        for _ in steps:
            pass
        return [text.tokens[text.prompt :] for text in texts]

    return generate


def answer_of(name: str, work: Path) -> Callable[[str], tuple[Callable[..., Any], ...]]:
    """Return the cases of a contender (`harness.contenders.serve`), numbers of texts. Numbers of a result are its tokens."""
    vocabulary = decoder_at(work).vocabulary
    if name in OURS:
        generate = ours(work / f"{name}.rta")
    else:
        from experiments.serving import stream_peers

        generate = stream_peers.open_peer(name, work, shared_beginning(vocabulary))

    def answer(case: str) -> tuple[Callable[..., Any], ...]:
        count, calls, texts = int(case), [0], list[list[int]]()

        def once() -> None:
            calls[0] += 1
            texts[:] = generate(prompts_of(count, calls[0], vocabulary))

        return once, lambda: [token for text in texts for token in text]

    return answer


def decoder_at(work: Path) -> Decoder:
    return decoder_of((work / "tiny").exists())


def prepare(work: Path, tiny: bool, tuned_minutes: float, peer_python: str | None) -> None:
    """Write what contenders read, where it is missing: folders, artifacts, records, the peers' files. tuned_minutes: 0 for no tuning"""
    import relax_tune as rt

    work.mkdir(parents=True, exist_ok=True)
    (work / "tiny").touch() if tiny else (work / "tiny").unlink(missing_ok=True)
    folder, profile = write_folder(work / "decoder", decoder_of(tiny), POSITIONS), work / "shapes.json"
    options: dict[str, Any] = {"bounds": BOUNDS, "kv_cache": "paged", "target": f"c:threads={THREADS}"}
    if not (work / "ours.untuned.rta").exists():
        rt.build(folder, db="memory://", **options).save(work / "ours.untuned.rta")
    if tuned_minutes and not (work / "ours.rta").exists():
        options |= {"db": f"sqlite:///{work / 'records.db'}", "effort": "quick", "profile": profile}
        if not (work / "records.db").exists():
            count_shapes(work, profile)
            rt.tune(folder, max_minutes=tuned_minutes, **options)
        rt.build(folder, **options).save(work / "ours.rta")
    if peer_python:
        subprocess.run([peer_python, *SELF, "--work", str(work), "--write"], check=True)


def count_shapes(work: Path, file: Path) -> None:
    """Count the shapes of one call of each number of texts."""
    import relax_tune as rt

    shapes = rt.ShapeProfile()
    generate = ours(work / "ours.untuned.rta", shapes)
    for count in STREAMS:
        generate(prompts_of(count, 0, decoder_at(work).vocabulary))
    shapes.save(file)


def measure(
    contenders: Sequence[Contender], rounds: int, limit_secs: float
) -> tuple[dict[str, dict[int, list[float]]], dict[str, Any]]:
    """Return seconds and last tokens by contender and number of texts. The first to be called is another one in each round.

    A contender that fails says so on standard error, and is left out. No round begins after `limit_secs`.
    """
    start = time.monotonic()
    times: dict[str, dict[int, list[float]]] = {c.name: {count: [] for count in STREAMS} for c in contenders}
    texts: dict[str, Any] = {c.name: {} for c in contenders}
    for turn in range(rounds):
        if turn and time.monotonic() - start > limit_secs:
            break
        at = turn % len(contenders)
        for count in STREAMS:
            for c in (*contenders[at:], *contenders[:at]):
                if c.name not in times:
                    continue
                time.sleep(PAUSE_SECS)
                result = c.time(str(count), 1)
                if "error" in result:
                    print(f"{c.name}, {count} texts: {result['error']}", file=sys.stderr)
                    del times[c.name]
                    continue
                times[c.name][count] += result["secs"]
                print(f"{c.name}, {count} texts: {result['secs'][0]:.3f} s", file=sys.stderr)
                texts[c.name][count] = np.reshape(result["head"], (count, ADDED)).astype(int).tolist()
    return times, texts


def agreement(texts: Mapping[int, Any], reference: Mapping[int, Any]) -> str:
    pairs = [pair for count in reference for pair in zip(texts[count], reference[count], strict=True)]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def page(times: Mapping[str, Mapping[int, list[float]]], same: Mapping[str, str], rounds: int) -> list[str]:
    rates = {n: {c: c * ADDED / statistics.median(secs) for c, secs in by.items()} for n, by in times.items()}
    first = next(iter(times))
    lines = [
        "# Texts generated at a time",
        "",
        f"Tokens per second, medians of {rounds} rounds; float32 weights, {SHARED} shared and 16 to 64 own tokens of each prompt,",
        f"{ADDED} added tokens a text, {THREADS} threads (`experiments/serving/streams.py` states the settings of each).",
        "",
        f"| | {' | '.join(f'{n} texts' for n in STREAMS)} | texts as `{first}` |",
        "|---|" + "---|" * (len(STREAMS) + 1),
    ]
    for name, by in rates.items():
        lines.append(f"| {name} | {' | '.join(f'{by[c]:.0f}' for c in STREAMS)} | {same[name]} |")
    peers = [n for n in rates if n not in OURS]
    if peers:
        for name in (n for n in OURS if n in rates):
            ratios = [rates[name][c] / max(rates[p][c] for p in peers) for c in STREAMS]
            lines.append(f"| {name} / best peer | {' | '.join(f'{x:.2f}' for x in ratios)} | |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python", help="a Python with the peers; without it they are left out")
    parser.add_argument("--tiny", action="store_true", help="a decoder of two narrow layers, to try the script")
    parser.add_argument("--tune-minutes", type=float, default=4.0, help="limit of tuning; 0: leave the tuned build out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit-secs", type=float, default=600.0, help="begin no round after so many seconds")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--prepare", action="store_true", help="write what contenders read, and measure nothing")
    parser.add_argument("--out")
    parser.add_argument("--contender", choices=(*OURS, *PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.contender:
        serve(answer_of(a.contender, a.work))
        return
    if a.write:
        from experiments.serving import stream_peers

        stream_peers.write_files(a.work, decoder_at(a.work))
        return
    facts = environment()
    prepare(a.work, a.tiny, a.tune_minutes, a.peer_python)
    if a.prepare:
        return
    pythons = dict.fromkeys(OURS if a.tune_minutes else OURS[1:], sys.executable)
    pythons |= dict.fromkeys(a.peers if a.peer_python else (), a.peer_python or "")
    contenders = [
        Contender(name, [python, *SELF, "--work", str(a.work), "--contender", name], log=a.work / f"{name}.log")
        for name, python in pythons.items()
    ]
    try:
        times, texts = measure(contenders, a.rounds, a.limit_secs)
    finally:
        for c in contenders:
            c.close()
    rounds = min(len(secs) for by in times.values() for secs in by.values())
    lines = page(times, {n: agreement(texts[n], texts[next(iter(times))]) for n in times}, rounds)
    if a.out:
        write_page(a.out, lines, {"seconds": times, "environment": facts}, facts)
    else:
        print(json.dumps({n: {c: [round(s, 4) for s in secs] for c, secs in by.items()} for n, by in times.items()}))
        print("\n".join(lines))


if __name__ == "__main__":
    main()
