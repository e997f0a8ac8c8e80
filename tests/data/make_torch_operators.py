"""Exports a small torch program per operator and records all of them, with what torch says of a few inputs.

    PYTHONPATH=src python tests/data/make_torch_operators.py tests/data [NAME ...]       (torch)

With names, these programs are recorded and the others kept.

torch_operators.json holds a list of [name, program]; torch_operators.npz the inputs (NAME/in_k_p), results (NAME/out_k_p) and
weights (NAME/w_...) of every program. Inputs have dynamic first dims called n, which are 5 and 1 in the cases.
"""

# ruff: noqa: E501  (a table)
from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (5, 1)
Array = np.ndarray[Any, Any]
# Floats, integers in 0..3, truth values, floats in 0.1..2, floats beside NaN, infinities and -0, integers of both signs.
F, N, B, POSITIVE, EDGE, SIGNED = "f", "i", "b", "p", "e", "s"
EDGES = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 2.5, -2.5, 0.5], np.float32)
# One program: its name, the kinds of inputs with the dims behind n, and what it computes.
Case = tuple[str, Sequence[tuple[str, tuple[int, ...]]], Callable[..., Any]]


def cases() -> list[Case]:
    import torch
    from torch.nn import functional as fn

    def filters(*shape: int) -> Any:
        return torch.arange(float(np.prod(shape))).sin().reshape(shape)

    x, xy, xi = [(F, (4,))], [(F, (4,)), (F, (4,))], [(F, (4,)), (N, (4,))]
    found: list[Case] = [
        ("add_alpha", xy, lambda a, b: torch.add(a, b, alpha=2.5)),
        ("sub_alpha", xy, lambda a, b: torch.sub(a, b, alpha=3)),
        ("add_mixed", xi, lambda a, i: a + i + 2),
        ("sub_scalars", x, lambda a: 3.0 - (a - 1.5)),
        ("integers", [(N, (4,))], lambda i: (i * 3 + 1) - 2 * i),
        ("div", xi, lambda a, i: a / (i + 1) + a / 4),
        ("div_modes", [(POSITIVE, (4,)), (N, (4,))], lambda a, i: (torch.div(a, 0.3, rounding_mode="floor"), (i + 7) // (i + 1), torch.div(i - 2, 3, rounding_mode="floor"), torch.div(5 - 3 * i, -2, rounding_mode="floor"), torch.div(i - 3, 2, rounding_mode="trunc"))),
        ("pow", [(POSITIVE, (4,)), (F, (4,))], lambda a, b: (a**2, a**3, a**0.5, a**-0.5, a**1.7, a**b, 2.0**b)),
        ("floats", x, lambda a: (a.exp(), a.tanh(), a.sigmoid(), a.relu(), a.erf(), a.abs(), a.floor(), a.ceil(), a.round())),
        ("roots", [(POSITIVE, (4,))], lambda a: (a.log1p(), a.expm1(), a.sqrt(), a.rsqrt(), a.log(), a.reciprocal(), 1 / a)),
        ("angles", [(POSITIVE, (4,))], lambda a: (a.sin(), a.cos(), a.tan(), (a / 4).asin(), (a / 4).acos(), a.atan())),
        ("hyperbolic", [(POSITIVE, (4,))], lambda a: (a.sinh(), a.cosh(), a.asinh(), (a + 1).acosh(), (a / 4).atanh())),
        ("activations", x, lambda a: (fn.silu(a), fn.gelu(a), fn.gelu(a, approximate="tanh"), fn.leaky_relu(a, 0.2), -a)),
        ("more_activations", x, lambda a: (fn.elu(a), fn.softplus(a), fn.hardtanh(a), fn.hardswish(a), fn.mish(a), fn.relu6(a))),
        ("clamp", xy, lambda a, b: (a.clamp(-0.5, 0.5), a.clamp(min=0.1), a.clamp(max=0.2), torch.clamp(a, min=b, max=b + 1))),
        ("extremes", xy, lambda a, b: (torch.maximum(a, b), torch.minimum(a, b))),
        ("compare", xi, lambda a, i: (a == i, a != i, a < i, a <= i, a > i, a >= i, a > 0, i >= 0, i == 2, i > 1.5, a <= 1)),
        ("logic", [(B, (4,)), (B, (4,))], lambda p, q: (p & q, p | q, p ^ q, ~p, torch.logical_and(p, q), p.logical_not())),
        ("bits", [(N, (4,)), (N, (4,))], lambda i, j: (i & j, i | j, i ^ j, ~i, i << j, i >> 1, (i - 3) >> j, i & 6, i ^ 5, i | 8, torch.bitwise_left_shift(i, j), torch.bitwise_right_shift(i, 64), i**j, (i - 2) ** 5, 3**i)),
        ("small_integers", [(N, (4,))], lambda i: (i.to(torch.uint8) + i.to(torch.int8), -i.to(torch.uint8), i.to(torch.int16) * 20000, i.to(torch.uint8) << 7, (i - 1).to(torch.uint16), torch.sign(i - 2))),
        ("remainders", [(F, (4,)), (POSITIVE, (4,)), (N, (4,))], lambda a, b, i: (torch.fmod(a, b), torch.remainder(a, b), a % -0.3, torch.fmod(a, 0.3), torch.fmod(i - 2, 3), (i - 2) % -3, torch.remainder(5, i + 1), (i - 2) % (i - 4))),
        ("more_floats", [(F, (4,)), (POSITIVE, (4,))], lambda a, b: (a.sign(), (a * 3).trunc(), b.log2(), b.log10(), torch.atan2(a, b), torch.isnan(a.log()), torch.isinf(a / 0))),
        ("where", xi, lambda a, i: (torch.where(i > 1, a, 0.0), torch.where(a > 0, i, 7), a.masked_fill(i > 1, -1.0))),
        ("casts", xi, lambda a, i: (a.to(torch.int64), i.float(), i.bool(), (a > 0).float(), i.to(torch.int32), a.double())),
        ("views", [(F, (4, 6))], lambda a: (a.view(-1, 24), a.reshape(a.shape[0], 2, 12), a.flatten(), a.unsqueeze(1), a.transpose(0, 2), a.permute(1, 0, 2), a.mT)),
        ("squeeze", [(F, (1, 4, 1))], lambda a: (a.squeeze(1), a.squeeze(-1), a.squeeze((1, 3)))),
        ("expand", [(F, (1, 4))], lambda a: (a.expand(-1, 3, 4), a.expand(2, *a.shape), a.repeat(1, 2, 3), a.repeat(2, 1, 1, 1))),
        ("slice", [(F, (6,))], lambda a: (a[:, 1:4], a[:, -2:], a[:, ::2], a[:, 1:5:3], a[:, -2], a[0], a[-1])),
        ("flip", [(F, (6,))], lambda a: (a.flip(1), a.flip((0, 1)), a[:, 1::2], a[:, :-1:3])),
        ("einsum", [(F, (2, 4)), (F, (2, 4))], lambda a, b: (torch.einsum("bhd,bkd->bhk", a, b), torch.einsum("bhd,bhd->b", a, b), torch.einsum("...d->d...", a))),
        ("conv", [(F, (4, 9, 8))], lambda a: (fn.conv2d(a, filters(6, 2, 3, 2), filters(6), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2), fn.conv1d(a[:, :, 0], filters(3, 4, 3), padding=1))),
        ("resize", [(F, (2, 4, 5))], lambda a: (fn.interpolate(a, scale_factor=2), fn.interpolate(a, size=(7, 3)), fn.interpolate(a, size=(5, 9), mode="nearest-exact"), fn.interpolate(a, size=(7, 3), mode="bilinear"), fn.interpolate(a, size=(7, 1), mode="bilinear", align_corners=True), fn.interpolate(a, size=(6, 2), mode="bicubic"), fn.interpolate(a, size=(2, 3), mode="bilinear", antialias=True), fn.interpolate(a, size=(3, 9), mode="bicubic", antialias=True))),
        ("grid_sample", [(F, (2, 4, 5)), (F, (3, 2, 2))], lambda a, g: (fn.grid_sample(a, g, align_corners=False), fn.grid_sample(a, g, align_corners=True, mode="bicubic", padding_mode="border"), fn.grid_sample(a, g, align_corners=False, mode="bicubic", padding_mode="reflection"))),
        ("fold", [(F, (12, 6))], lambda a: (fn.fold(a, (3, 4), (2, 2)), fn.fold(a[:, :8, :4], (4, 3), (2, 2), stride=(2, 1)))),
        ("conv_transposed", [(F, (4, 3, 5))], lambda a: (fn.conv_transpose2d(a, filters(4, 3, 3, 2), filters(6), stride=(2, 1), padding=(1, 0), output_padding=(1, 0), groups=2, dilation=(1, 2)), fn.conv_transpose1d(a[:, :, 0], filters(4, 2, 3), stride=2))),
        ("pool_partial", [(F, (4, 9, 8))], lambda a: (*fn.max_pool2d(a, 3, 2, 1, ceil_mode=True, return_indices=True), fn.avg_pool2d(a, 3, 2, 1, ceil_mode=True, count_include_pad=False), fn.avg_pool2d(a, 2, divisor_override=3), fn.avg_pool3d(a, (2, 3, 2), 2), fn.max_pool3d(a, 2))),
        ("pool", [(F, (4, 9, 8))], lambda a: (fn.max_pool2d(a, 3, stride=2, padding=1), fn.max_pool2d(a, (2, 3)), fn.avg_pool2d(a, 2, padding=1), fn.avg_pool2d(a, (3, 2), stride=1))),
        ("batch_norm", [(F, (4, 3, 2))], lambda a: fn.batch_norm(a, filters(4), filters(4).abs() + 0.5, filters(4), filters(4), False)),
        ("join", xy, lambda a, b: (torch.cat([a, b]), torch.cat([a, b, a], 1), torch.stack([a, b], 1), torch.cat([a, torch.ones(2, 4)]))),
        ("cat_empty", x, lambda a: torch.cat([torch.zeros(0), a])),
        ("cat_types", xi, lambda a, i: torch.cat([a, i])),
        ("parts", [(F, (6,))], lambda a: (*a.split(4, 1), *a.chunk(3, 1), *a.split([1, 5], -1))),
        ("make", x, lambda a: (torch.arange(a.shape[0]), torch.arange(1, a.shape[0] + 3), torch.arange(0, 9, 2), torch.full((a.shape[0], 2), 1.5), torch.zeros_like(a), torch.ones(a.shape[0]))),
        ("triangles", [(F, (4, 4))], lambda a: (a.tril(), a.triu(1), a.tril(-1), torch.ones(a.shape[0], a.shape[0]).tril())),
        ("pad", [(F, (4, 4))], lambda a: (fn.pad(a, (1, 2)), fn.pad(a, (0, 1, 2, 0), value=3.0), fn.pad(a, (-1, 1)))),
        ("lookups", [(F, (4,)), (N, (2,))], lambda a, i: (fn.embedding(i, torch.arange(12.0).view(4, 3)), a[:, [3, 0, 1]], torch.gather(a, 1, i), a.index_select(1, torch.tensor([2, 2])), a[torch.zeros_like(i)])),
        ("index", [(F, (4,)), (N, (4,))], lambda a, i: (a[torch.arange(a.shape[0])[:, None], i], a[-1 - torch.zeros_like(i)], a[:, -1 - i])),
        ("products", [(F, (4,)), (F, (4,))], lambda a, b: (a @ b.T, a.T @ b, torch.mm(a, b.T), a[0] @ b[0], a @ b[0], torch.addmm(b[:, :1], a, torch.ones(4, 3), beta=0.5, alpha=2.0))),
        ("batched", [(F, (3, 4)), (F, (4, 2))], lambda a, b: (a @ b, torch.bmm(a, b), torch.einsum("bij,bjk->bki", a, b), torch.baddbmm(a[:, :, :2], a, b))),
        ("linear", x, lambda a: (fn.linear(a, torch.arange(12.0).view(3, 4)), fn.linear(a, torch.ones(3, 4), torch.arange(3.0)))),
        ("softmax", [(F, (4, 3))], lambda a: (a.softmax(-1), a.softmax(1), a.log_softmax(-1), a.log_softmax(1))),
        ("norms", [(F, (4, 3))], lambda a: (fn.layer_norm(a, (3,)), fn.layer_norm(a, (4, 3), torch.ones(4, 3) * 2, torch.ones(4, 3)), fn.rms_norm(a, (3,)), fn.rms_norm(a, (3,), torch.arange(3.0), 1e-3), fn.normalize(a, dim=-1))),
        ("reductions", [(F, (4, 3))], lambda a: (a.sum(), a.sum(1), a.sum((0, 2), keepdim=True), a.mean(-1), a.mean(), a.amax(1), a.amin((0, 1)), a.prod(1))),
        ("extreme_places", [(F, (4, 3))], lambda a: (*a.max(1), *a.min(-1, keepdim=True), a.argmax(-1), a.argmin(1), a.argmax())),
        ("truths", [(B, (4,))], lambda p: (p.any(), p.any(1), p.all(), p.all(-1, keepdim=True), p.sum(), p.sum(1))),
        ("integer_sums", [(N, (4,))], lambda i: (i.sum(), i.sum(1), i.cumsum(1), i.amax(1), i.float().mean(1))),
        ("spread", [(F, (4, 3))], lambda a: (a.var(-1), a.var((1, 2), correction=0), a.std(1), a.norm(dim=-1), a.cumsum(0), a.cumsum(-1))),
        ("top", [(F, (6,))], lambda a: (*a.topk(3), *a.topk(2, largest=False))),
        ("sizes", x, lambda a: a.reshape(a.shape[0] * 2, 2) * (a.shape[0] + 1) + a.shape[0] % 3),
        ("attention", [(F, (2, 3, 4)), (F, (2, 5, 4)), (F, (2, 5, 4))], lambda q, k, v: fn.scaled_dot_product_attention(q, k, v)),
        ("attention_causal", [(F, (2, 5, 4))] * 3, lambda q, k, v: fn.scaled_dot_product_attention(q, k, v, is_causal=True)),
        ("attention_hidden", [(F, (2, 3, 4)), (F, (2, 5, 4)), (B, (1, 3, 5))], lambda q, k, m: fn.scaled_dot_product_attention(q, k, k, attn_mask=m, scale=0.3)),
        ("attention_float_mask", [(F, (2, 3, 4)), (F, (2, 5, 4)), (B, (1, 3, 5))], lambda q, k, m: fn.scaled_dot_product_attention(q, k, k, attn_mask=torch.where(m, 0.5, float("-inf")))),
        ("attention_grouped", [(F, (4, 3, 4)), (F, (2, 5, 4)), (F, (2, 5, 4))], lambda q, k, v: fn.scaled_dot_product_attention(q, k, v, enable_gqa=True)),
        ("floor_edges", [(EDGE, (4,)), (EDGE, (4,))], lambda a, b: (torch.div(a, b, rounding_mode="floor"), torch.div(a, b, rounding_mode="trunc"), a // 0.7)),
        ("zeros", [(EDGE, (4,)), (B, (4,)), (B, (4,))], lambda a, p, q: (1 / (a + 0.0), 1 / (a - 0.0), torch.add(p, q, alpha=False), torch.add(p, q), torch.maximum(p, q), torch.minimum(p, q), a.flip(()))),
        ("number_kinds", [(EDGE, (4,)), (SIGNED, (4,))], lambda a, i: (a.isnan(), a.isinf(), i.isnan(), i.isinf(), a.trunc(), i.trunc(), i.abs(), torch.copysign(i.float(), 0.5 - i), a.square())),
        ("logarithms", [(POSITIVE, (4,))], lambda a: (a.log2(), a.log10(), a.exp2(), torch.copysign(a, torch.tensor(-0.0)))),
        ("sorts", [(EDGE, (6,)), (SIGNED, (6,)), (B, (6,))], lambda a, i, p: (*a.sort(dim=1, stable=True), *a.sort(dim=1, descending=True, stable=True), *i.sort(dim=0, descending=True, stable=True), *p.sort(dim=1, stable=True))),
        ("truth_extremes", [(B, (4,))], lambda p: (p.amax(1), p.amin(0), *p.max(1), *p.min(0, keepdim=True))),
        ("without_dims", x, lambda a: (*a[0, 0].sort(), *a[0, 0].topk(1), *a[0, 0].max(0), a[0, 0].argmax(0), a[0, 0].cumsum(0), a[0, 0].cumprod(0), a[0, 0].unfold(0, 1, 1))),
        ("scatters", [(F, (4,)), (N, (3,)), (F, (3,)), (B, (4,))], lambda a, i, u, p: (a.scatter_add(1, i, u), a.scatter_reduce(1, i, u, "amax"), a.scatter_reduce(1, i, u, "prod"), a[:, :2].T.scatter_add(0, i[:1, :2].T.clamp(0, 1), u[:1, :2].T), p.scatter(1, i[:, :1], False))),
        ("puts", [(F, (4,)), (N, (1,)), (F, (4,))], lambda a, i, u: (a.index_put((i[:, 0] * 0,), u, accumulate=True), a.index_put((i[:1, 0] * 0, i[:1, 0]), torch.ones(())), torch.slice_scatter(a, u[:, 1:3], 1, 1, 3), torch.slice_scatter(a, u, 1), torch.select_scatter(a, u[:, 0], 1, -2))),
        ("diagonals", [(F, (4, 3))], lambda a: (a.diagonal(0, 1, 2), a.diagonal(1, 2, 1), a.diagonal(-2, 1, 2), a.unfold(1, 2, 2), a.unfold(-1, 3, 1), a.cumprod(1))),
        ("norm_orders", [(F, (4, 3))], lambda a: tuple(torch.linalg.vector_norm(a, k, d) for k, d in ((1, 1), (0, -1), (3, None), (float("inf"), (1, 2)), (-float("inf"), 0)))),
        ("variances", [(F, (4,))], lambda a: (a.var(0), a.var(0, correction=0), *torch.var_mean(a, 1), a.var(), torch.var(a, 1, correction=4))),
        ("halves", [(F, (4,))], lambda a: (fn.rms_norm((a * 300).half(), (4,)).float().round(), (a * 9).half().var(1).float().round())),
        ("pool_edges", [(EDGE, (2, 6, 4))], lambda a: (*fn.max_pool2d(a, 3, 2, 1, return_indices=True), *fn.max_pool1d(a[:, 0], 2, 1, return_indices=True))),
        ("gamma", [(F, (4,)), (POSITIVE, (4,)), (N, (4,))], lambda a, b, i: (b.lgamma(), (a * 3).lgamma(), b.digamma(), (a * 3).digamma(), torch.polygamma(1, b), torch.polygamma(3, a), torch.polygamma(2, b), i.lgamma(), (i + 1).digamma())),
        ("error_functions", [(F, (4,)), (EDGE, (4,))], lambda a, e: ((a * 4).erfc(), e.erfc(), torch.special.erfcx(a), torch.erfinv(a.tanh()), torch.special.ndtri(a.sigmoid()), torch.special.log_ndtr(a * 3))),
        ("bessel", [(F, (4,)), (EDGE, (4,))], lambda a, e: (torch.i0(a * 9), torch.special.i0e(e), torch.special.i1(a * 9), torch.special.i1e(a * 30), torch.i0(e))),
        ("running_extremes", [(EDGE, (6,)), (SIGNED, (6,)), (B, (6,))], lambda a, i, p: (*a.cummax(1), *a.cummin(0), *i.cummax(0), *i.cummin(1), *p.cummax(1))),
        ("running_log_sums", [(F, (6,)), (EDGE, (6,))], lambda a, e: (a.logcumsumexp(1), (a * 99).logcumsumexp(0), e.logcumsumexp(1), torch.special.spherical_bessel_j0(a * 9))),
        ("adaptive_max", [(F, (4, 9, 8))], lambda a: (*fn.adaptive_max_pool2d(a, (3, 5), return_indices=True), fn.adaptive_max_pool1d(a[:, 0], 3), *fn.adaptive_max_pool3d(a[:, None], (2, 4, 3), return_indices=True))),
        ("strides", [(F, (4, 6))], lambda a: (torch.as_strided(a, (2, 3), (1, 2)), torch.as_strided_copy(a, (3, 4), (1, 4), 2), torch.as_strided_copy(a, (a.shape[0], 6), (24, 4)))),
        ("determinants", [(F, (3, 3))], lambda a: (torch.linalg.det(a), *torch.linalg.slogdet(a), torch.linalg.det(a[:, :1, :1]))),
        ("order", [(EDGE, (5,)), (SIGNED, (6,))], lambda a, i: (a.kthvalue(2, 1)[0], i.kthvalue(3)[0], *a.median(1), i.median(1, True)[0], i.median(0)[0], a.nanmedian(1)[0], a.nanmedian(0, True)[0], a.median(), i.median(), a.nanmedian())),
        ("searches", [(F, (4,)), (F, (3,)), (EDGE, (2,))], lambda a, b, e: (torch.searchsorted(a.sort(1)[0], b), torch.searchsorted(a.sort(1)[0], a, right=True), torch.searchsorted(torch.tensor([-1.0, 0.0, 0.0, 2.5]), e, side="right", out_int32=True), torch.bucketize(e, torch.tensor([-2.5, 0.0, 0.0])), torch.searchsorted(a, b, sorter=a.argsort(1)))),
        ("masked", [(F, (4,)), (B, (4,)), (F, (4,)), (F, (3, 4))], lambda a, p, b, c: (a.masked_scatter(p, b), a.index_put((p,), torch.tensor(2.0)), a.index_put((p,), torch.tensor([2.0]), accumulate=True), c.index_put((p[:, :3],), torch.tensor(7.0)), torch.diagonal_scatter(c, c[:, 0, :3] * 2, 0, 1, 2), torch.diagonal_scatter(c, c[:, 0, :1], -2, 1, 2))),
        ("inner_indices", [(F, (3, 4)), (N, (2,))], lambda a, i: (a[:, i.clamp(max=2)[0], i[0]], a[torch.arange(a.shape[0]), :, i[:, 0]], a[:, :, i][:, :, 0], a.index_copy(1, i[0].clamp(0, 2), a[:, :2]), a.index_fill(2, i[0], 4.0), a.index_add(1, i[0].clamp(0, 2), a[:, 1:], alpha=2), a[0, 0, 0].index_select(0, i[0, :1] * 0))),
        ("sums_of_products", [(F, (4,)), (F, (4,))], lambda a, b: (torch.addmv(b[:, 0], a, b[0]), torch.addmv(b[:, 0] / 0, a, b[0], beta=0, alpha=2), torch.addmm(b[:, :1] / 0, a, torch.ones(4, 3), beta=0), torch.addbmm(b[:, :, None][0], a[:, :, None], b[:, None, :3], beta=2), fn.linear(a[0], filters(3, 4), filters(3)), fn.linear(a, filters(4)), fn.linear(a[0], filters(4)), fn.bilinear(a, b, filters(2, 4, 4), filters(2)))),
        ("attention_symbolic_width", [(F, (2, 3, 4)), (F, (2, 5, 4))], lambda q, k: fn.scaled_dot_product_attention(q.transpose(0, 3), k.transpose(0, 3), k.transpose(0, 3))),
        ("next_numbers", [(EDGE, (6,)), (EDGE, (6,)), (F, (6,))], lambda a, b, c: (torch.nextafter(a, b), torch.nextafter(c, b), torch.nextafter(b, c), torch.signbit(a), (c * 100).round(decimals=1), (c * 1000).round(decimals=-2), torch.ldexp(c, (c * 3).int()), torch.dist(c, c * 2, 3), torch.dist(c, c.flip(1)))),
        ("reduced_scatters", [(F, (4,)), (N, (3,)), (F, (3,)), (SIGNED, (4,)), (SIGNED, (3,))], lambda a, i, u, s, v: (a.scatter_reduce(1, i, u, "mean"), *(a.scatter_reduce(1, i, u, how, include_self=False) for how in ("sum", "prod", "mean", "amax", "amin")), s.scatter_reduce(1, i, v, "amax", include_self=False), a.index_reduce(1, i[0], u, "mean"), a.index_reduce(1, i[0], u, "prod", include_self=False), s.index_reduce(1, i[0], v, "amin"), a.put(i[:, :1] - 4, u[:, :1], accumulate=True), a.put(i[:1, 0], u[:1, 0]), a.index_put((s[:, 0] > 0,), u[0, 0]), a.index_put((s[:, 0] > 0,), a[0]))),
        ("planes", [(EDGE, (4,)), (EDGE, (4,)), (F, (4,)), (F, (4,))], lambda a, b, c, d: (torch.hypot(a, b), torch.hypot(c * 1e30, d * 1e30), torch.hypot(c * 1e-30, d * 1e-30), a.angle(), *torch.unbind_copy(c, 1))),
        ("whole_extremes", [(EDGE, (4,)), (EDGE, (4,)), (SIGNED, (4,))], lambda a, b, i: (torch.fmax(a, b), torch.fmin(a, b), torch.fmax(i, 2 - i), i.max(), a.min(), i.floor(), i.ceil(), i.round())),
        ("bags", [(N, (3,)), (F, (3,))], lambda i, p: (fn.embedding_bag(i, filters(4, 5)), fn.embedding_bag(i, filters(4, 5), mode="sum", per_sample_weights=p), fn.embedding_bag(i.flatten(), filters(4, 5), torch.tensor([0, 2, 2])), fn.embedding_bag(i.flatten(), filters(4, 5), torch.cat((torch.arange(i.shape[0]) * 3, torch.tensor([3]) * i.shape[0])), mode="sum", include_last_offset=True))),
        ("histogram", [(EDGE, (4,)), (N, (4,))], lambda a, i: (a.histc(3, -2.5, 2.5), a.histc(7, 0.5, 2.5), i.float().histc(4, 0, 3))),
        ("grouped_product", [(N, (8,))], lambda i: fn.grouped_mm(i.bfloat16(), (torch.arange(192) % 5).reshape(3, 8, 8).bfloat16(), offs=torch.cat((torch.tensor([0, 1]), torch.full((1,), i.shape[0]))).int()).float()),
        ("steps", x, lambda a: (torch.arange(0, 130, a.shape[0]), torch.tril_indices(4, 3, -1), torch.triu_indices(2, 3))),
        ("group_norm", [(F, (4, 3, 2))], lambda a: (fn.group_norm(a, 2), fn.group_norm(a, 2, filters(4), filters(4)), fn.group_norm(a.permute(2, 1, 0, 3), 4, filters(4)), fn.instance_norm(a))),
        ("adaptive", [(F, (7, 5))], lambda a: (fn.adaptive_avg_pool1d(a.permute(1, 2, 0), 3), fn.adaptive_avg_pool2d(a.permute(1, 0, 2)[None], (3, 2)), fn.adaptive_avg_pool3d(a[None, None], (2, 3, 2)))),
        ("strided", [(F, (4, 6))], lambda a: (torch.empty_like(a[:, 0, 0]).index_put((torch.arange(a.shape[0]),), a[:, 1, 1]), torch.as_strided(a, (a.shape[0], 24), (24, 1)), torch.as_strided(a.mT, a.mT.shape, a.mT.stride()), torch.as_strided(a, (2, 2, a.shape[0], 6), (12 * a.shape[0], 6 * a.shape[0], 6, 1)))),
        ("half_numbers", x, lambda a: (lambda h: tuple(y.float() for y in (h * 0.7071, h / 0.7071, h**1.7, 0.3 - h, h.fmod(0.7071), torch.div(h, 0.37, rounding_mode="floor"), fn.leaky_relu(h, 0.7071), torch.lerp(h, h * 3, 0.7071))))(a.half())),
        ("integer_pools", [(SIGNED, (3, 4, 6))], lambda i: (fn.avg_pool2d(i, 2), fn.avg_pool2d(i, 3, 2, 1, count_include_pad=False), fn.avg_pool2d(i, 2, 3, 1, ceil_mode=True), fn.avg_pool2d(i, 2, divisor_override=3))),
        ("quotients", x, lambda a: (a * (a.shape[0] / 3), a + 1 / (a.shape[0] + 1), torch.ones(torch.sym_int(a.shape[0] / 2) + 1), torch.ones(math.ceil(a.shape[0] / 4) + 2))),
        ("branches_and_loops", [(F, (3,)), (F, (3,))], control_flow),
        ("sizes_masks", [(F, (3,)), (B, ())], masks),
        ("sizes_distinct", [(N, (3,)), (F, (3, 2))], distinct),
        ("sizes_read", [(F, (3,)), (N, ())], sizes_read),
    ]  # fmt: skip
    return found


def masks(a: Any, p: Any) -> Any:
    """Masks as indices and of assignments, and dims that their counts decide."""
    import torch

    picked, chosen, doubled = a[a > 0], a[p], a.clone()
    doubled[a > 0] = doubled[a > 0] * 2
    added = a.clone()
    added[p] += a[p]
    rows, columns = torch.where(a > 0)
    places = (a > 0).nonzero()
    merged = a.masked_scatter(a > 0, picked * 3)
    columns_kept = a[:, torch.tensor([True, False, True])]
    first = torch.nonzero_static(a > 0, size=4)
    weights = torch.cat([chosen, a]).softmax(-1) @ torch.ones(3, 2)
    return (
        picked.sum(),
        chosen,
        doubled,
        added,
        a[rows, columns],
        places,
        merged,
        columns_kept,
        first,
        weights,
        a.masked_select(p[:, None]),
    )


def distinct(i: Any, a: Any) -> Any:
    import torch

    every, place, count = torch.unique(i, return_inverse=True, return_counts=True)
    slices, row = torch.unique(i, dim=0, return_inverse=True)
    runs, run, length = torch.unique_consecutive(i.flatten(), return_inverse=True, return_counts=True)
    total = torch.zeros(every.shape[0], 2).index_add(0, place.flatten(), a.reshape(-1, 2))
    return every, place, count, slices, row, runs, run, length, total


def sizes_read(a: Any, i: Any) -> Any:
    """Numbers of tensors as dims, repeats and counts."""
    import torch

    count = (a > 0).sum().item()
    scale = a.sum().item()
    return (
        torch.arange(count) * 2,
        torch.ones(3, count) @ torch.ones(count, 2),
        a * scale,
        torch.repeat_interleave(a, i, dim=0),
        torch.bincount(i),
        torch.bincount(i, minlength=7),
    )


def control_flow(a: Any, b: Any) -> Any:
    """A branch in a loop whose end its values decide; a scan that stacks rows."""
    import torch
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    def body(i: Any, x: Any) -> Any:
        return i + 1, torch.cond(x.sum() > 2, lambda x: x * 0.5 - 1, lambda x: x + b.sum().abs(), (x,))

    count, last = while_loop(lambda i, x: (i < 7) & (x.sum() < 40), body, (torch.tensor(0), a))
    state, rows = scan(lambda h, x: (torch.tanh(h + x), h * x), torch.zeros(3), a)
    return count, last, state, rows


def example(case: Case, n: int) -> list[Array]:
    """Inputs with first dim `n`."""
    random = np.random.default_rng([n, len(case[0])])
    makers: dict[str, Callable[[tuple[int, ...]], Array]] = {
        F: lambda s: random.standard_normal(s).astype(np.float32),
        N: lambda s: random.integers(0, 4, s),
        B: lambda s: random.random(s) < 0.4,
        POSITIVE: lambda s: random.uniform(0.1, 2, s).astype(np.float32),
        EDGE: lambda s: EDGES[random.integers(0, len(EDGES), s)],
        SIGNED: lambda s: random.integers(-9, 10, s),
    }
    return [makers[kind]((n, *dims)) for kind, dims in case[1]]


def main(folder: str, *only: str) -> None:
    import torch

    from relax_tune.ir.frontend.torch.export import plain_program
    from relax_tune.ir.frontend.torch.program import to_json

    warnings.simplefilter("ignore")
    kept: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    if only:
        kept = {k: p for k, p in json.loads(Path(folder, "torch_operators.json").read_text()) if k not in only}
        with np.load(Path(folder, "torch_operators.npz")) as found:
            arrays = {k: found[k] for k in found if k.partition("/")[0] in kept}
    programs = []
    for case in cases():
        name, compute = case[0], case[2]
        if name in kept:
            programs.append([name, kept[name]])
            continue

        class Module(torch.nn.Module):
            def forward(self, *args: Any, compute: Callable[..., Any] = compute) -> Any:
                return compute(*args)

        inputs = tuple(map(torch.from_numpy, example(case, SIZES[0])))
        n = torch.export.Dim("n", min=1, max=64)
        try:
            program = plain_program(
                torch.export.export(Module(), inputs, dynamic_shapes=(tuple({0: n} for _ in inputs),), strict=False)
            )
        except Exception as error:
            print(f"{name}: {str(error)[:600]}")
            continue
        programs.append([name, json.loads(to_json(program))])
        arrays.update({f"{name}/w_{key}": a for key, a in program.weights.items()})
        for k, size in enumerate(SIZES):
            given = example(case, size)
            result = compute(*map(torch.from_numpy, given))
            arrays.update({f"{name}/in_{k}_{p}": a for p, a in enumerate(given)})
            listed = result if isinstance(result, tuple) else (result,)
            arrays.update({f"{name}/out_{k}_{p}": t.numpy() for p, t in enumerate(listed)})
    text = ",\n".join(json.dumps(p) for p in programs)
    Path(folder, "torch_operators.json").write_text(f"[\n{text}\n]\n")
    np.savez_compressed(Path(folder, "torch_operators.npz"), **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
