"""Decompositions of fused operators of torch that its tables lack.

Tests: `tests/ir/frontend/torch/test_modules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def fused_decompositions(torch: Any) -> Mapping[Any, Callable[..., Any]]:
    """Return the functions by operator. torch calls the operator in place of a layer of torch.nn where no gradient is computed."""
    functional = torch.nn.functional

    def encoder_layer(
        x: Any, width: int, heads: int, in_weight: Any, in_bias: Any, out_weight: Any, out_bias: Any, use_gelu: bool, norm_first: bool,
        eps: float, norm1: Any, norm1_bias: Any, norm2: Any, norm2_bias: Any, up: Any, up_bias: Any, down: Any, down_bias: Any,
        mask: Any = None, mask_type: int | None = None,
    ) -> Any:  # fmt: skip
        """Compute `nn.TransformerEncoderLayer`. The type of the mask is 0 for (n, n), 1 for (b, n), 2 for (b, heads, n, n)."""
        if mask is not None:
            mask = mask[:, None, None, :] if mask_type == 1 else mask
            # a true element of the mask excludes a position, for the function below it admits one
            mask = mask.logical_not() if mask.dtype is torch.bool else mask

        def attend(y: Any) -> Any:
            joined = functional.linear(y, in_weight, in_bias).unflatten(-1, (3, heads, width // heads))
            query, key, value = joined.permute(2, 0, 3, 1, 4).unbind(0)
            result = functional.scaled_dot_product_attention(query, key, value, mask)
            return functional.linear(result.permute(0, 2, 1, 3).flatten(2), out_weight, out_bias)

        def forward(y: Any) -> Any:
            hidden = functional.linear(y, up, up_bias)
            hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
            return functional.linear(hidden, down, down_bias)

        def first(y: Any) -> Any:
            return functional.layer_norm(y, (width,), norm1, norm1_bias, eps)

        def second(y: Any) -> Any:
            return functional.layer_norm(y, (width,), norm2, norm2_bias, eps)

        if norm_first:
            x = x + attend(first(x))
            return x + forward(second(x))
        x = first(x + attend(x))
        return second(x + forward(x))

    return {torch.ops.aten._transformer_encoder_layer_fwd.default: encoder_layer}
