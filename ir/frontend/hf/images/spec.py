"""Specification of a model of images, as an entry of a table of families reads it from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from relax_tune.ir.frontend.hf.images.layers import ImageEmitter, ImageLayer, ImageValue, size_behind
from relax_tune.ir.frontend.shared.bounds import LARGEST

Decoder = Callable[[ImageEmitter, Sequence[ImageValue], int], ImageValue]
"""A head of segmentation: from the results of the stages and the number of labels to the logits."""


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """Layers of a model of images, from the pixels to its results.

    stages: the stem, then stages, whose results are those of a backbone
    prefix: stands before the names of the model's weights, where a head stands beside it
    tail: layers between the last stage and the last hidden state
    pool: mean or largest element of each channel; empty: a bare model has no pooled vector
    pooled: layers of the pooled vector; keeps_dims: it has a height and width of 1
    before_classes: layers of a head between the last hidden state and the pooling
    classifier: name of the product that gives classes
    decoder: head of segmentation, if the family has one
    maps_eps: of the norms of a backbone's results; None: there are none. backbone: the family has one
    sides: height and width, where the model is for one size
    most: largest height and width; positions: the last hidden state is (b, positions, c)
    """

    channels: int
    stages: tuple[tuple[ImageLayer, ...], ...]
    prefix: str
    tail: tuple[ImageLayer, ...] = ()
    pool: Literal["mean", "max", ""] = "mean"
    pooled: tuple[ImageLayer, ...] = ()
    keeps_dims: bool = False
    before_classes: tuple[ImageLayer, ...] = ()
    classifier: str = "classifier"
    decoder: Decoder | None = None
    backbone: bool = False
    maps_eps: float | None = None
    sides: tuple[int, int] | None = None
    most: int | None = None
    positions: bool = False

    @property
    def least(self) -> int:
        """Smallest height and width that every layer can take."""
        layers = [layer for stage in self.stages for layer in stage] + list(self.tail)
        low, high = 0, 1
        while size_behind(layers, high) < 1:
            low, high = high, 2 * high
            if high > LARGEST:
                return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if size_behind(layers, middle) >= 1 else (middle, high)
        return high
