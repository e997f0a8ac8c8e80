"""A model and how it is lowered: rules, checks, the types of its weights. Tests: `tests/ir/passes/graph/test_round_weights.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import dtype
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.pipeline import WEIGHT_BITS, LoweredModule, PassManager, lower, passes_for
from relax_tune.ir.rewrite.rules import Rule
from relax_tune.ir.text.printer import print_text
from relax_tune.tuner.settings import Settings

Bounds = Mapping[str, tuple[int, int]]
"""Least and largest value of each symbol, by name."""

LOWERING = ("qkv", "attention", "precision", "activations", "weights", "checks", "cache_dtype", "kv_cache")
"""Settings that decide the program that a model becomes."""
WeightType = Literal["bf16", "f16", "int8", "int4"]
"""A type that a weight may be stored in instead of its declared one."""


@dataclass(eq=False)
class LoweredModel:
    """A model that is lowered on first use. All devices of a job share it, and with it the model's variables.

    Attributes:
        rules: Rewriting rules of the user, each applied at its level.
        verify: Check the module before and after every pass.
        weight_types: Type of each weight that is stored in fewer bits, by name; a weight that this type cannot represent keeps
            its declared one.
        several_devices: Keep the module's device hints, for placement over several devices.
    """

    module: IRModule
    settings: Settings
    rules: Sequence[Rule] = ()
    verify: bool = False
    weight_types: Mapping[str, WeightType] = field(default_factory=dict)
    several_devices: bool = False

    @cached_property
    def lowered(self) -> LoweredModule:
        return lowered_module(
            self.module, self.settings, self.rules, self.verify, self.several_devices, self.weight_types
        )

    def facts(self) -> dict[str, Any]:
        """Return what decides the lowered program, and its digest, for an artifact whose weights may be replaced."""
        return {
            "digest": lowered_digest(self.lowered),
            "bounds": {b.var.name: [b.lower, b.upper] for b in self.module.bounds if not b.implied},
            "settings": {name: getattr(self.settings, name) for name in LOWERING},
            "weight_types": dict(sorted(self.weight_types.items())),
            "several_devices": self.several_devices,
        }

    @cached_property
    def key(self) -> str:
        return model_key(self.module)


def lowered_digest(lowered: LoweredModule) -> str:
    """Return a digest of a lowered program without the elements of its weights."""
    text = print_text(replace(lowered.module, constants={}))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def model_key(module: IRModule) -> str:
    """Return the identity of a model: BLAKE2 of the program without its declared bounds, and of every weight."""
    state = hashlib.blake2b(print_text(replace(module, constants={}, bounds=())).encode(), digest_size=16)
    for name, array in sorted(module.constants.items()):
        state.update(f"{name}:{array.dtype}:{array.shape}".encode())
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def lowered_module(
    module: IRModule,
    settings: Settings,
    rules: Sequence[Rule] = (),
    verify: bool = False,
    several_devices: bool = False,
    weight_types: Mapping[str, WeightType] = MappingProxyType({}),
) -> LoweredModule:
    """Lower a module as the settings say. For the arguments see `LoweredModel`."""
    for kind, bits in WEIGHT_BITS.items():
        names = frozenset(name for name, chosen in weight_types.items() if chosen == kind)
        module = QuantizeWeights(bits, only=names)(module) if names else module
    rounded = {name: dtype(chosen) for name, chosen in weight_types.items() if chosen not in WEIGHT_BITS}
    passes = passes_for(
        settings.qkv, dtype(settings.precision), settings.attention, rounded, settings.activations, settings.weights
    )
    append = settings.attention == "fused" and not several_devices
    return lower(module, passes, rules, PassManager(verify), settings.checks, append, several_devices)


def parse_bounds(items: list[str]) -> dict[str, tuple[int, int]]:
    """Parse items `name=low:high`.

    Raises:
        UserError: An item has another form, or repeats a name.
    """
    bounds: dict[str, tuple[int, int]] = {}
    for item in items:
        name, _, span = item.partition("=")
        low, colon, high = span.partition(":")
        plain = all(end.isascii() and end.isdigit() and len(end) <= 18 for end in (low, high))
        if not (name and colon and plain and int(low) <= int(high)):
            raise UserError(
                f"--bound expects NAME=LOW:HIGH with whole numbers LOW <= HIGH of at most 18 digits, such as n=1:512; got {item!r:.80}"
            )
        if name in bounds:
            raise UserError(f"--bound expects each symbol once, got {name} twice; leave one of them out")
        bounds[name] = (int(low), int(high))
    return bounds
