"""Generation over paged caches on devices: the tokens that contiguous caches give, whatever else is computed with a text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import tiny_decoders

import relax_tune as rt
from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import f16
from relax_tune.ir.core.expr import as_int
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.generate import generate, generate_steps
from relax_tune.runtime.generation.config import GenerationConfig
from relax_tune.runtime.generation.paged import GeneratedText, PagedDecoder
from relax_tune.runtime.generation.stopping import StopRules
from relax_tune.runtime.model import Model

pytestmark = pytest.mark.ccompiler
VOCABULARY = tiny_decoders.VOCABULARY
DEVICES = ["c", pytest.param("opencl", marks=[pytest.mark.process, pytest.mark.heavy])]
SETTINGS: tuple[Mapping[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 3, "temperature": 1.5},
    {"repetition_penalty": 1.3, "eos_token_id": (5, 11), "no_repeat_ngram_size": 2},
)


@dataclass
class Pair:
    """A decoder with contiguous caches and one with paged ones: few blocks, tokens and texts."""

    contiguous: Model
    paged: Model


def built(folder: Path, target: str, **options: Any) -> rt.Artifact:
    module = rt.load_model(folder, **options)
    return rt.build(module, target=target, db="memory://", policy="generic", libraries=False)


@pytest.fixture(scope="module", params=DEVICES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if request.param == "opencl":
        pytest.importorskip("pyopencl")
    folder, _ = tiny_decoders.write(tmp_path_factory.mktemp("llama"), "llama")
    device = open_device(request.param)
    first = built(folder, request.param, bounds={"b": (1, 4), "n": (1, 62), "m": (0, 63)})
    second = built(folder, request.param, kv_cache="paged", bounds={"t": (1, 9), "r": (1, 5), "p": (1, 9)})
    with first.open(device) as contiguous, second.open(device) as paged:
        yield Pair(contiguous, paged)


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Random prompts; some begin like others."""
    rng, prompts = np.random.default_rng(seed), list[list[int]]()
    for _ in range(count):
        start = prompts[rng.integers(len(prompts))] if prompts and rng.random() < 0.4 else []
        prompts.append([*start[: rng.integers(40)], *rng.integers(0, VOCABULARY, rng.integers(1, 20)).tolist()])
    return prompts


def test_paged_prompts_of_any_lengths_get_the_tokens_of_contiguous_caches(pair: Pair) -> None:
    prompts = prompts_of(1, 8)
    for settings in SETTINGS:
        expected = generate(pair.contiguous, prompts, 12, **settings)
        for found, row in zip(generate(pair.paged, prompts, 12, **settings), expected, strict=True):
            np.testing.assert_array_equal(found, row)
        steps = list(generate_steps(pair.paged, prompts, 12, **settings))
        for number, (row, prompt) in enumerate(zip(expected, prompts)):
            assert [s.tokens[number] for s in steps if s.live[number]] == row[len(prompt) :].tolist()


def test_paged_random_arrivals_and_cancellations_get_the_tokens_of_generate(pair: Pair) -> None:
    rng, prompts = random.Random(2), prompts_of(2, 24)
    configs = [GenerationConfig(max_new_tokens=rng.randint(1, 25), **rng.choice(SETTINGS)) for _ in prompts]
    expected = [generate(pair.contiguous, [p], config=c)[0][len(p) :].tolist() for p, c in zip(prompts, configs)]
    decoder = PagedDecoder(pair.paged)
    arrivals, active, cancelled = list(zip(prompts, configs)), dict[GeneratedText, int](), set[int]()
    while arrivals or active:
        while arrivals and (not active or rng.random() < 0.5):
            number = len(prompts) - len(arrivals)
            prompt, config = arrivals.pop(0)
            text = decoder.text(prompt, config, StopRules(config))
            active[text] = number
            decoder.add(text)
        step = decoder.step()
        assert step is not None and step.requests <= 5 and step.rows <= 9
        if rng.random() < 0.05:
            text = rng.choice(list(active))
            decoder.cancel(text)
            cancelled.add(active[text])
        for text in [t for t in active if t.ended]:
            number = active.pop(text)
            tokens = text.tokens[text.prompt :]
            assert tokens == (expected[number][: len(tokens)] if number in cancelled else expected[number])
    scheduler = decoder.scheduler
    assert cancelled and scheduler.preempted and scheduler.pool.free == scheduler.pool.count == 9
    assert decoder.step() is None
    decoder.close()


def test_paged_step_writes_the_places_of_new_tokens_only(pair: Pair) -> None:
    program = pair.paged.executors["step"].program
    names = [program.buffers[i].name for i in program.inputs[5:]]
    assert [*program.outputs[1:]] == [*program.inputs[5:]]  # in place
    rng = np.random.default_rng(0)
    dims = [9, 16, *pool_dims(pair.paged)]
    pools = {name: rng.standard_normal(dims).astype(np.float32) for name in names}
    start = {name: pool.copy() for name, pool in pools.items()}
    tables, requests, positions = np.array([[4, 2], [7, 0]]), np.array([0, 1, 1]), np.array([17, 3, 4])
    given = [np.array([1, 2, 3]), requests, positions, np.array([0, 2]), tables]
    logits, *after = pair.paged.run([*given, *pools.values()], "step")
    with pair.paged.session(pools, "step", {name: 1 + at for at, name in enumerate(names)}) as session:
        np.testing.assert_array_equal(session.run(given)[0], logits)
        kept = session.arrays()
    for name, pool in zip(names, after, strict=True):
        np.testing.assert_array_equal(pools[name], start[name])  # the caller's array
        np.testing.assert_array_equal(kept[name], pool)
        changed = {(int(b), int(at)) for b, at in np.argwhere((pool != start[name]).any((2, 3)))}
        assert changed == {(2, 1), (7, 3), (7, 4)}


def pool_dims(model: Model) -> list[int]:
    spec = tiny_decoders.parts("llama")[0]
    size = spec["hidden_size"] // spec["num_attention_heads"]
    return [spec["num_key_value_heads"], spec.get("head_dim") or size]


def test_paged_wrong_calls_are_refused(pair: Pair) -> None:
    with pytest.raises(UserError, match="num_beams"):
        generate(pair.paged, [[1, 2]], 3, num_beams=2)
    with pytest.raises(UserError, match="expected 1 to 64 tokens, got 65"):
        generate(pair.paged, [[1] * 65], 3)
    with pytest.raises(UserError, match="step"):
        PagedDecoder(pair.contiguous)
    with pytest.warns(rt.RelaxTuneWarning, match="ends after 5 of 9"):
        (row,) = generate(pair.paged, [[1] * 60], 9)
    assert len(row) == 65
    with pytest.raises(UserError, match="tables"):
        pools = [
            np.zeros([9, 16, *pool_dims(pair.paged)], np.float32)
            for _ in pair.paged.executors["step"].program.inputs[5:]
        ]
        pair.paged.run([np.array([1]), np.array([0]), np.array([0]), np.array([0]), np.array([[9]]), *pools], "step")


def test_paged_text_without_a_next_token_leaves_the_others(pair: Pair) -> None:
    def refuse(_: Any, scores: Any) -> Any:
        return np.full_like(scores, np.nan)

    decoder, config = PagedDecoder(pair.paged), GenerationConfig(max_new_tokens=4)
    good, bad = (decoder.text([1, 2, 3], config, StopRules(config), custom) for custom in (None, refuse))
    decoder.add(bad)
    decoder.add(good)
    while decoder.step() is not None:
        pass
    assert bad.error is not None and bad.ended and good.error is None
    assert good.tokens == generate(pair.contiguous, [[1, 2, 3]], 4)[0].tolist()
    decoder.close()


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_paged_row_without_finite_logits_leaves_the_others(pair: Pair, wrong: float) -> None:
    decoder, config = PagedDecoder(pair.paged), GenerationConfig(max_new_tokens=4)
    good, bad = (decoder.text([1, 2, 3], config, StopRules(config)) for _ in range(2))
    decoder.add(bad)
    decoder.add(good)
    decoder._extend([(bad, 0), (good, 1)], np.array([[wrong] * 3, [0, 2, 2]], np.float32))
    assert bad.error is not None and bad.tokens == [1, 2, 3]
    assert good.error is None and good.tokens == [1, 2, 3, 1]
    decoder.close()


def test_paged_step_with_halves_agrees_with_the_interpreter(tmp_path: Path) -> None:
    folder, _ = tiny_decoders.write(tmp_path, "mistral")
    module = rt.load_model(folder, kv_cache="paged", cache_dtype="f16", bounds={"t": (1, 8), "r": (1, 3), "w": (1, 2)})
    step = module.functions["step"]
    assert isinstance(step, Function)
    rng, pools = np.random.default_rng(4), []
    for param in step.params[5:]:
        assert isinstance(param.info, TensorInfo) and param.info.shape is not None and param.info.dtype is f16
        dims = [as_int(d) or 6 for d in param.info.shape]
        pools.append(rng.standard_normal(dims).astype(np.float16))
    ids, requests, positions = rng.integers(0, VOCABULARY, 5), np.array([0, 0, 1, 2, 2]), np.array([16, 17, 0, 3, 4])
    arrays = [ids, requests, positions, np.array([1, 2, 4]), np.array([[5, 1], [2, 0], [4, 0]]), *pools]
    artifact = rt.build(module, target="c", db="memory://", policy="generic", libraries=False)
    with artifact.open() as model:
        found = model.run(arrays, "step")
    for got, expected in zip(found, evaluate_function(module, arrays, "step"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3)
