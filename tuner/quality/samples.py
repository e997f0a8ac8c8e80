"""Samples of a model's inputs: one half chooses types of weights, the other half validates the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.core.graph_walk import entries
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.runtime.generation.decoder import PREFILL
from relax_tune.runtime.model import choose_function
from relax_tune.tuner.array_files import read_arrays

Sample = Mapping[str, NDArray[Any]]
"""The arguments of one call, by parameter name."""
_FORMS = (
    "an .npz file in which each input has a leading dim of samples, or a folder of .npz files, each as `relax-tune run --inputs` "
    "takes it"
)


@dataclass(frozen=True, slots=True)
class SplitSamples:
    """Samples of a function.

    Attributes:
        choosing: Calls by which types are chosen.
        validation: Calls that validate the choice.
    """

    function: str
    choosing: tuple[Sample, ...]
    validation: tuple[Sample, ...]

    @classmethod
    def read(cls, path: Path, module: IRModule, seed: int) -> SplitSamples:
        """Read the samples of a model and split them at random into two halves.

        They are calls of `main`, of the only function, or of a decoder's prefill.

        Raises:
            UserError: The files have another form, there are fewer than 2 samples, or they lack inputs of the model.
        """
        offered = entries(module.functions)
        function = choose_function(offered, PREFILL if "main" not in offered and PREFILL in offered else None)
        params = function.params
        samples = _in_folder(path, params) if path.is_dir() else _stacked(path, params)
        if len(samples) < 2:
            raise UserError(
                f"--samples {path}: expected at least 2 samples, one to choose by and one to validate with, got {len(samples)}; add some"
            )
        # At random, since files are often sorted by class or length, which halves in order would not share.
        order = np.random.default_rng(abs(seed)).permutation(len(samples))
        half = len(samples) - len(samples) // 2
        chosen, rest = sorted(order[:half].tolist()), sorted(order[half:].tolist())
        return cls(function.name, tuple(samples[i] for i in chosen), tuple(samples[i] for i in rest))


def _in_folder(path: Path, params: Sequence[GVar]) -> list[Sample]:
    files = sorted(path.glob("*.npz"))
    if not files:
        raise UserError(f"--samples {path}: expected {_FORMS}; got a folder without .npz files")
    samples: list[Sample] = []
    for file in files:
        arrays = read_arrays(file)
        _check(f"--samples {file}", arrays, params, 0)
        samples.append(arrays)
    return samples


def _stacked(path: Path, params: Sequence[GVar]) -> list[Sample]:
    arrays, where = read_arrays(path), f"--samples {path}"
    _check(where, arrays, params, 1)
    counts = {name: len(a) for name, a in arrays.items()}
    if len(set(counts.values())) != 1:
        raise UserError(
            f"{where}: expected as many samples of each input, got {', '.join(f'{n} of {name}' for name, n in counts.items()):.300}"
        )
    return [{name: a[i] for name, a in arrays.items()} for i in range(next(iter(counts.values())))]


def _check(where: str, arrays: Sample, params: Sequence[GVar], more: int) -> None:
    """Check that the arrays are the parameters, with `more` leading dims.

    Raises:
        UserError: They are not.
    """
    expected = {p.name: p.info for p in params}
    missing, unknown = sorted(set(expected) - set(arrays)), sorted(set(arrays) - set(expected))
    if missing or unknown or not expected:
        problem = "; ".join(
            f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has", unknown)) if names
        )
        raise UserError(
            f"{where}: expected the model's inputs, {', '.join(expected) or 'and it has none'}; the file {problem:.300}"
        )
    for name, info in expected.items():
        a = arrays[name]
        if not isinstance(info, TensorInfo):
            raise UserError(f"{where}: expected a model whose inputs are arrays, but {name} is {info!r:.80}")
        if info.dtype is not None and a.dtype != info.dtype.numpy:
            raise UserError(f"{where}: {name}: expected {info.dtype}, got {a.dtype}; convert it with astype")
        if info.ndim is not None and a.ndim != info.ndim + more:
            raise UserError(
                f"{where}: {name}: expected {info.ndim + more} dims{', the first of them of samples' if more else ''}, got shape "
                f"{a.shape}; --samples expects {_FORMS}"
            )
