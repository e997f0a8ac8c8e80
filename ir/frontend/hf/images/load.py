"""Import of convolutional and hierarchical models of images from their specifications.

Tests: `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, const, mul
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.config import BATCH, Bounds, ConfigFields, SymbolRange, symbol_bounds
from relax_tune.ir.frontend.hf.heads import BARE
from relax_tune.ir.frontend.hf.images.convolutional import CONVOLUTIONAL
from relax_tune.ir.frontend.hf.images.hierarchical import HIERARCHICAL
from relax_tune.ir.frontend.hf.images.layers import ChannelNorm, ImageEmitter, ImageValue, PointwiseLinear
from relax_tune.ir.frontend.hf.images.spec import ImageSpec
from relax_tune.ir.frontend.hf.transformer.parameters import Parameters, stored_prefix
from relax_tune.ir.frontend.hf.weights import HfWeights
from relax_tune.ir.frontend.shared.finish import with_result_names
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.op.reduction.reduce import Max, Mean

IMAGES = {**CONVOLUTIONAL, **HIERARCHICAL}
CLASSES, SEGMENTS, BACKBONE = "ForImageClassification", "ForSemanticSegmentation", "Backbone"


def load_images(folder: Path, data: Mapping[str, Any], where: str, bounds: Bounds | None) -> IRModule:
    """Import a model of images whose `model_type` is one of IMAGES.

    Raises:
        ParseError: for an architecture or field that is not imported.
        UserError: for bounds that the model cannot have.
    """
    c = ConfigFields(data, where)
    spec = IMAGES[str(data["model_type"])](c)
    task = _task(c, spec)
    side = SymbolRange("rows", spec.least, spec.most), SymbolRange("columns", spec.least, spec.most)
    sized = {} if spec.sides is not None else dict(zip(("h", "w"), side))
    span = symbol_bounds({"b": BATCH, **sized}, bounds)
    g, weights = GraphBuilder(), HfWeights(folder)
    batch = g.symbol("b", *span["b"])
    sides: Sequence[Expr] = [const(n) for n in spec.sides or ()] or [g.symbol(s, *span[s]) for s in ("h", "w")]
    e = ImageEmitter(g, Parameters(weights, stored_prefix(weights, spec.prefix)))
    x = ImageValue(g.input("pixel_values", (batch, const(spec.channels), *sides), f32))
    maps = []
    for stage in spec.stages:
        x = e.run(stage, x)
        maps.append(x)
    if task == BACKBONE:
        features = _feature_maps(c, spec, e, maps)
        return with_result_names(g.finish(features), features, [f"feature_maps_{k}" for k in range(len(features))])
    if task == SEGMENTS:
        assert spec.decoder is not None
        segments = e.laid_out(spec.decoder(e.outside(), maps, c.labels()), last=False).value
        return with_result_names(g.finish(segments), (segments,), ("logits",))
    x = e.run(spec.tail, x)
    if task == CLASSES:
        head = e.outside()
        pooled = e.run(spec.pooled, _pooled(e, spec, head.run(spec.before_classes, x)))
        logits = head.run((PointwiseLinear(spec.classifier, c.labels()),), pooled)
        return g.finish(g.call(Reshape((batch, const(c.labels()))), logits.value, hint="logits"))
    bare = _bare(e, spec, x)
    return with_result_names(g.finish(bare), bare if isinstance(bare, tuple) else (bare,), BARE)


def _task(c: ConfigFields, spec: ImageSpec) -> str:
    """Return the head that `architectures` names, or an empty string for a bare model."""
    known = ["Model", CLASSES]
    known += [SEGMENTS] if spec.decoder is not None else []
    known += [BACKBONE] if spec.backbone else []
    named = c.data.get("architectures")
    if named is None or named == []:
        return ""
    name = str(named[0]) if isinstance(named, list) else ""
    task = next((t for t in known if name.endswith(t)), None)
    if task is None:
        raise c.wrong("architectures", f"one whose name ends in {', '.join(known)}")
    return "" if task == "Model" else task


def _pooled(e: ImageEmitter, spec: ImageSpec, x: ImageValue) -> ImageValue:
    """Pool each channel: (b, 1, 1, c) or (b, c, 1, 1)."""
    axes = (1, 2) if x.last else (2, 3)
    return ImageValue(
        e.g.call(Max(axes, True) if spec.pool == "max" else Mean(axes, True), x.value, hint="pooled"), x.last
    )


def _bare(e: ImageEmitter, spec: ImageSpec, x: ImageValue) -> GVar | tuple[GVar, ...]:
    """Return the last hidden state of a bare model, and its pooled vector if the family has one."""
    if spec.positions:
        rows = e.laid_out(x, last=True)
        shape = (x.batch, mul(x.height, x.width), const(x.channels))
        hidden = e.g.call(Reshape(shape), rows.value, hint="last_hidden_state")
    else:
        hidden = e.laid_out(x, last=False).value
    if not spec.pool:
        return hidden
    pooled = e.laid_out(e.run(spec.pooled, _pooled(e, spec, x)), last=False)
    if spec.keeps_dims:
        return hidden, pooled.value
    return hidden, e.g.call(Reshape((x.batch, const(x.channels))), pooled.value, hint="pooler_output")


def _feature_maps(c: ConfigFields, spec: ImageSpec, e: ImageEmitter, maps: Sequence[ImageValue]) -> tuple[GVar, ...]:
    """Return the results of the stages that a backbone names."""
    stages = ["stem", *(f"stage{k}" for k in range(1, len(maps)))]
    named, numbers = c.data.get("out_features"), c.data.get("out_indices")
    if named is None and isinstance(numbers, list) and all(type(k) is int for k in numbers):
        named = [stages[k] for k in numbers if -len(stages) <= k < len(stages)]
    named = [stages[-1]] if named is None else named
    if not isinstance(named, list) or not named or not set(map(str, named)) <= set(stages):
        raise c.wrong("out_features", f"names among {', '.join(stages)}")
    results = []
    for stage, x in zip(stages, maps, strict=True):
        if stage in named:
            norm = () if spec.maps_eps is None else (ChannelNorm(f"hidden_states_norms.{stage}", spec.maps_eps),)
            results.append(e.laid_out(e.outside().run(norm, x), last=False).value)
    return tuple(results)
