"""Specification of what a transformer reads: tokens, patches of images, sound samples, spectrograms, time series.

Tests: `tests/ir/frontend/hf/families/test_encoders.py`, `tests/ir/frontend/hf/test_images_and_sound.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Table = Callable[[int, int], NDArray[np.float32]]
"""Computes a table of positions from its rows and width."""


@dataclass(frozen=True, slots=True)
class Words:
    """Embeddings of tokens, token types and positions. `Names` says which of these a family has.

    Attributes:
        width: size of a token's embedding; `Names.project` maps it to the hidden size
        rows: rows of the position table
        token_types: number of token types
        padding: id of the padding token, which has no position; other tokens start at row padding + 1 (RoBERTa)
        first: row of the first position, without `padding`
        scale: factor of the token embeddings
        dropped: id of the token that token dropout zeroes; other embeddings are scaled as in training (Rives et al. 2021)
        trigram: each token is joined with its neighbours (Sun et al. 2020, MobileBERT)
        project_first, project_biased: the projection precedes positions and norm; it has a bias
        norm_first: the norm precedes positions
        boxes: rows of the tables of the sides of a token's box on a page (Xu et al. 2020, LayoutLM); 0: tokens have none
        page: an image of the page is read too
        sinusoids: computes the position table if the file has none (Vaswani et al. 2017)
    """

    width: int
    vocabulary: int
    rows: int
    token_types: int = 0
    padding: int | None = None
    first: int = 0
    scale: float = 1.0
    dropped: int | None = None
    trigram: bool = False
    project_first: bool = False
    project_biased: bool = True
    norm_first: bool = False
    boxes: int = 0
    sinusoids: Table | None = None
    page: PageImage | None = None

    @property
    def positions(self) -> int:
        return self.rows - (self.first if self.padding is None else self.padding + 1)


@dataclass(frozen=True, slots=True)
class Patches:
    """Embeddings of the patches of fixed-size images (Dosovitskiy et al. 2021).

    Attributes:
        size, patch: height and width of an image and of a patch
        tokens: names of the vectors before the patches, such as the class token
        registers: name of `registers_count` vectors between tokens and patches, without positions (Darcet et al. 2024)
        flat: position table and tokens are stored without a batch dim
        norm: before the first layer
        stride: between patches; None: patches do not overlap
        spectrogram: the image is a spectrogram (b, times, frequencies), without channels
    """

    channels: int
    size: tuple[int, int]
    patch: tuple[int, int]
    projection: str = "embeddings.patch_embeddings.projection"
    biased: bool = True
    table: str = "embeddings.position_embeddings"
    tokens: tuple[str, ...] = ("embeddings.cls_token",)
    registers: str = ""
    registers_count: int = 0
    flat: bool = False
    norm: str = ""
    stride: tuple[int, int] | None = None
    spectrogram: bool = False

    @property
    def leading(self) -> int:
        """Number of vectors before the patches."""
        return len(self.tokens) + self.registers_count

    @property
    def positions(self) -> int:
        rows, columns = self.grid
        return self.leading + rows * columns

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches along height and width."""
        (h, w), (p, q), (down, right) = self.size, self.patch, self.stride or self.patch
        return max(0, (h - p) // down + 1), max(0, (w - q) // right + 1)


def convolved_length(length: int, kernels: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the length of a sequence after convolutions without padding."""
    for kernel, stride in zip(kernels, strides, strict=True):
        length = (length - kernel) // stride + 1
    return length


def least_length(kernels: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the smallest length that convolutions without padding shorten to one element."""
    n = 1
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        n = (n - 1) * stride + kernel
    return n


@dataclass(frozen=True, slots=True)
class PageImage:
    """What LayoutLMv3 adds to words with boxes (Huang et al. 2022): an image of the page, and biases of attention by place.

    Attributes:
        coordinate, shape: widths of the embeddings of a side, and of a height or width of a box, which are concatenated
        order, space: buckets and furthest distance of places in the sequence, and of sides of boxes; None: no bias
    """

    patches: Patches
    coordinate: int
    shape: int
    order: tuple[int, int] | None
    space: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Adapter:
    """Convolutions behind the last layer that shorten the sequence, each with a gated linear unit (wav2vec 2.0 in fairseq).

    Attributes:
        width: of the results
        projected: a projection and a norm precede them
    """

    layers: int
    kernel: int
    stride: int
    width: int
    projected: bool


@dataclass(frozen=True, slots=True)
class Waves:
    """Embeddings of sound samples (Baevski et al. 2020, wav2vec 2.0).

    Attributes:
        widths, kernels, strides, biased: of the convolutions over samples
        norm: `group` normalises each channel of the first convolution over time, `layer` the channels of every convolution
        projected_norm: a norm precedes the projection
        masked: an input `attention_mask` marks the samples that are no padding
        reach, groups: kernel size and channel groups of the position convolution
        rounds: number of position convolutions, each followed by a norm without weights; None: one, with weight normalisation
        batch_norm: batch normalisation precedes the one position convolution, which has no weight normalisation
        last_norm: after the positions
        adapter: behind the last layer
    """

    widths: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    biased: bool
    norm: Literal["group", "layer"]
    activation: str
    projected_norm: bool
    masked: bool
    reach: int
    groups: int
    rounds: int | None = None
    batch_norm: bool = False
    last_norm: str = ""
    adapter: Adapter | None = None

    @property
    def least(self) -> int:
        """Smallest number of samples that gives a vector."""
        return least_length(self.kernels, self.strides)

    def frames(self, samples: int) -> int:
        """Return the number of vectors of a sound."""
        n = convolved_length(samples, self.kernels, self.strides)
        a = self.adapter
        if a is not None:
            for _ in range(a.layers):
                n = (n + 2 - a.kernel) // a.stride + 1
        return n


@dataclass(frozen=True, slots=True)
class SoundSamples:
    """Embeddings of sound samples by three convolutions (Jeffries et al. 2024, Moonshine), with an input `attention_mask`.

    Attributes:
        path: before the names of the convolutions
    """

    path: str
    kernels: tuple[int, ...] = (127, 7, 3)
    strides: tuple[int, ...] = (64, 3, 2)
    masked: bool = True

    @property
    def least(self) -> int:
        """Smallest number of samples that gives a vector."""
        return least_length(self.kernels, self.strides)

    def frames(self, samples: int) -> int:
        """Return the number of vectors of a sound."""
        return convolved_length(samples, self.kernels, self.strides)


@dataclass(frozen=True, slots=True)
class Spectrogram:
    """Embeddings of log-mel spectrograms of one length by two convolutions (Radford et al. 2023, section 2.2).

    Attributes:
        positions: number of vectors, of two frames each
        convolutions, table: names of the convolutions and of the position table
    """

    mels: int
    positions: int
    convolutions: tuple[str, str]
    table: str


@dataclass(frozen=True, slots=True)
class Subsampling:
    """Embeddings of log-mel spectrograms of any length by strided convolutions (Rekesh et al. 2023, Fast Conformer).

    Attributes:
        rounds: number of convolutions over both dims; all but the first are one for each channel, with a product over channels behind
        columns: number of frequencies that are left
        usual: number of vectors that distances are computed for by default
        scale: factor of the vectors
    """

    mels: int
    channels: int
    kernel: int
    stride: int
    rounds: int
    columns: int
    usual: int
    scale: float

    def frames(self, length: int) -> int:
        """Return the number of vectors of a spectrogram."""
        for _ in range(self.rounds):
            length = (length + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1
        return length


@dataclass(frozen=True, slots=True)
class PatchRows:
    """Embeddings of the flattened patches of images of any proportions, padded to one number (Tschannen et al. 2025, SigLIP 2).

    Attributes:
        values: numbers of a patch
        side: of the square position table `table`, which is resized to the rows and columns of each image
    """

    values: int
    side: int
    projection: str = "embeddings.patch_embedding"
    table: str = "embeddings.position_embedding.weight"

    @property
    def positions(self) -> int:
        return self.side * self.side


@dataclass(frozen=True, slots=True)
class Series:
    """Embeddings of patches of time series, scaled by the statistics of one patch (Das et al. 2024, TimesFM).

    Attributes:
        patch: number of steps of a patch
        steps: largest number of steps
        horizon: number of steps that are forecast
        outputs: number of forecasts of a step: the mean and the quantiles
        frequencies: number of kinds of series
        tolerance: least standard deviation, and by how much a value may differ from `missing`
        missing: value of a step that has none
        timescales: shortest and longest one of the sinusoids of positions; None: there are no positions
    """

    patch: int
    steps: int
    horizon: int
    outputs: int
    frequencies: int
    tolerance: float
    missing: float
    timescales: tuple[float, float] | None

    @property
    def positions(self) -> int:
        """Largest number of patches."""
        return self.steps // self.patch


Sound = Waves | SoundSamples
Embedding = Words | Patches | PatchRows | Sound | Spectrogram | Subsampling | Series
