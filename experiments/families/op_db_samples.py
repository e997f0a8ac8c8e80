"""The operator samples of `torch_op_db.py`: torch's samples as functions of their tensors, and modules that call them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TYPES = ("float32", "float16", "int64", "int32", "bool")
# Results of no defined value.
UNDEFINED = re.compile(r"(new_)?empty.*|geqrf|.*dropout.*|rand.*|normal.*|multinomial|uniform.*|bernoulli.*|cauchy|exponential|"
                       r"geometric|log_normal|nn\.functional\.rrelu")  # fmt: skip
# Operators that are called with NaN, infinities and -0, beside the pointwise ones and the reductions. Not `mode`,
# whose result beside NaN depends on the order of the elements.
EXTREME = re.compile(r"(arg)?sort|msort|topk|kthvalue|(nan)?median|clamp.*|where|cum.*|logcumsumexp|logsumexp|"
                     r"(log_)?softmax.*|.*(relu|elu|gelu|silu|tanh|sigmoid|softplus|softsign|hardswish|mish|shrink|threshold).*|"
                     r"nn\.functional\.(max|avg|adaptive).*pool.*|isin|unique.*|nan_to_num|fmax|fmin|lerp|addcmul|addcdiv|"
                     r"masked\..*|max_.*|min_.*|aminmax|trapezoid|diff")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One sample of an operator.

    form: 0 the operator alone, 1 on `-(-(x + 0))`, 2 followed by `abs`
    """

    op: Any
    dtype: str
    number: int
    form: int
    sample: Any

    @property
    def name(self) -> str:
        return f"{self.op.full_name} {self.dtype} {self.number}{('', ' negated', ' abs')[self.form]}"


def operators(only: str) -> list[Any]:
    """The operators of the suite, in its order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if not only or re.fullmatch(only, op.full_name)]


def cases(op: Any, samples: int, types: Sequence[str] = TYPES) -> Iterator[Case]:
    """Some samples of an operator in float32 and a third of them in each other type, spread evenly; 0: all."""
    import torch

    for turn, dtype in enumerate(TYPES):
        if dtype not in types or not op.supports_dtype(getattr(torch, dtype), "cpu"):
            continue
        torch.manual_seed(0)
        np.random.seed(0)
        try:
            found = list(op.sample_inputs("cpu", getattr(torch, dtype), requires_grad=False))
        except Exception:  # some samples need packages or devices
            continue
        count = min(-(-samples // 3) if turn else samples, len(found)) if samples else len(found)
        first = turn / len(TYPES) * len(found) / max(count, 1) if samples else 0.0  # other types begin elsewhere
        for k, number in enumerate(sorted({int(first + p * len(found) / count) for p in range(count)})):
            yield Case(op, dtype, number, (k + turn) % 3, found[number])


@dataclass(frozen=True, eq=False)
class Prepared:
    """A sample that torch runs.

    call: the sample as a function of its tensors
    wanted: results of torch, flat
    leaves: their number with None
    """

    case: Case
    call: Callable[..., Any]
    tensors: Sequence[Any]
    wanted: Sequence[Any]
    leaves: int


def prepared(case: Case) -> Prepared | dict[str, Any]:
    """The sample as a function of its tensors, or the report that it is not judged."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

    leaves, spec = tree_flatten((case.sample.input, case.sample.args, case.sample.kwargs))
    places = [p for p, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def before(x: Any) -> Any:
        return ~~x if x.dtype is torch.bool else (x + 0).neg().neg()

    def after(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return ~x if x.dtype is torch.bool else x.abs()

    def real(x: Any) -> Any:
        return torch.view_as_real(x.resolve_conj()) if isinstance(x, torch.Tensor) and x.is_complex() else x

    def call(*tensors: Any) -> Any:
        given = list(leaves)
        for p, tensor in zip(places, tensors, strict=True):
            given[p] = before(tensor) if case.form == 1 else tensor
        x, args, kwargs = tree_unflatten(given, spec)
        found = case.op.op(x, *args, **kwargs)
        return tree_map(real, tree_map(after, found) if case.form == 2 else found)

    if UNDEFINED.fullmatch(case.op.name) or not places:
        return {"status": "not judged", "why": "no defined value" if places else "no tensors"}
    tensors = [leaves[p].detach().clone() for p in places]
    try:
        wanted, again = eager(call, tensors), eager(call, tensors)
    except Exception as error:  # torch's own
        return {"status": "not judged", "why": first_line(error)}
    try:
        torch.testing.assert_close(again, wanted, rtol=0, atol=0, equal_nan=True)
    except Exception:
        return {"status": "not judged", "why": "random, or of a kind that torch cannot compare"}
    return Prepared(case, call, tensors, wanted, len(tree_leaves(call(*tensors))))


def module_of(samples: Sequence[Prepared]) -> Any:
    """A module of the tensors of all samples, one after the other, that calls each."""
    import torch

    class Samples(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *tensors: Any) -> Any:
            rest, found = list(tensors), []
            for s in samples:
                own, rest = rest[: len(s.tensors)], rest[len(s.tensors) :]
                found.append(s.call(*own))
            return found

    return Samples()


def special(tensors: Sequence[Any]) -> list[Any]:
    """The tensors with NaN, infinities and zeros of both signs among the elements of floats."""
    import torch

    random = np.random.default_rng(7)
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0])
    found = []
    for t in tensors:
        t = t.clone(memory_format=torch.contiguous_format)
        if t.is_floating_point() and t.numel():
            at = torch.from_numpy(random.permutation(t.numel())[: max(1, t.numel() // 3)])
            t.view(-1)[at] = values[torch.from_numpy(random.integers(0, 5, len(at)))].to(t.dtype)
        found.append(t)
    return found


def takes_special(op: Any) -> bool:
    """Whether an operator is pointwise, an extreme, a sort or a reduction."""
    kinds = {c.__name__ for c in type(op).__mro__}
    return bool(kinds & {"UnaryUfuncInfo", "BinaryUfuncInfo", "ReductionOpInfo"} or EXTREME.fullmatch(op.full_name))


def eager(call: Callable[..., Any], tensors: Sequence[Any]) -> list[Any]:
    """The results of torch, flat and without None."""
    from torch.utils._pytree import tree_leaves

    return [r for r in tree_leaves(call(*(t.clone() for t in tensors))) if r is not None]


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
