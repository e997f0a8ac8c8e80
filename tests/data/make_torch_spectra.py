"""Exports small torch programs of complex numbers and Fourier transforms and records all of them.

    PYTHONPATH=src python tests/data/make_torch_spectra.py tests/data       (torch)

torch_spectra.json holds a list of [name, program], without weights: `weights` in tests/ir/frontend/torch/test_complex.py
makes them, and the tests there compute what is wanted. Dims called n and m are dynamic.
"""

# ruff: noqa: E501  (a table)
from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SIZES = {"n": 3, "m": 16}
# Least lengths of programs that take windows.
LEAST = {"moves": 3, "short_time_back": 15, "spectrogram": 6}
Program = tuple[Sequence[tuple[Any, ...]], Callable[..., Any]]


def programs() -> Mapping[str, Program]:
    """Programs by name: dims of the inputs, and what they compute."""
    import torch
    from torch import fft
    from torch.nn import functional as fn

    def real(z: Any) -> Any:
        return torch.view_as_real(z.resolve_conj())

    def each(*found: Any) -> Any:
        return tuple(map(real, found))

    def rotary(x: Any, freqs: Any) -> Any:
        angles = torch.outer(torch.arange(x.shape[1]), freqs)
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn.view(1, x.shape[1], 1, -1)).flatten(3)

    def fnet(x: Any, w: Any, v: Any) -> Any:
        x = fn.layer_norm(x + fft.fft(fft.fft(x, dim=-1), dim=-2).real, (6,))
        return fn.layer_norm(x + fn.gelu(x @ w) @ v, (6,))

    def spectrogram(x: Any) -> Any:
        return torch.stft(x, 10, 3, window=torch.hann_window(10), return_complex=True).abs()

    xy = [("n", "m"), ("n", "m")]

    def z(a: Any, b: Any) -> Any:
        return torch.complex(a, b)

    return {
        "sums": (xy, lambda a, b: each(z(a, b) + a, a - z(a, b), z(a, b) + 1, 3 - z(a, b), z(a, b) + 2j, torch.add(z(a, b), z(b, a), alpha=2), -z(a, b), z(a, b).sum(1), z(a, b).cumsum(1))),
        "products": (xy, lambda a, b: each(z(a, b) * z(b, a), a * z(a, b), z(a, b) * 2j, z(a, b) * 2, z(a, b).conj() * z(a, b), z(a, b) ** 2, z(a, b) ** 3, z(a, b).square())),
        "quotients": (xy, lambda a, b: each(z(a, b) / z(b, a), a / z(a, b), z(a, b) / a, z(a, b) / 4, 1 / z(a, b), z(a, b).reciprocal(), torch.sgn(z(a, b)))),
        "functions": (xy, lambda a, b: (*each(z(a, b).exp(), z(a, b).log(), torch.polar(a.abs(), b)), z(a, b).abs(), z(a, b).angle(), z(a, b).real, z(a, b).imag, z(a, b).conj().imag, torch.linalg.vector_norm(z(a, b), dim=1), z(a, b).var(1, correction=0))),
        "truths": (xy, lambda a, b: (z(a, b) == z(a, a), z(a, b) != a, z(a, b).isnan(), z(a, b).isinf(), z(a, b).isfinite(), z(a, b) == 1j, a != 1j, z(a, b) == z(a, b).to(torch.complex128))),
        "matrices": (xy, lambda a, b: each(z(a, b) @ z(b, a).conj().T, torch.mm(z(a, b), z(a, b).T), torch.einsum("ij,kj->ik", z(a, b), z(b, a)), torch.einsum("ij->j", z(a, b)), torch.bmm(z(a, b)[None], z(a, b).mT[None]), fn.linear(z(a, b), z(b, a)), torch.outer(z(a, b)[0], z(b, a)[0]))),
        "moves": (xy, lambda a, b: each(z(a, b).reshape(-1), z(a, b)[:, None], z(a, b)[0], z(a, b)[:, -1:], torch.cat([z(a, b), a], 1), torch.stack([z(a, b), z(b, a)], 1), z(a, b).flip(1), torch.where(a > b, z(a, b), a), torch.where(a > b, z(a, b), 1j), fn.pad(z(a, b), (1, 2), value=2.5), z(a, b).expand(2, *a.shape), z(a, b).index_select(0, torch.zeros(2, dtype=torch.long)), z(a, b).repeat(2, 1), z(a, b)[:, torch.zeros(2, dtype=torch.long)], z(a, b).masked_fill(a > 0, 0.5), *z(a, b).split([1, a.shape[1] - 1], 1))),
        "made": ([("n", "m")], lambda a: each(torch.full((a.shape[0],), 1 + 2j), torch.ones(a.shape, dtype=torch.complex64), torch.zeros_like(a, dtype=torch.complex64), a.to(torch.complex64), torch.full_like(a, -1j, dtype=torch.complex64), torch.ones_like(a.to(torch.complex64)))),
        "transforms": (xy, lambda a, b: each(fft.fft(a), fft.ifft(z(a, b)), fft.rfft(a, norm="ortho"), fft.fft(z(a, b), norm="forward"), fft.ihfft(a))),
        "real_transforms": ([("n", "m")], lambda a: (fft.irfft(fft.rfft(a), n=a.shape[1]), fft.irfft2(fft.rfft2(a), s=a.shape))),
        "fixed": ([("n", 9)], lambda a: (*each(fft.fft(a, n=7), fft.rfft(a, n=5), fft.fft(a, n=12), torch.complex(a, a * 2).mean(1)), fft.irfft(fft.rfft(a, n=12)), fft.irfft(fft.rfft(a, n=7), n=7, norm="ortho"), fft.hfft(fft.ihfft(a, n=8), n=8))),
        "planes": ([("n", "m")], lambda a: each(fft.fft2(a), fft.rfft2(a), fft.ifft2(torch.complex(a, a * 2), norm="ortho"), fft.fft(a, dim=0), fft.fftshift(fft.fft(a)))),
        "long": ([("n", 1200)], lambda a: (*each(fft.fft(a), fft.rfft(a)), fft.irfft(fft.rfft(a), n=1200))),
        "prime": ([(1, 1031)], lambda a: (real(fft.rfft(a)), fft.irfft(fft.rfft(a), n=1031))),
        "windows": ([("n", 7)], lambda a: tuple(a + w for w in (torch.hann_window(7), torch.hamming_window(7), torch.hamming_window(7, False, 0.6, 0.4), torch.blackman_window(7), torch.bartlett_window(7, False), torch.kaiser_window(7, True, 5.0)))),
        "short_time": ([("n", "m")], lambda a: (torch.stft(a, 8, 3, 6, window=torch.hamming_window(6), return_complex=True, center=False, normalized=True).abs(), real(torch.stft(a, 5, 2, return_complex=True, onesided=False, center=False)))),
        "short_time_back": ([("n", "m")], lambda a: (torch.istft(torch.stft(a, 8, 2, window=torch.hann_window(8), return_complex=True), 8, 2, window=torch.hann_window(8)), torch.istft(torch.stft(a, 6, 2, 5, window=torch.hamming_window(5), return_complex=True, normalized=True), 6, 2, 5, window=torch.hamming_window(5), normalized=True, length=15))),
        "rotary": ([("n", "m", 2, 8), (4,)], rotary),
        "fnet": ([("n", "m", 6), (6, 12), (12, 6)], fnet),
        "spectrogram": ([("n", "m")], spectrogram),
    }  # fmt: skip


def module(compute: Callable[..., Any]) -> Any:
    import torch

    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return compute(*args)

    return Module()


def weighted() -> Any:
    """A module with complex weights of all types, one of them the conjugate of another's memory."""
    import torch

    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            z = torch.view_as_complex(torch.arange(24.0).reshape(3, 4, 2).sin())
            self.weight = torch.nn.Parameter(z)
            self.register_buffer("turned", z.conj())
            self.register_buffer("wide", z.to(torch.complex128))
            self.register_buffer("narrow", z.to(torch.complex32))

        def forward(self, x: Any) -> Any:
            found = x * self.weight, x * self.turned, x * self.wide, self.narrow.to(torch.complex64) * x
            return tuple(map(torch.view_as_real, found))

    return Weighted()


def main(folder: str) -> None:
    import torch

    from relax_tune.ir.frontend.torch.export import plain_program
    from relax_tune.ir.frontend.torch.program import to_json

    warnings.simplefilter("ignore")
    lines = []
    every = {name: (dims, module(compute)) for name, (dims, compute) in programs().items()} | {
        "weights": ([(3, 4)], weighted())
    }
    for name, (dims, made) in every.items():
        inputs = tuple(torch.randn([SIZES.get(d, d) for d in own]) for own in dims)
        given = {"n": torch.export.Dim("n", min=1), "m": torch.export.Dim("m", min=LEAST.get(name, 1))}
        if name == "short_time":  # torch cannot prove what holds for all lengths
            given["m"] = torch.export.Dim.AUTO
        dynamic = tuple({p: given[str(d)] for p, d in enumerate(own) if d in SIZES} for own in dims)
        bound = (dynamic,) if name != "weights" else dynamic
        try:
            program = torch.export.export(made, inputs, dynamic_shapes=bound, strict=False)
        except Exception as error:
            print(f"{name}: {str(error)[:600]}")
            continue
        text = to_json(plain_program(program))
        lines.append(json.dumps([name, json.loads(text)]))
        print(name, json.loads(text)["symbols"])
    Path(folder, "torch_spectra.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
