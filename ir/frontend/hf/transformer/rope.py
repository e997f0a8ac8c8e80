"""Rotary embeddings (Su et al. 2021), and how their frequencies are scaled for long texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.shared.bounds import LARGEST

LOCAL = "sliding_attention"  # type of layers with a window, whose rotation may differ
Frequencies = NDArray[np.float32]
Scaling = Callable[[Frequencies, float, int], Frequencies]
"""Rule from frequencies, theta and the number of rotated dims to scaled frequencies."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Position interpolation (Chen et al. 2023): all frequencies are divided by a factor."""

    factor: float

    def __call__(self, frequencies: Frequencies, theta: float, dims: int) -> Frequencies:
        return np.asarray(frequencies / np.float32(self.factor), np.float32)


@dataclass(frozen=True, slots=True)
class Llama3:
    """Scaling of Llama 3.1: low frequencies are divided by the factor, high ones unchanged, others interpolated."""

    factor: float
    low: float
    high: float
    original: int

    def __call__(self, frequencies: Frequencies, theta: float, dims: int) -> Frequencies:
        turns = self.original * frequencies / np.float32(2 * math.pi)
        # `turns` is how often a frequency turns within the original length: fast ones saw whole turns in training and
        # stay.
        unchanged = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return np.asarray(frequencies * (unchanged + (1 - unchanged) / self.factor), np.float32)


@dataclass(frozen=True, slots=True)
class Yarn:
    """NTK-by-parts interpolation (Peng et al. 2023, section 3.2).

    Attributes:
        fast, slow: turns over the original positions above which a frequency is unchanged, and below which it is divided
        truncate: the limits between these are rounded to whole dims
    """

    factor: float
    original: int
    fast: float
    slow: float
    truncate: bool

    def __call__(self, frequencies: Frequencies, theta: float, dims: int) -> Frequencies:
        def dim(turns: float) -> float:
            # Solves original * theta ** (-2 k / dims) = 2 pi * turns for k, the pair that turns so often.
            return dims * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dim(self.fast), dim(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        # Against a division by 0 below.
        high += 0.001 if low == high else 0
        divided = np.clip((np.arange(dims // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        return np.asarray(frequencies / np.float32(self.factor) * divided + frequencies * (1 - divided), np.float32)


@dataclass(frozen=True, slots=True)
class LongRope:
    """Factors per frequency (Ding et al. 2024): one list up to the original positions, another for longer texts."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    is_long: bool = False

    def __call__(self, frequencies: Frequencies, theta: float, dims: int) -> Frequencies:
        return np.asarray(frequencies / np.asarray(self.long if self.is_long else self.short, np.float32), np.float32)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: angles `position * theta ** (-2k / dims)`, with scaled frequencies.

    Attributes:
        dims: number of leading dims of a head that rotate
        interleaved: neighbouring dims are pairs, instead of `k` and `k + dims / 2`
        attention: factor of sines and cosines
    """

    theta: float
    dims: int
    scaling: Scaling | None = None
    interleaved: bool = False
    attention: float = 1.0

    def frequencies(self) -> Frequencies:
        """Return the frequency of each pair, in radians per position: (dims / 2,)."""
        powers = np.arange(0, self.dims, 2, dtype=np.float32) / np.float32(self.dims)
        frequencies = np.asarray(1 / np.float32(self.theta) ** powers, np.float32)
        return frequencies if self.scaling is None else self.scaling(frequencies, self.theta, self.dims)

    def table(self, of: Callable[[Frequencies], Frequencies], positions: int, size: int) -> Frequencies:
        """Return a table (positions, size / 2) of cosines or sines of heads in the order of `order`."""
        table = of(np.arange(positions, dtype=np.float32)[:, None] * self.frequencies())
        if self.attention != 1:
            table = np.asarray(table * np.float32(self.attention), np.float32)
        # Dims that do not rotate have angle 0: cosine 1, sine 0. One operator then serves all families.
        still = of(np.zeros((positions, (size - self.dims) // 2), np.float32))
        return np.concatenate((table, still), axis=1) if still.size else table

    def reorders(self, size: int) -> bool:
        """Return whether heads of `size` are stored in another order than `order`."""
        return self.interleaved or self.dims != size

    def order(self, size: int) -> list[int]:
        """Return the dims of a head so that `k` and `k + size / 2` are pairs, rotating pairs first.

        Queries and keys are reordered alike, which leaves their products unchanged."""
        half, pairs = self.dims // 2, range(self.dims // 2)
        first = [2 * k if self.interleaved else k for k in pairs]
        second = [2 * k + 1 if self.interleaved else k + half for k in pairs]
        rest = list(range(self.dims, size))
        return first + rest[: len(rest) // 2] + second + rest[len(rest) // 2 :]

    @property
    def limit(self) -> int | None:
        """Largest text length that the frequencies hold for; longer texts have other frequencies. None: unlimited."""
        return self.scaling.original if isinstance(self.scaling, LongRope) else None


@dataclass(frozen=True, slots=True)
class GridRope(Rope):
    """Rotation by the place of a patch in an image (Siméoni et al. 2025, DINOv3): half of the pairs by its row, half by its column.

    Attributes:
        leading: vectors before the patches, which do not rotate
        grid: number of patches along height and width
    """

    leading: int = 0
    grid: tuple[int, int] = (1, 1)

    def table(self, of: Callable[[Frequencies], Frequencies], positions: int, size: int) -> Frequencies:
        """Return a table (positions, size / 2) of cosines or sines."""
        powers = np.arange(0, 1, 4 / size, dtype=np.float32)
        # Centres of patches, from -1 to 1 along each side.
        sides = (2 * (np.arange(n, dtype=np.float32) + np.float32(0.5)) / np.float32(n) - 1 for n in self.grid)
        places = np.stack(np.meshgrid(*sides, indexing="ij"), -1).reshape(-1, 2, 1)
        angles = np.float32(2 * math.pi) * places / np.float32(self.theta) ** powers
        still = np.zeros((self.leading, size // 2), np.float32)
        return of(np.concatenate([still, angles.reshape(-1, size // 2).astype(np.float32)]))


@dataclass(frozen=True, slots=True)
class RopeStyle:
    """How a family's rotation is read.

    Attributes:
        theta: value of a missing `theta_key`
        part: fraction of a head that rotates, where the field `part_key` is missing; without `part_key` all of it
        dims_key: field with the number of rotated dims instead
        renamed: other names of types of scaling
        kinds: types of scaling that are read; empty: all
    """

    theta: float = 10000.0
    theta_key: str = "rope_theta"
    interleaved: bool = False
    part: float = 1.0
    part_key: str | None = None
    dims_key: str | None = None
    renamed: Mapping[str, str] | None = None
    kinds: tuple[str, ...] = ()


def read_rope(c: ConfigFields, style: RopeStyle, size: int, kind: str | None = None) -> Rope:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling` of older files.

    Args:
        size: of a head
        kind: type of a layer, if types differ

    Raises:
        ParseError: for parameters that are wrong or unknown.
    """
    key = "rope_parameters" if c.data.get("rope_parameters") is not None else "rope_scaling"
    given = c.data.get(key)
    if given is not None and not isinstance(given, dict):
        raise c.wrong(key, "an object or null")
    by_kind = any(isinstance(v, dict) for v in (given or {}).values())
    if kind is not None and given is not None and isinstance(given.get(kind), dict):
        given = given[kind]
    elif kind == LOCAL and not by_kind:
        given = None  # older files scale only layers that attend to all positions
    elif by_kind:
        raise c.wrong(key, "one set of parameters for all layers" if kind is None else f"an object with {kind}")
    fields: dict[str, Any] = {"rope_theta": c.data.get(style.theta_key, style.theta), **(given or {})}
    fields.setdefault("rope_type", fields.get("type", "default"))
    fields["rope_type"] = (style.renamed or {}).get(str(fields["rope_type"]), fields["rope_type"])
    r = ConfigFields(fields, f"{c.where}: {key}" if given else c.where)
    theta = r.number("rope_theta", None, 1, LARGEST, "a number of at least 1")
    dims = _dims(c, r, style, size)
    name = r.chosen("rope_type", "default", style.kinds or SCALINGS)
    scaling, attention = SCALINGS[name](c, r, theta, dims)
    return Rope(theta, dims, scaling, style.interleaved, attention)


def _dims(c: ConfigFields, r: ConfigFields, style: RopeStyle, size: int) -> int:
    """Return how many dims of a head of `size` rotate."""
    c.multiple("head_dim", size, "2", 2)
    if style.dims_key is not None:
        dims = c.whole(style.dims_key)
    elif style.part_key is None:
        for fields in (c, r):
            fields.only("partial_rotary_factor", 1.0, None)
        dims = size
    else:
        inner = r.data.get("partial_rotary_factor") is not None
        fields, key = (r, "partial_rotary_factor") if inner else (c, style.part_key)
        part = fields.number(key, c.data.get(style.part_key, style.part), 0, 1.0000001, "a number in (0, 1]")
        dims = int(size * part)
    if not 2 <= dims <= size or dims % 2:
        key = style.dims_key or style.part_key or "head_dim"
        raise c.wrong(key, f"an even number of rotated dims up to {size}, not {dims}")
    return dims


def _factor(r: ConfigFields, default: float | None = None) -> float:
    if default is not None and r.data.get("factor") is None:
        return default
    return r.number("factor", None, 1, LARGEST, "a number of at least 1")


def _optional(r: ConfigFields, key: str) -> float | None:
    return None if r.data.get(key) is None else r.number(key, None, 1e-30, LARGEST, "a number above 0")


def _original(c: ConfigFields, r: ConfigFields) -> int:
    """Return the number of positions that the model was first trained with."""
    key = "original_max_position_embeddings"
    inner, outer = r.data.get(key), c.data.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise r.wrong(key, f"the same value as at the top level of config.json, {outer!r:.20}")
    if inner is None and outer is None:
        return c.whole("max_position_embeddings")
    return (c if inner is None else r).whole(key)


Read = tuple[Scaling | None, float]
"""A scaling, and the factor of sines and cosines."""


def _default(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Read:
    return None, 1.0


def _linear(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Read:
    return Linear(_factor(r)), 1.0


def _dynamic(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Read:
    """Read dynamic NTK scaling, which changes nothing up to `max_position_embeddings`, the most that is built."""
    r.only("alpha", None)
    _factor(r)
    return None, 1.0


def _llama3(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Read:
    factor = _factor(r)
    low = r.number("low_freq_factor", None, 0, LARGEST, "a number of at least 0")
    high = r.number("high_freq_factor", None, 0, LARGEST, "a number above low_freq_factor")
    if high <= low:
        raise r.wrong("high_freq_factor", f"a number above low_freq_factor, {low}")
    return Llama3(factor, low, high, r.whole("original_max_position_embeddings")), 1.0


def _yarn(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Read:
    r.only("llama_4_scaling_beta", None, 0)
    original = _original(c, r)
    factor = _factor(r, max(1.0, c.whole("max_position_embeddings") / original))
    attention = _optional(r, "attention_factor")
    if attention is None:
        one, all_dims = _optional(r, "mscale"), _optional(r, "mscale_all_dim")
        grown = 0.1 * math.log(factor)
        # Longer texts flatten the softmax; this factor sharpens it again (Peng et al. 2023).
        attention = (one * grown + 1) / (all_dims * grown + 1) if one and all_dims else grown + 1
    fast, slow = (_optional(r, k) or d for k, d in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if theta <= 1:
        raise r.wrong("rope_theta", "a number above 1")
    return Yarn(factor, original, fast, slow, r.truth("truncate", True)), attention


def _longrope(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Read:
    original = _original(c, r)
    factor = _factor(r, max(1.0, c.whole("max_position_embeddings") / original))
    attention = _optional(r, "attention_factor")
    if attention is None:
        attention = 1.0 if factor == 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    lists = []
    for key in ("short_factor", "long_factor"):
        factors = r.data.get(key)
        if not isinstance(factors, list) or len(factors) != dims // 2:
            raise r.wrong(key, f"a list of {dims // 2} numbers, one for each pair")
        if not all(type(v) in (int, float) and 0 < v < LARGEST for v in factors):
            raise r.wrong(key, "numbers above 0")
        lists.append(tuple(float(v) for v in factors))
    return LongRope(lists[0], lists[1], original), attention


SCALINGS: Mapping[str, Callable[[ConfigFields, ConfigFields, float, int], Read]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "dynamic": _dynamic, "longrope": _longrope,
}  # fmt: skip


def for_lengths(rope: Rope, shortest: int, longest: int) -> Rope:
    """Return the rotation of texts of these lengths. Raises UserError if they need two."""
    limit = rope.limit
    if limit is None or longest <= limit:
        return rope
    if shortest > limit and isinstance(rope.scaling, LongRope):
        return replace(rope, scaling=replace(rope.scaling, is_long=True))
    raise UserError(
        f"bounds of n and m: expected at most {limit} positions in all, or more in every call, got {shortest} to {longest}; longrope "
        f"rotates all positions differently in texts longer than {limit}: lower the upper bounds, or raise the lower ones"
    )
