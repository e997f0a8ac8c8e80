"""The comparison of texts that are generated at a time: a run of a tiny decoder, and the table of its times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from experiments.harness.e2e_cases import TINY
from experiments.serving import streams


def test_rates_are_tokens_per_second_of_all_texts() -> None:
    times = {"ours": {1: [0.5, 0.1, 0.5], 4: [1.0], 16: [2.0]}, "llama": {1: [1.0], 4: [1.0], 16: [1.0]}}
    ours, llama, ratio = streams.page(times, {"ours": "21 of 21", "llama": "20 of 21"}, 3)[-3:]
    assert ours == "| ours | 128 | 256 | 512 | 21 of 21 |"
    assert llama == "| llama | 64 | 256 | 1024 | 20 of 21 |"
    assert ratio == "| ours / best peer | 2.00 | 1.00 | 0.50 | |"
    texts = {1: [[1, 2]], 4: [[3], [4]]}
    assert streams.agreement({1: [[1, 2]], 4: [[3], [5]]}, texts) == "2 of 3"


def test_prompts_of_all_calls_share_only_the_beginning() -> None:
    first, second = streams.prompts_of(4, 1, 97), streams.prompts_of(4, 2, 97)
    assert first == streams.prompts_of(4, 1, 97)
    beginning = streams.shared_beginning(97)
    rows = [*first, *second]
    assert all(row[: streams.SHARED] == beginning for row in rows)
    assert len({tuple(row[streams.SHARED : streams.SHARED + 16]) for row in rows}) == 8
    assert {len(row) - streams.SHARED for row in rows} <= set(range(16, 65))


@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.torch
def test_tiny_run_gives_the_texts_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    streams.prepare(tmp_path, tiny=True, tuned_minutes=0, peer_python=None)
    once, numbers = streams.answer_of("ours.untuned", tmp_path)("4")
    once()
    texts = np.reshape(numbers(), (4, streams.ADDED)).tolist()
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "decoder")
    prompts = streams.prompts_of(4, 1, TINY.vocabulary)
    options = {"max_new_tokens": streams.ADDED, "do_sample": False, "eos_token_id": None}
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    assert texts == expected
