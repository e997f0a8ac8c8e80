"""Samples of a model's inputs: one half chooses types of weights, the held-out half validates them."""

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
    """Samples of a function. choosing: calls that types are chosen by; held_out: calls that validate the choice"""

    function: str
    choosing: tuple[Sample, ...]
    held_out: tuple[Sample, ...]

    @classmethod
    def read(cls, path: Path, module: IRModule, seed: int) -> SplitSamples:
        """Read the samples of a model; hold half of them out at random.

        They are of `main`, of the only function, or of a decoder's prefill.

        Raises: UserError for files that are none, for fewer than 2 samples, and for samples without the model's inputs.
        """
        offered = entries(module.functions)
        function = choose_function(offered, PREFILL if "main" not in offered and PREFILL in offered else None)
        params = function.params
        found = _in_folder(path, params) if path.is_dir() else _stacked(path, params)
        if len(found) < 2:
            raise UserError(
                f"--samples {path}: wanted at least 2 samples, one to choose by and one to validate with, found {len(found)}; add some"
            )
        order = np.random.default_rng(abs(seed)).permutation(len(found))
        half = len(found) - len(found) // 2
        chosen, rest = sorted(order[:half].tolist()), sorted(order[half:].tolist())
        return cls(function.name, tuple(found[i] for i in chosen), tuple(found[i] for i in rest))


def _in_folder(path: Path, params: Sequence[GVar]) -> list[Sample]:
    files = sorted(path.glob("*.npz"))
    if not files:
        raise UserError(f"--samples {path}: wanted {_FORMS}; found a folder without .npz files")
    found: list[Sample] = []
    for file in files:
        arrays = read_arrays(file)
        _check(f"--samples {file}", arrays, params, 0)
        found.append(arrays)
    return found


def _stacked(path: Path, params: Sequence[GVar]) -> list[Sample]:
    arrays, where = read_arrays(path), f"--samples {path}"
    _check(where, arrays, params, 1)
    counts = {name: len(a) for name, a in arrays.items()}
    if len(set(counts.values())) != 1:
        raise UserError(
            f"{where}: wanted as many samples of each input, found {', '.join(f'{n} of {name}' for name, n in counts.items()):.300}"
        )
    return [{name: a[i] for name, a in arrays.items()} for i in range(next(iter(counts.values())))]


def _check(where: str, arrays: Sample, params: Sequence[GVar], more: int) -> None:
    """Raise UserError unless the arrays are the parameters, with `more` leading dims."""
    wanted = {p.name: p.info for p in params}
    missing, unknown = sorted(set(wanted) - set(arrays)), sorted(set(arrays) - set(wanted))
    if missing or unknown or not wanted:
        found = "; ".join(
            f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has", unknown)) if names
        )
        raise UserError(
            f"{where}: wanted the model's inputs, {', '.join(wanted) or 'and it has none'}; found a file that {found:.300}"
        )
    for name, info in wanted.items():
        a = arrays[name]
        if not isinstance(info, TensorInfo):
            raise UserError(f"{where}: wanted a model whose inputs are arrays, found that {name} is {info!r:.80}")
        if info.dtype is not None and a.dtype != info.dtype.numpy:
            raise UserError(f"{where}: {name}: wanted {info.dtype}, found {a.dtype}; convert it with astype")
        if info.ndim is not None and a.ndim != info.ndim + more:
            raise UserError(
                f"{where}: {name}: wanted {info.ndim + more} dims{', the first of them of samples' if more else ''}, found shape "
                f"{a.shape}; --samples wants {_FORMS}"
            )
