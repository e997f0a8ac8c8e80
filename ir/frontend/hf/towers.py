"""Import of models of images beside text: two encoders into one space, whose vectors are compared (Radford et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.config import Bounds, ConfigFields, batch_bounds, symbol_bounds
from relax_tune.ir.frontend.hf.encoder import Encoder
from relax_tune.ir.frontend.hf.encoder_families import encoder_spec
from relax_tune.ir.frontend.hf.encoder_spec import EncoderSpec
from relax_tune.ir.frontend.hf.heads import head_stage, normalized, pooler_output, projected
from relax_tune.ir.frontend.hf.weights import HfWeights
from relax_tune.ir.frontend.shared.bounds import checked_bounds
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.math.elementwise import AddScalar, MulScalar
from relax_tune.ir.op.reduction.linalg import Matmul

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Towers:
    """A family of two encoders. text, vision: fields that a configuration may leave out

    biased: scores of an image and a text have a bias; shape: of the stored factor of scores"""

    kind: str
    text: Fields
    vision: Fields
    biased: bool
    shape: tuple[int, ...]

    def part(self, c: ConfigFields, which: str) -> Fields:
        """Read the configuration of one encoder, `text` or `vision`."""
        usual: Fields = self.text if which == "text" else self.vision
        # where an older file of CLIP has the second form, it stands in place of the first
        older = self.kind == "clip" and c.data.get(f"{which}_config_dict") is not None
        key = f"{which}_config_dict" if older else f"{which}_config"
        given = c.data.get(key)
        if not isinstance(given, dict | None):
            raise c.wrong(key, "an object")
        found = {**usual, **(given or {})}
        size = c.data.get("projection_dim")
        found["projection_dim"] = 512 if size is None else size
        return {**found, "model_type": f"{self.kind}_{which}_model", "architectures": None}


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
}  # fmt: skip


def load_towers(folder: Path, data: Mapping[str, Any], where: str, bounds: Bounds | None) -> IRModule:
    """Import CLIP or SigLIP as three functions that share weights.

    `text(input_ids (t, n) i64, attention_mask (t, n) i64) -> text_embeds (t, width)` and `image(pixel_values (b, channels, height,
    width)) -> image_embeds (b, width)` give vectors of unit length. `main`, of the inputs of both, gives `logits_per_image (b, t)`,
    `logits_per_text (t, b)` and both vectors. With a head of classes it is `main(pixel_values) -> logits (b, labels)`.

    Raises: ParseError for architectures and fields that are not imported, UserError for impossible bounds."""
    c, towers = ConfigFields(data, where), TOWERS[str(data["model_type"])]
    named = data.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else "Model" if named in (None, []) else ""
    vision = towers.part(c, "vision")
    if name.endswith("ForImageClassification"):
        return _classified(folder, {**data, **vision, "architectures": named}, where, bounds)
    if not name.endswith("Model"):
        raise c.wrong("architectures", "one whose name ends in Model or ForImageClassification")
    g = GraphBuilder()
    text = Encoder(*_read(folder, towers.part(c, "text"), where), g=g.inner("text", "text."), batch="t")
    image = Encoder(*_read(folder, vision, where), g=g.inner("image", "image."))
    span = _bounds(text.spec.words.positions, bounds)
    found = list[GVar]()
    for encoder, batch in ((text, "t"), (image, "b")):
        x = encoder.encode(span[batch], span["n"])
        y = pooler_output(encoder, x) if towers.biased else projected(encoder, x, c)
        function = encoder.g.define(normalized(encoder, y))
        g.put(function)
        # `main` calls a function of its own, since functions that are called are inlined, and no entries of an artifact
        called = replace(function, name=f"{function.name}_of_main")
        inputs = [g.parameter(p.name, p.info) for p in function.params]
        found.append(g.call_function(g.put(called), *inputs, hint=f"{function.name}_embeds"))
    words, pixels = found
    factor = HfWeights(folder).get("logit_scale", towers.shape)
    scores = g.call(MulScalar(float(np.exp(factor.item()))), g.call(Matmul(transpose_b=True), words, pixels))
    if towers.biased:
        scores = g.call(
            AddScalar(float(HfWeights(folder).get("logit_bias", (1,)).item())), scores, hint="logits_per_text"
        )
    return g.finish((g.call(Permute((1, 0)), scores, hint="logits_per_image"), scores, words, pixels))


def _read(folder: Path, data: Fields, where: str) -> tuple[EncoderSpec, HfWeights]:
    spec = encoder_spec(data, where)
    return spec, HfWeights(folder, spec.prefixes)


def _classified(folder: Path, data: Fields, where: str, bounds: Bounds | None) -> IRModule:
    """Import the encoder of images alone, with a head of classes."""
    spec, weights = _read(folder, data, where)
    head = head_stage(data, where, spec)
    assert head is not None
    return Encoder(spec, weights).build(batch_bounds(bounds), (0, 0), [head])


def _bounds(positions: int, bounds: Bounds | None) -> Mapping[str, tuple[int, int | None]]:
    """Return the inclusive bounds of the symbols of both encoders. Raises UserError for those they cannot have."""
    given = checked_bounds(bounds)
    unknown = sorted(set(given) - {"b", "t", "n"})
    if unknown:
        raise UserError(
            "wanted bounds of the model's symbols b (images), t (texts) and n (positions), found "
            f"{', '.join(unknown)[:80]}; correct the name"
        )
    _, n = symbol_bounds(positions, {"n": given["n"]} if "n" in given else None)
    return {"b": (1, None), "t": (1, None), **given, "n": n}
