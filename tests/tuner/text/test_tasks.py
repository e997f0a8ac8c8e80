"""Tasks on texts, compared with what transformers' pipelines return for the same folders (tests/data/text_tasks.json)."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.effort import GENERIC
from tests.support.text_folders import DATA, TEXTS, write_decoder, write_head

import relax_tune as rt
from relax_tune.errors import UserError
from relax_tune.tuner.text import tokens

pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra text)")
pytestmark = [pytest.mark.ccompiler, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
MAKER = runpy.run_path(str(DATA / "make_text_tasks.py"))
MASKED, PROMPTS = list(MAKER["MASKED"]), list(MAKER["PROMPTS"])
EXPECTED: dict[str, Any] = json.loads((DATA / "text_tasks.json").read_text())
OPTIONS: dict[str, Any] = {"target": "c", "db": "memory://", "self_test": False, **GENERIC}
ENCODER = {"b": (1, 2), "n": (1, 16)}


def opened(task: str, folder: Path, **more: Any) -> Any:
    return rt.pipeline(task, folder, **{**OPTIONS, "bounds": ENCODER, **more})


def compare(result: Any, expected: Any) -> None:
    """Compare results whose scores differ by rounding."""
    assert type(result) is type(expected)
    if isinstance(expected, list):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            compare(one, other)
    elif isinstance(expected, dict):
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            compare(result[key], value)
    elif isinstance(expected, float):
        assert result == pytest.approx(expected, abs=2e-5)
    else:
        assert result == expected


def test_text_classification_equals_transformers(tmp_path: Path) -> None:
    with opened("text-classification", write_head(tmp_path, "SequenceClassification")) as classify:
        compare(classify(list(TEXTS)), EXPECTED["classes"])
        compare(classify(TEXTS[0]), EXPECTED["one class"])
        compare(classify(list(TEXTS), top_k=None), EXPECTED["all classes"])
        compare(classify(list(TEXTS), top_k=None, function_to_apply="softmax"), EXPECTED["all classes"])
        assert classify([]) == []
        with pytest.raises(UserError, match="function_to_apply: expected one of softmax"):
            classify("rain", function_to_apply="tanh")
        with pytest.raises(UserError, match="expected options among top_k"):
            classify("rain", topk=2)
        with pytest.raises(UserError, match="expected a string or strings, got a NoneType"):
            classify([None])
        with pytest.raises(UserError, match="at most 16 tokens"):
            classify("rain " * 20)


def test_text_classification_of_several_labels_equals_transformers(tmp_path: Path) -> None:
    folder = write_head(tmp_path, "SequenceClassification", problem_type="multi_label_classification")
    with opened("sentiment-analysis", folder) as classify:
        compare(classify(list(TEXTS), top_k=2), EXPECTED["several"])


def test_token_classification_reads_each_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, calls = tokens.read_tokens, list[int]()
    monkeypatch.setattr(tokens, "read_tokens", lambda *given: calls.append(len(given[1])) or read(*given))
    with opened("ner", write_head(tmp_path, "TokenClassification")) as find:
        find(list(TEXTS))
    assert calls == [len(TEXTS)]


def test_token_classification_equals_transformers(tmp_path: Path) -> None:
    with opened("ner", write_head(tmp_path, "TokenClassification")) as entities:
        compare(entities(list(TEXTS)), EXPECTED["tokens"])
        assert entities(TEXTS[0], ignore_labels=("O", "B-PER", "I-PER", "B-LOC", "I-LOC")) == []


def test_fill_mask_equals_transformers(tmp_path: Path) -> None:
    with opened("fill-mask", write_head(tmp_path, "MaskedLM")) as fill:
        compare(fill(MASKED, top_k=3), EXPECTED["masked"])
        with pytest.raises(UserError, match=r"expected the mask \[MASK\], got none"):
            fill("rain falls")


def test_text_generation_equals_transformers(tmp_path: Path) -> None:
    folder = write_decoder(tmp_path)
    with opened("text-generation", folder, bounds={"b": (1, 2), "n": (1, 16)}) as generate:
        compare(generate(PROMPTS, max_new_tokens=6), EXPECTED["generated"])
        compare(generate(PROMPTS[0], max_new_tokens=6, return_full_text=False), EXPECTED["added"])


@pytest.mark.parametrize(
    ("task", "head", "message"),
    [
        ("translation", "MaskedLM", "task: expected one of"),
        ("text-classification", "MaskedLM", "expected a model with logits of each text"),
        ("text-generation", "MaskedLM", "expected a decoder, got a model"),
    ],
)
def test_pipeline_of_another_task_is_refused(task: str, head: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        opened(task, write_head(tmp_path, head))
