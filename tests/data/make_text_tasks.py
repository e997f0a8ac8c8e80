"""Makes text_tasks.json: what the pipelines of transformers return for the folders of tests/support/text_folders.py.

Needs torch and transformers:

    PYTHONPATH=. python tests/data/make_text_tasks.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.text_folders import TEXTS, write_decoder, write_head

MASKED = ("The cat [MASK] on the mat", "a dog ran [MASK] [MASK]")
PROMPTS = ("w1 w2 w3", "w7")
OUT = Path(__file__).with_name("text_tasks.json")


def main() -> None:
    """Write the file."""
    from transformers import pipeline

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        classes = str(write_head(root / "classes", "SequenceClassification"))
        several = str(write_head(root / "several", "SequenceClassification", problem_type="multi_label_classification"))
        tokens, masked = (str(write_head(root / head, head)) for head in ("TokenClassification", "MaskedLM"))
        decoder = str(write_decoder(root / "decoder"))
        texts = list(TEXTS)
        classify = pipeline("text-classification", classes)
        results["classes"] = classify(texts)
        results["one class"] = classify(texts[0])
        results["all classes"] = classify(texts, top_k=None)
        results["several"] = pipeline("text-classification", several)(texts, top_k=2)
        results["tokens"] = pipeline("token-classification", tokens)(texts)
        results["masked"] = pipeline("fill-mask", masked)(list(MASKED), top_k=3)
        generate = pipeline("text-generation", decoder)
        results["generated"] = generate(list(PROMPTS), max_new_tokens=6, do_sample=False)
        results["added"] = generate(PROMPTS[0], max_new_tokens=6, do_sample=False, return_full_text=False)
    OUT.write_text(json.dumps(results, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
