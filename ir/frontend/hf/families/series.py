"""The families of forecasters of time series.

Tests: `tests/ir/frontend/hf/test_series.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.families.family import Family
from relax_tune.ir.frontend.hf.transformer.inputs import Series
from relax_tune.ir.frontend.hf.transformer.spec import Names


def _series(c: ConfigFields) -> Series:
    """Read the patches, the horizon and the positions."""
    patch, context = c.whole("patch_length", 32), c.whole("context_length", 512)
    c.multiple("context_length", context, "patch_length", patch)
    quantiles = c.data.get("quantiles", [0.1] * 9)
    if not isinstance(quantiles, list) or not all(type(q) in (int, float) for q in quantiles):
        raise c.wrong("quantiles", "a list of numbers")
    timescales = None
    if c.truth("use_positional_embedding", False):
        if c.whole("hidden_size") % 2:
            raise c.wrong("hidden_size", "an even number with use_positional_embedding")
        timescales = c.whole("min_timescale", 1), c.whole("max_timescale", 10_000)
    return Series(
        patch, context, c.whole("horizon_length", 128), 1 + len(quantiles), c.whole("freq_size", 3),
        c.number("tolerance", 1e-6, 1e-30, 1, "a number above 0 and below 1"),
        c.number("pad_val", 1123581321.0, -3e38, 3e38, "a number that float32 holds"), timescales,
    )  # fmt: skip


SERIES: Mapping[str, Family] = {
    "timesfm": Family(
        names=Names("decoder.", before_mlp="mlp.layer_norm", gate=None, up="mlp.gate_proj", last_norm=None),
        # not causal, since the bias of series hides later patches
        causal=False, groups=None, rope=None, activation=("", "relu"), qkv_bias=True, out_bias=True, mlp_bias=True,
        scale=1.0, embedding=_series,
        defaults={
            "hidden_size": 1280, "num_hidden_layers": 50, "num_attention_heads": 16, "head_dim": 80, "intermediate_size": 1280,
        },
    ),
}  # fmt: skip
