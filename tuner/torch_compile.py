"""The backend of torch.compile: `torch.compile(model, backend="relax_tune")`.

Each graph that torch finds is traced and imported (`ir/frontend/torch/graph.py`), tuned if the options ask for it, and built. Arrays are
passed between torch and the artifact without copies. A graph that is not supported runs as torch runs it, with one warning that says
why.

Tests: `tests/tuner/test_torch_compile.py`.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.database.store import Store
from relax_tune.errors import BuildError, DeduceError, ParseError, ScheduleError, UserError, VerifyError
from relax_tune.ir.core.dtype import DType, bf16
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.torch.export import require_torch
from relax_tune.ir.frontend.torch.graph import TracedGraph, trace_graph
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.printable import printable
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.model import Model
from relax_tune.tuner import api
from relax_tune.tuner.job.devices import with_concrete_target
from relax_tune.tuner.option import with_arguments
from relax_tune.tuner.settings import EFFORTS, Settings, merge_settings, settings_taken_by

MOST_VARIANTS = 64
"""Sets of weights that a graph is built for. Layers of equal shape share a graph."""
MOST_UPDATES = 4
"""How often a graph is built again after weights were changed in place."""
_UNSUPPORTED = (ParseError, VerifyError, DeduceError, ScheduleError, BuildError)


class FallbackWarning(UserWarning):
    """A graph of torch.compile that torch runs without relax-tune."""


class _Outside(Exception):
    """A call that the program of a graph does not cover."""


def torch_backend(
    graph: Any,
    arguments: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of torch.compile. Use `torch.compile(model, backend="relax_tune", dynamic=True)`, in `torch.no_grad()`.

    Where relax-tune is not installed, as in a checkout, pass the function itself: `backend=rt.torch_backend`.

    A graph that computes gradients, draws random numbers, has tensors on other devices or operators that are not supported runs as
    torch runs it, and a `FallbackWarning` says why. Weights are constants of the program: it is built again after a change of a
    weight, except for writes to `weight.data`, which torch does not count.

    Args:
        graph: The `torch.fx.GraphModule` that torch passes.
        arguments: The arguments of the compiled call.
        options: The `options` of torch.compile: `tune`, an effort such as `"quick"` to measure kernels for what the database lacks, or
            False (the default) to use only the records that it has; `db`, as of `rt.tune` and `rt.build`; and settings of `rt.build`,
            such as `target` (`c` by default) and `threads`, and of `rt.tune` with `tune`.
        mode: Not supported: the modes of torch.compile are Inductor's.

    Raises:
        UserError: An option is wrong.
        DatabaseError: The database cannot be opened.
    """
    chosen = _Options.read(options, mode)
    torch = require_torch()
    compilation = torch._guards.CompileContext.current_compile_id()
    # without the number of the compilation, as Python shows the same warning once
    name = f"graph {str(compilation).partition('/')[0]} of torch.compile"
    try:
        _check_arguments(torch, arguments)
        compiled = _CompiledGraph(torch, name)
        call, traced = trace_graph(graph, arguments, compiled.run)
        compiled.open(traced, arguments, chosen)
    except _UNSUPPORTED as error:
        why = str(error).partition("; workaround: ")[0]  # what can be done for programs of torch.export
        _warn(f"{name} runs without relax-tune: {why}")
        return graph.forward  # type: ignore[no-any-return]

    def run(*values: Any) -> Any:
        try:
            return call(*values)
        except _Outside as error:
            compiled.warn_once(str(error))
            return graph.forward(*values)

    return run


@dataclass(frozen=True)
class _Options:
    tune: bool
    db: Store | str | Path | None
    settings: Settings

    @staticmethod
    def read(options: Mapping[str, Any] | None, mode: str | None) -> _Options:
        if mode is not None:
            raise UserError(
                f"mode of torch.compile: expected none with backend relax_tune, got {mode!r:.40}; leave it out, and say what to "
                'measure as options={"tune": "quick"}'
            )
        given = {"target": "c", **(options or {})}
        tune = given.pop("tune", False)
        if tune is not False and tune not in EFFORTS:
            raise UserError(f"option tune: expected False or one of {', '.join(EFFORTS)}, got {tune!r:.40}")
        if tune is not False:
            given["effort"] = tune
        db = given.pop("db", None)
        try:
            # settings of searching, such as `trials`, mean nothing without it
            searching = {n: given.pop(n) for n in settings_taken_by("tune") if tune is not False and n in given}
            settings = with_concrete_target(merge_settings("build", merge_settings("tune", None, searching), given))
        except UserError as error:
            reason = with_arguments(str(error))
            raise UserError(f"options of torch.compile: expected tune, db and settings: {reason}") from None
        if "," in settings.target:
            raise UserError(f"option target: expected one device, got {settings.target:.80}")
        return _Options(tune is not False, db, settings)

    def build(self, module: IRModule) -> Model:
        """Tune and build a module, and open it on the device."""
        if self.tune:
            api.tune(module, settings=self.settings, db=self.db)
        return api.build(module, settings=self.settings, db=self.db).open(_device(self.settings.target))


@cache
def _device(target: str) -> Device:
    """Open a device that all graphs of the process share, as each has a team of threads."""
    return open_device(target)


@dataclass
class _Variant:
    """The model of one set of weights.

    Attributes:
        versions: How often each weight had been written to.
        weights: They keep the memory of the weights, so that no other tensor gets the same address.
        updates: How often the model was built again.
    """

    versions: list[int]
    weights: list[Any]
    model: Model
    updates: int


@dataclass(eq=False)
class _Models:
    """The models of one program, one for each set of weights. All graphs share them that the program computes.

    Attributes:
        traced: The graph of the program.
    """

    options: _Options
    traced: TracedGraph
    variants: dict[tuple[int, ...], _Variant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weakref.finalize(self, _close, self.variants)

    @staticmethod
    def of(options: _Options, traced: TracedGraph, weights: Sequence[Any]) -> _Models:
        """Build a traced graph, for sizes from 1 on if possible, so that it serves the graphs that torch traces for a size of 1."""
        wide = _Models(options, traced.from_one())
        try:
            wide.model_for(weights)
        except _UNSUPPORTED:
            wide = _Models(options, traced)
            wide.model_for(weights)
        return wide

    def model_for(self, weights: Sequence[Any]) -> Model:
        """Return the model of some weights, which is built when they are new or were changed."""
        key, versions = _key(weights), [w._version for w in weights]
        variant = self.variants.get(key)
        if variant is not None and variant.versions == versions:
            return variant.model
        updates = 0 if variant is None else variant.updates + 1
        if updates > MOST_UPDATES:
            raise _Outside(f"its weights were changed more than {MOST_UPDATES} times after it was compiled")
        if len(self.variants) >= MOST_VARIANTS and variant is None:
            raise _Outside(f"it was called with more than {MOST_VARIANTS} sets of weights")
        model = self.options.build(import_program(self.traced.with_weights(weights)))
        if variant is not None:
            variant.model.close()
        self.variants[key] = _Variant(versions, [w.detach() for w in weights], model, updates)
        return model


def _key(weights: Sequence[Any]) -> tuple[int, ...]:
    return tuple([w.data_ptr() for w in weights])


def _close(variants: Mapping[tuple[int, ...], _Variant]) -> None:
    for variant in variants.values():
        variant.model.close()


_OPEN: weakref.WeakValueDictionary[int, _Models] = weakref.WeakValueDictionary()
"""The models of all graphs that torch still holds, in the order in which they were built."""
_COUNT = itertools.count()


@dataclass
class _CompiledGraph:
    """A traced graph with the models that compute it."""

    torch: Any
    name: str
    traced: TracedGraph = field(init=False)
    models: _Models = field(init=False)
    warned: bool = False

    def open(self, traced: TracedGraph, arguments: Sequence[Any], options: _Options) -> None:
        """Take the models of an earlier graph of these weights whose program computes this one, or else build one."""
        self.traced = traced
        weights = self._weights(arguments)
        for models in list(_OPEN.values()):
            known = models.options == options and _key(weights) in models.variants
            shared = models.traced.at_sizes(traced) if known else None
            if shared is not None:
                self.traced, self.models = shared, models
                return
        self.models = _Models.of(options, traced, weights)
        _OPEN[next(_COUNT)] = self.models

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of the traced graph. Raises _Outside if its program does not cover the call."""
        model = self.models.model_for(self._weights(arguments))
        arrays = [_array(self.torch, arguments[i], e) for i, e in zip(self.traced.inputs, self.traced.elements)]
        try:
            values = model.run(arrays)
        except UserError as error:  # a condition of the program that torch has no guard for
            raise _Outside(str(error)) from None
        return [r.value if r.position is None else self._result(values[r.position], r) for r in self.traced.results]

    def _result(self, array: NDArray[Any], result: Any) -> Any:
        if result.is_size:
            return int(array)
        tensor = _tensor(self.torch, array)
        if result.layout is None:
            return tensor
        # views of results are computed from the strides that torch expects
        placed = self.torch.empty_permuted(tensor.shape, result.layout, dtype=tensor.dtype)
        return placed.copy_(tensor)

    def _weights(self, arguments: Sequence[Any]) -> list[Any]:
        return [arguments[i] for i in self.traced.weights.values()]

    def warn_once(self, why: str) -> None:
        if not self.warned:
            self.warned = True
            _warn(f"calls of {self.name} run without relax-tune: {why}")


def _check_arguments(torch: Any, arguments: Sequence[Any]) -> None:
    """Raise ParseError for arguments with which a graph cannot be compiled."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ParseError("it computes gradients; call the model in torch.no_grad() or torch.inference_mode()")
    other = next((t.device for t in tensors if t.device.type != "cpu"), None)
    if other is not None:
        raise ParseError(f"expected tensors of the processor, got one on {other}")


def _array(torch: Any, tensor: Any, element: DType | None) -> NDArray[Any]:
    """Return an array over the memory of a tensor."""
    if element is not None and (element is bf16 or element.is_small):  # torch exports only its bits to NumPy
        bits = tensor.view(torch.int16 if element is bf16 else torch.uint8).numpy(force=True)
        return np.asarray(bits.view(element.numpy))
    return np.asarray(tensor.numpy(force=True))


def _tensor(torch: Any, array: NDArray[Any]) -> Any:
    """Return a tensor over the memory of an array."""
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = array.view(np.int16 if array.dtype.itemsize == 2 else np.uint8)
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def _warn(text: str) -> None:
    warnings.warn(printable(text), FallbackWarning, stacklevel=2)
