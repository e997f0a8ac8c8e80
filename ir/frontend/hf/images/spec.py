"""Specification of a model of images, as an entry of a table of families reads it from a configuration.

Tests: `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from relax_tune.ir.frontend.hf.images.layers import ImageEmitter, ImageLayer, ImageValue, size_after
from relax_tune.ir.frontend.shared.bounds import LARGEST

Decoder = Callable[[ImageEmitter, Sequence[ImageValue], int], ImageValue]
"""A head of segmentation: from the results of the stages and the number of labels to the logits."""


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """Layers of a model of images, from the pixels to its results.

    Attributes:
        stages: the stem, then the stages; a backbone gives their results
        prefix: of weight names in files of models with a head
        tail: layers between the last stage and the last hidden state
        pool: mean or maximum per channel; empty: a bare model has no pooled vector
        pooled: layers applied to the pooled vector
        keeps_dims: the pooled vector has a height and width of 1
        before_classes: layers of a head before the pooling
        classifier: name of the layer that gives classes
        decoder: segmentation head
        backbone: the family has a backbone
        maps_eps: epsilon of the norms of a backbone's results; None: no norms
        sides: height and width of a model for one size
        most: largest height and width
        positions: the last hidden state is (b, positions, c)
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
        while size_after(layers, high) < 1:
            low, high = high, 2 * high
            if high > LARGEST:
                return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if size_after(layers, middle) >= 1 else (middle, high)
        return high
