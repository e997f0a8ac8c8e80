"""Smaller programs that fail alike: fewer operators, smaller shapes, simpler values; stored as text with their arguments."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.draft import Draft, Input
from tests.fuzz.execute import Outcome, Trial, Way, execute
from tests.fuzz.oracle import Array, nominal_values

from relax_tune.errors import RelaxTuneError
from relax_tune.ir.core.dtype import dtype, is_floating
from relax_tune.ir.core.expr import Var, as_int, const, substitute
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.text import save_text

REGRESSIONS = Path(__file__).with_name("regressions")
Case = tuple[Draft, list[Array]]
Why = Callable[[Draft, Any, Sequence[Array], Outcome], str]


def shrink(case: Case, way: Way, why: Why, kind: str, secs: float) -> tuple[Case, str]:
    """Return the smallest case, within some seconds, whose failure is of the same kind, and its reason."""
    end, reason = time.monotonic() + secs, kind
    while time.monotonic() < end:
        candidates = list(_distinct(_smaller(*case)))[:48]
        trials, fitting = [], []
        for draft, args in candidates:
            try:
                trials.append(Trial(draft.module(), (args,)))
                fitting.append((draft, args))
            except (RelaxTuneError, AssertionError, ValueError):
                continue
        result = [
            (c, text)
            for c, t, o in zip(fitting, trials, execute(way, trials), strict=True)
            if kind_of(text := why(c[0], t.module, c[1], o)) == kind
        ]
        if not result:
            break
        case, reason = min(result, key=lambda f: _weight(*f[0]))
    return case, reason


def kind_of(why: str) -> str:
    """The class of a failure: what may change while shrinking is left out."""
    if why.startswith("result") or why.startswith("the interpreter: result"):
        return "wrong" if "wrong" in why else "shape"
    return why.split(":")[0]


def _weight(draft: Draft, args: Sequence[Array]) -> tuple[int, ...]:
    plain = sum(int(np.count_nonzero((a != 1) & (a != 0))) for a in args if a.dtype != bool)
    return len(draft.steps), len(draft.outputs), sum(a.size for a in args), plain


def _distinct(cases: Iterator[Case]) -> Iterator[Case]:
    visited = set()
    for draft, args in cases:
        key = (draft, tuple((a.shape, a.tobytes()) for a in args))
        if key not in visited:
            visited.add(key)
            yield draft, args


def _smaller(draft: Draft, args: list[Array]) -> Iterator[Case]:
    for make in (_outputs, _cuts, _bypasses, _sizes, _values):
        for d, a in make(draft, args):
            pruned = d.pruned()
            remaining = _arguments_of(d, pruned, a)
            if remaining is not None and _weight(pruned, remaining) < _weight(draft, args):
                yield pruned, remaining


def _arguments_of(draft: Draft, pruned: Draft, args: Sequence[Array]) -> list[Array] | None:
    """The arguments of the inputs that pruning left, which keeps their order."""
    result, at = [], 0
    for i in pruned.inputs:
        while at < len(draft.inputs) and draft.inputs[at] is not i:
            at += 1
        if at == len(draft.inputs):
            return None
        result.append(args[at])
        at += 1
    return result


def _outputs(draft: Draft, args: list[Array]) -> Iterator[Case]:
    if len(draft.outputs) > 1:
        for o in draft.outputs:
            yield replace(draft, outputs=(o,)), args
    else:  # an earlier value instead
        for p in range(len(draft.steps)):
            yield replace(draft, outputs=(len(draft.inputs) + p,)), args


def _cuts(draft: Draft, args: list[Array]) -> Iterator[Case]:
    """A step as an input, with the value it has."""
    try:
        module, variables = draft.parts()
        values = nominal_values(module, args)
    except Exception:
        return
    n = len(draft.inputs)
    for p in range(len(draft.steps)):
        var = variables[n + p]
        if isinstance(var.info, TensorInfo) and var.info.shape is not None and var.info.dtype is not None:
            input_ = Input(var.info.shape, var.info.dtype)
            number = {**{k: k for k in range(n)}, n + p: n}
            number |= {n + q: n + 1 + q - (q > p) for q in range(len(draft.steps)) if q != p}
            steps = tuple(
                replace(s, args=tuple(number[a] for a in s.args)) for q, s in enumerate(draft.steps) if q != p
            )
            yield (
                Draft(draft.symbols, (*draft.inputs, input_), steps, tuple(number[o] for o in draft.outputs)),
                [*args, np.asarray(values[var]).astype(var.info.dtype.numpy)],
            )


def _bypasses(draft: Draft, args: list[Array]) -> Iterator[Case]:
    """An argument of a step instead of its result."""
    try:
        _, variables = draft.parts()
    except RelaxTuneError:
        return
    n = len(draft.inputs)
    for p, s in enumerate(draft.steps):
        for a in s.args:
            if variables[a].info == variables[n + p].info:
                steps = tuple(replace(t, args=tuple(a if x == n + p else x for x in t.args)) for t in draft.steps)
                outputs = tuple(a if o == n + p else o for o in draft.outputs)
                if all(o >= n for o in outputs):
                    yield replace(draft, steps=steps, outputs=outputs), args


def _sizes(draft: Draft, args: list[Array]) -> Iterator[Case]:
    """Fewer elements along a symbol."""
    sizes: dict[Var, int] = {}
    for i, a in zip(draft.inputs, args, strict=True):
        sizes |= {d: s for d, s in zip(i.dims, a.shape) if isinstance(d, Var)}
    lower = {b.var: b.lower for b in draft.symbols}
    for v, size in sizes.items():
        for new in sorted({0, 1, 2, 3, size // 2, size - 1}):
            if lower.get(v, 0) <= new < size:
                known = {w: const(new if w is v else s) for w, s in sizes.items()}
                yield draft, [_cut(i, a, known) for i, a in zip(draft.inputs, args, strict=True)]


def _cut(i: Input, a: Array, known: Mapping[Var, Any]) -> Array:
    shape = tuple(max(0, as_int(substitute(d, known)) or 0) for d in i.dims)
    result = a[tuple(slice(0, s) for s in shape)]
    if result.shape != shape:
        result = np.resize(a, shape) if a.size else np.zeros(shape, a.dtype)
    if i.below is not None:
        result = np.minimum(result, max(0, (as_int(substitute(i.below, known)) or 1) - 1))
    return np.ascontiguousarray(result).astype(a.dtype)


def _values(draft: Draft, args: list[Array]) -> Iterator[Case]:
    """Zeros and ones for all, half or one of the elements."""
    for p, (i, a) in enumerate(zip(draft.inputs, args, strict=True)):
        other = np.asarray(0 if i.below is not None else 1).astype(a.dtype)
        odd = np.flatnonzero((a != other).reshape(-1))
        parts = [odd, *np.array_split(odd, 2), *(odd[[k]] for k in range(min(6, len(odd))))]
        for part in parts:
            if len(part):
                new = a.copy().reshape(-1)
                new[part] = other
                yield draft, [*args[:p], new.reshape(a.shape), *args[p + 1 :]]


def store(case: Case, way: Way, why: str, folder: Path = REGRESSIONS) -> Path:
    """Write a case as `.relax` and `.json`, under a name of its operators."""
    draft, args = case
    module = draft.module()
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(repr((draft, way)).encode(), digest_size=3).hexdigest()
    path = folder / f"{'_'.join(s.op.name for s in draft.steps)[:60]}_{digest}.relax"
    save_text(module, path)
    stored = {
        "target": way.target, "policy": way.policy, "level": way.level, "seed": way.seed, "found": why.splitlines()[0][:300],
        "arguments": [{"dtype": str(a.dtype), "shape": a.shape, "values": _plain(a)} for a in args],
    }  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(stored, indent=1) + "\n")
    return path


def _plain(a: Array) -> list[Any]:
    return [x.item() for x in (a.astype(np.float64) if is_floating(a.dtype) else a).reshape(-1)]


def read(path: Path) -> tuple[Way, list[Array], Mapping[str, Any]]:
    """Return the configuration and the arguments of a stored case, and its metadata."""
    stored = json.loads(path.with_suffix(".json").read_text())
    way = Way(stored["target"], stored["policy"], stored["level"], stored["seed"])
    args = [np.array(a["values"], dtype(a["dtype"]).numpy).reshape(a["shape"]) for a in stored["arguments"]]
    return way, args, stored
