"""Decoders with paged caches: the logits of torch, texts of one step that know nothing of each other, and models that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.decoder_families import HYBRIDS, KEPT, MODELS, SHAPES, inputs, write_family
from tests.support.effort import thinned

from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.hf.folder import BLOCK, load_hf
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.reference import evaluate_function

REFUSED = {**dict.fromkeys(HYBRIDS, "another state"), "bloom": "biases", "mpt": "biases", "falcon_alibi": "biases"}
REFUSED |= {name: "several hidden states" for name in MODELS if name.startswith("gemma3n")}
BLOCKS = 12


def empty_pools(module: IRModule) -> list[Any]:
    step = module.functions["step"]
    assert isinstance(step, Function)
    pools = []
    for param in step.params[5:]:
        assert isinstance(param.info, TensorInfo) and param.info.shape is not None and param.info.dtype is not None
        dims = [BLOCKS, *(int(d.value) for d in param.info.shape[1:])]  # type: ignore[attr-defined]
        pools.append(np.full(dims, 7, param.info.dtype.numpy))  # no zeros: of other texts
    return pools


def last_positions(module: IRModule, b: int, n: int) -> np.ndarray[Any, Any]:
    """The logits of the last KEPT positions of texts: of all prompts in one step, then of a token of each."""
    tokens, start = inputs(b, n), n - KEPT + 1
    width = -(-n // BLOCK)
    tables = np.random.default_rng(b).permutation(BLOCKS)[: b * width].reshape(b, width)
    pools, parts = empty_pools(module), []
    for first, end in ((0, start), *((at, at + 1) for at in range(start, n))):
        count = end - first
        requests, positions = np.repeat(np.arange(b), count), np.tile(np.arange(first, end), b)
        # the tokens of texts in any order
        order = np.random.default_rng(n).permutation(len(requests))
        last = np.array([np.flatnonzero((requests[order] == i) & (positions[order] == end - 1))[0] for i in range(b)])
        ids = tokens[:, first:end].ravel()[order]
        logits, *pools = evaluate_function(
            module, [ids, requests[order], positions[order], last, tables, *pools], "step"
        )
        parts.append(logits)
    return np.stack(parts, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned([n for n in MODELS if n not in REFUSED and n != "phi3_long"], 6))
def test_paged_family_has_the_logits_of_torch(tmp_path: Path, name: str) -> None:
    folder, expected = write_family(tmp_path, name)
    module = load_hf(folder, kv_cache="paged")
    for b, n in SHAPES:
        wanted = expected[f"logits_{b}_{n}"]
        largest = max(1.0, float(np.abs(wanted).max()) / 10)
        np.testing.assert_allclose(last_positions(module, b, n), wanted, atol=1e-4 * largest, rtol=0)


@pytest.mark.parametrize("name", thinned(REFUSED, 4))
def test_paged_decoder_with_further_states_or_biases_is_refused(tmp_path: Path, name: str) -> None:
    folder, _ = write_family(tmp_path, name)
    with pytest.raises(UserError, match=f"kv_cache.*{REFUSED[name]}"):
        load_hf(folder, kv_cache="paged")


def test_paged_options_and_bounds_are_checked(tmp_path: Path) -> None:
    folder, _ = write_family(tmp_path, "llama_yarn")
    module = load_model(folder, {"r": (1, 3), "w": (1, 2)}, kv_cache="paged", cache_dtype="f16")
    assert {b.var.name: (b.lower, b.upper) for b in module.bounds} == {
        "t": (1, 256),
        "r": (1, 3),
        "w": (1, 2),
        "p": (1, 6),
    }
    assert {pool.dtype for pool in empty_pools(module)} == {np.dtype(np.float16)}
    with pytest.raises(UserError, match="bound of w: expected at most"):
        load_hf(folder, bounds={"w": (1, 1000)}, kv_cache="paged")
    with pytest.raises(UserError, match="got n; correct"):
        load_hf(folder, bounds={"n": (1, 9)}, kv_cache="paged")
    with pytest.raises(UserError, match="every_position"):
        load_hf(folder, kv_cache="paged", every_position=True)
    with pytest.raises(UserError, match="kv_cache: expected one of contiguous, paged"):
        load_hf(folder, kv_cache="blocks")  # type: ignore[arg-type]
