"""The comparison of results in `torch_op_db.py` with those of torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.families.op_db_samples import Prepared

# Operators whose indices torch leaves open among equal elements.
UNSTABLE = re.compile("(arg)?sort|msort|topk|kthvalue|(nan)?median|mode|unique.*")


def differs(found: Sequence[np.ndarray[Any, Any]], wanted: Sequence[Any], exact: Callable[[], Sequence[Any]]) -> str:
    """Why results differ; empty when they agree."""
    import torch

    if len(found) != len(wanted):
        return f"expected {len(wanted)} results, got {len(found)}"
    for position, (f, w) in enumerate(zip(found, wanted)):
        ours = np.array(f, order="C", copy=True)
        ours = (
            torch.from_numpy(ours.view(np.int16)).view(torch.bfloat16)
            if ours.dtype.name == "bfloat16"
            else torch.from_numpy(ours)
        )
        if not isinstance(w, torch.Tensor):  # a number of Python has no type of elements
            w = torch.tensor(w, dtype=ours.dtype)
        if ours.dtype is not w.dtype or ours.shape != w.shape:
            return f"output {position}: expected {w.dtype} {tuple(w.shape)}, got {ours.dtype} {tuple(ours.shape)}"
        try:
            torch.testing.assert_close(ours, w.contiguous(), equal_nan=True, check_stride=False)
        except AssertionError as error:
            if not (w.is_floating_point() and near(ours, w, exact, position)):
                return f"output {position}: {detail(ours, w)} {' '.join(str(error).split())[:160]}"
    return ""


def near(ours: Any, theirs: Any, exact: Callable[[], Sequence[Any]], position: int) -> bool:
    """Whether the largest error is at most four of torch's, both against torch in float64.

    Where torch's result overflowed, that in float64 counts, and where ours is that in float64: torch's vectors of floats lose
    infinities of gelu on some processors."""
    import torch

    try:
        truth = exact()[position].double()
    except Exception:  # an operator without float64
        return False
    if truth.shape != ours.shape:
        return False
    whole = torch.isfinite(theirs)
    rounded = truth.to(ours.dtype)
    settled = torch.where(torch.isfinite(truth) & torch.isfinite(ours) | (rounded == ours), rounded, theirs)
    if not torch.allclose(ours[~whole], settled[~whole], 1e-3, 1e-5, equal_nan=True):
        return False
    truth = truth[whole]
    if not bool((torch.isfinite(truth) & torch.isfinite(ours[whole])).all()):
        return False
    if not truth.numel():
        return True
    least = torch.finfo(ours.dtype).eps * float(truth.abs().max())
    error, other = (float((x[whole].double() - truth).abs().max()) for x in (ours, theirs))
    return error <= 4 * max(other, least)


def detail(ours: Any, theirs: Any) -> str:
    """The first elements that differ."""
    import torch

    a, b = ours.reshape(-1).double(), theirs.reshape(-1).double()
    close = torch.isclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
    at = (~close).nonzero().reshape(-1)[:3].tolist()
    return f"{tuple(theirs.shape)} " + ", ".join(f"[{p}] expected {b[p].item():.6g} got {a[p].item():.6g}" for p in at)


def stable(s: Prepared, tensors: Sequence[Any]) -> list[Any]:
    """The result of an argsort that keeps equal elements in their order, as ours does."""
    import torch

    given = dict(zip(("dim", "descending"), s.case.sample.args)) | s.case.sample.kwargs | {"stable": True}
    return [torch.argsort(tensors[0], **given)]
