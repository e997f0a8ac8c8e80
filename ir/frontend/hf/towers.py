"""Import of dual encoders of text and images, whose vectors are compared (Radford et al. 2021, CLIP; Zhai et al. 2023, SigLIP).

Tests: `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.config import BATCH, Bounds, ConfigFields, SymbolRange, symbol_bounds
from relax_tune.ir.frontend.hf.families.encoders import read_encoder
from relax_tune.ir.frontend.hf.heads import head_stage, pooler_output, projected
from relax_tune.ir.frontend.hf.transformer.inputs import PatchRows
from relax_tune.ir.frontend.hf.transformer.parameters import Parameters
from relax_tune.ir.frontend.hf.transformer.programs import encoder_module
from relax_tune.ir.frontend.hf.transformer.stack import StackEmitter
from relax_tune.ir.frontend.hf.weights import HfWeights
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.math.elementwise import AddScalar, MulScalar
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import L2Normalize

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Towers:
    """A family of two encoders.

    Attributes:
        text, vision: default fields of their configurations
        biased: scores of an image and a text have a bias
        shape: of the stored factor of scores
    """

    kind: str
    text: Fields
    vision: Fields
    biased: bool
    shape: tuple[int, ...]

    def part(self, c: ConfigFields, which: str) -> Fields:
        """Read the configuration of one encoder, `text` or `vision`."""
        usual: Fields = self.text if which == "text" else self.vision
        # where older files of CLIP have both forms, the second counts
        older = self.kind == "clip" and c.data.get(f"{which}_config_dict") is not None
        key = f"{which}_config_dict" if older else f"{which}_config"
        given = c.data.get(key)
        if not isinstance(given, dict | None):
            raise c.wrong(key, "an object")
        size = c.data.get("projection_dim")
        # The files state only what differs from the defaults of the family's classes.
        fields = {**usual, **(given or {}), "projection_dim": 512 if size is None else size}
        return {**fields, "model_type": f"{self.kind}_{which}_model", "architectures": None}


_WIDE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TOWERS: Mapping[str, Towers] = {
    "clip": Towers(
        "clip",
        {
            "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8, "vocab_size": 49408,
            "max_position_embeddings": 77,
        },
        {**_WIDE, "image_size": 224, "patch_size": 32}, biased=False, shape=(),
    ),
    "siglip": Towers(
        "siglip", {**_WIDE, "vocab_size": 32000, "max_position_embeddings": 64}, {**_WIDE, "image_size": 224, "patch_size": 16},
        biased=True, shape=(1,),
    ),
    "siglip2": Towers(
        "siglip2", {**_WIDE, "vocab_size": 256000, "max_position_embeddings": 64}, {**_WIDE, "num_patches": 256, "patch_size": 16},
        biased=True, shape=(1,),
    ),
}  # fmt: skip


def load_towers(folder: Path, data: Mapping[str, Any], where: str, bounds: Bounds | None) -> IRModule:
    """Import CLIP or SigLIP as three functions that share weights.

    `text(input_ids (t, n) i64, attention_mask (t, n) i64) -> text_embeds (t, width)` and `image(pixel_values (b, channels, height,
    width)) -> image_embeds (b, width)` give vectors of unit length. `main`, of the inputs of both, gives `logits_per_image (b, t)`,
    `logits_per_text (t, b)` and both vectors. With a head of classes it is `main(pixel_values) -> logits (b, labels)`.

    SigLIP 2 takes `pixel_values (b, p, numbers of a patch)`, `pixel_attention_mask (b, p) i64` and `spatial_shapes (b, 2) i64`,
    also with that head.

    Raises:
        ParseError: for architectures and fields that are not imported.
        UserError: for bounds that the model cannot have.
    """
    c, towers = ConfigFields(data, where), TOWERS[str(data["model_type"])]
    named = data.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else "Model" if named in (None, []) else ""
    vision = towers.part(c, "vision")
    if name.endswith("ForImageClassification"):
        return _classified(folder, {**data, **vision, "architectures": named}, where, bounds)
    if not name.endswith("Model"):
        raise c.wrong("architectures", "one whose name ends in Model or ForImageClassification")
    g, weights = GraphBuilder(), HfWeights(folder)

    def tower(which: str, data: Fields) -> StackEmitter:
        stack = read_encoder(data, where)
        return StackEmitter(stack, Parameters.of(weights, stack.names), g.inner(which, f"{which}."))

    text, image = tower("text", towers.part(c, "text")), tower("image", vision)
    positions = SymbolRange("positions", most=text.stack.positions)
    symbols = {"b": SymbolRange("images"), "t": SymbolRange("texts"), "n": positions}
    if isinstance(image.stack.embedding, PatchRows):
        symbols["p"] = SymbolRange("patches", 1)
    span = symbol_bounds(symbols, bounds)
    embeddings = list[GVar]()
    for encoder, batch, length in ((text, "t", "n"), (image, "b", "p")):
        x = encoder.encode(span[batch], span.get(length), batch, length)
        y = pooler_output(encoder, x) if towers.biased else projected(encoder, x, c)
        function = encoder.g.define(encoder.g.call(L2Normalize(1e-12), y, hint=f"{encoder.g.name}_embeds"))
        g.put(function)
        # functions that are called are inlined and are no entry points of an artifact, so `main` calls copies
        called = replace(function, name=f"{function.name}_of_main")
        inputs = [g.parameter(p.name, p.info) for p in function.params]
        embeddings.append(g.call_function(g.put(called), *inputs, hint=f"{function.name}_embeds"))
    words, pixels = embeddings
    # The file stores the logarithm of the temperature's reciprocal.
    factor = float(np.exp(weights.get("logit_scale", towers.shape).item()))
    scores = g.call(MulScalar(factor), g.call(Matmul(transpose_b=True), words, pixels), hint="logits_per_text")
    if towers.biased:
        shift = float(weights.get("logit_bias", (1,)).item())
        scores = g.call(AddScalar(shift), scores, hint="logits_per_text")
    return g.finish((g.call(Permute((1, 0)), scores, hint="logits_per_image"), scores, words, pixels))


def _classified(folder: Path, data: Fields, where: str, bounds: Bounds | None) -> IRModule:
    """Import only the encoder of images, with a head of classes."""
    stack = read_encoder(data, where)
    head = head_stage(data, where, stack)
    assert head is not None
    flexible = isinstance(stack.embedding, PatchRows)
    span = symbol_bounds({"b": BATCH, **({"p": SymbolRange("patches", 1)} if flexible else {})}, bounds)
    return encoder_module(stack, HfWeights(folder), span["b"], span.get("p"), [head], length="p")
