"""Other weights for a built artifact: the same programs, kernels and plans, with weights folded and packed again.

Nothing is timed and no kernel is generated, tested or compiled. The model is lowered again, since lowering computes with weights, and
has to become the program that was built.

Tests: `tests/tuner/job/test_replaced_weights.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ArtifactError, ParseError, UserError
from relax_tune.ir.core.expr import as_int
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.rewrite.rules import Rule
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.replaced_weights import is_index, replaced_constants, replaced_key
from relax_tune.tuner.job.lowered_model import LOWERING, lowered_digest, lowered_module, model_key
from relax_tune.tuner.program.prepack import RecipeStep, packed_again, read_recipe
from relax_tune.tuner.settings import Settings

Arrays = Mapping[str, NDArray[Any]]


def stored_import(artifact: Artifact) -> dict[str, Any]:
    """Return the arguments of `load_model` by which the artifact's model was imported."""
    facts = _facts(artifact)
    bounds = {name: (low, high) for name, (low, high) in facts["bounds"].items() if high is not None}
    settings = _settings(artifact, facts)
    return {"bounds": bounds, "cache_dtype": settings.cache_dtype, "kv_cache": settings.kv_cache}


def with_model(artifact: Artifact, module: IRModule, rules: Sequence[Rule] = ()) -> Artifact:
    """Return the artifact with the weights of another model of the same structure.

    Args:
        rules: Rewriting rules that the artifact was built with.

    Raises:
        UserError: The model becomes another program, or integers that may be indices differ.
        ArtifactError: The artifact does not say how it was lowered.
    """
    facts = _facts(artifact)
    settings, several = _settings(artifact, facts), bool(facts["several_devices"])
    lowered = lowered_module(module, settings, rules, several_devices=several, weight_types=facts["weight_types"])
    constants = lowered.module.constants
    for name, old in artifact.constants.items():
        new = constants.get(name)
        if new is not None and (new.shape, new.dtype) != (old.shape, old.dtype):
            raise UserError(f"weight {name}: expected {old.dtype} {old.shape}, got {new.dtype} {new.shape}")
    if lowered_digest(lowered) != facts["digest"]:
        raise UserError(
            f"{artifact.path or 'the artifact'}: expected a model of the same structure, bounds and versions, got one that becomes "
            f"another program{_difference(artifact, constants)}; load it as the first one was loaded, or build it"
        )
    return _with(artifact, constants, model_key(module))


def with_arrays(artifact: Artifact, arrays: Mapping[str, Any]) -> Artifact:
    """Return the artifact with some other weights, by the names of its constants or of the weights that it has in packed form.

    Raises:
        UserError: A name, a shape or a type differs, or a weight is missing that is packed together with one of these.
    """
    steps = _recipe(artifact)
    known = {**_packed_sources(artifact, steps), **artifact.constants}
    given = {name: replaced_constants(known, {name: array})[name] for name, array in arrays.items()}
    available, again = {**artifact.constants, **given}, dict[str, RecipeStep]()
    for name, step in steps.items():
        if not {*given, *again}.isdisjoint(step.sources):
            again[name] = step
            missing = [n for n in step.sources if n not in available and n not in steps]
            if missing:
                raise UserError(
                    f"weight {missing[0]}: expected it too, since the artifact packs it together with others; give it, or a whole model"
                )
    packed = packed_again(again, available)
    constants = {n: packed.get(n, available[n]) for n in artifact.constants}
    return artifact.of_weights(constants, replaced_key(artifact.manifest["extra"].get("model"), given))


def _with(artifact: Artifact, constants: Arrays, model: str) -> Artifact:
    packed = packed_again(_recipe(artifact), constants)
    replaced = {name: packed[name] if name in packed else constants[name] for name in artifact.constants}
    for name, old in artifact.constants.items():
        if is_index(old) and not np.array_equal(old, replaced[name]):
            raise UserError(
                f"constant {name}: expected the integers of the artifact, which kernels may use as indices, got others; build the model"
            )
    return artifact.of_weights(replaced, model)


def _difference(artifact: Artifact, constants: Arrays) -> str:
    """Return how the names of two models' weights differ, for a message."""
    steps = _recipe(artifact)
    old = {*artifact.constants, *(n for step in steps.values() for n in step.sources)} - set(steps)
    lacking, more = sorted(old - set(constants)), sorted(set(constants) - old)
    parts = [f"{word} {names[0]}" for word, names in (("without the weight", lacking), ("with", more)) if names]
    return f" {' and '.join(parts)}" if parts else ""


def _packed_sources(artifact: Artifact, steps: Mapping[str, RecipeStep]) -> dict[str, NDArray[Any]]:
    """Return an array of the type and shape of each weight that the artifact has in packed form only."""
    buffers = {n: b for step in steps.values() for n, b in step.inputs.items()}
    return {
        name: np.broadcast_to(np.zeros((), b.dtype.numpy), [as_int(d) or 0 for d in b.shape])
        for name, b in buffers.items()
        if name not in artifact.constants and name not in steps
    }


def _facts(artifact: Artifact) -> Mapping[str, Any]:
    facts = artifact.manifest["extra"].get("lowering")
    shape = {"digest": str, "bounds": dict, "settings": dict, "weight_types": dict, "several_devices": bool}
    if not has_shape(facts, shape):
        raise ArtifactError(
            f"{artifact.path or 'the artifact'}: it does not say how its model was lowered, since an earlier version built it; "
            "build it again"
        )
    return dict(facts)


def _settings(artifact: Artifact, facts: Mapping[str, Any]) -> Settings:
    stored = {"kv_cache": "contiguous", **facts["settings"]}  # artifacts of version 0.2 do not state it
    if set(stored) != set(LOWERING):
        raise ArtifactError(
            f"{artifact.path}: expected the settings {', '.join(LOWERING)}, got {', '.join(facts['settings'])}; build it again"
        )
    return Settings(**stored)


def _recipe(artifact: Artifact) -> dict[str, RecipeStep]:
    """Return how the artifact's packed weights are computed. Raises ArtifactError for something else."""
    try:
        return read_recipe(artifact.manifest["extra"].get("packed", {}))
    except (ParseError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"{artifact.path}: expected how its weights were packed, got something else: {error}; build it again"
        ) from None
