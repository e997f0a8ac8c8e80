"""Rotary embeddings of decoders (Su et al. 2021), and the ways that their frequencies are scaled for long texts."""

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

LOCAL = "sliding_attention"
"""Type of layers with a window, whose rotation may be another."""
Frequencies = NDArray[np.float32]
Scaling = Callable[[Frequencies, float, int], Frequencies]
"""Rule from frequencies, theta and the number of rotated dims to scaled frequencies."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Position interpolation (Chen et al. 2023): all frequencies divided by a factor."""

    factor: float

    def __call__(self, found: Frequencies, theta: float, dims: int) -> Frequencies:
        return np.asarray(found / np.float32(self.factor), np.float32)


@dataclass(frozen=True, slots=True)
class Llama3:
    """Scaling of Llama 3.1: low frequencies are divided by the factor, high ones kept, those between interpolated."""

    factor: float
    low: float
    high: float
    original: int

    def __call__(self, found: Frequencies, theta: float, dims: int) -> Frequencies:
        turns = self.original * found / np.float32(2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return np.asarray(found * (kept + (1 - kept) / self.factor), np.float32)


@dataclass(frozen=True, slots=True)
class Yarn:
    """NTK-by-parts interpolation (Peng et al. 2023, section 3.2).

    fast, slow: turns over the original positions above which a frequency is kept, and below which it is divided
    truncate: the dims between are whole numbers
    """

    factor: float
    original: int
    fast: float
    slow: float
    truncate: bool

    def __call__(self, found: Frequencies, theta: float, dims: int) -> Frequencies:
        def dim(turns: float) -> float:
            return dims * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dim(self.fast), dim(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        high += 0.001 if low == high else 0
        divided = np.clip((np.arange(dims // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        return np.asarray(found / np.float32(self.factor) * divided + found * (1 - divided), np.float32)


@dataclass(frozen=True, slots=True)
class LongRope:
    """Factors of each frequency (Ding et al. 2024): one list up to the original positions, another for longer texts."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    is_long: bool = False

    def __call__(self, found: Frequencies, theta: float, dims: int) -> Frequencies:
        return np.asarray(found / np.asarray(self.long if self.is_long else self.short, np.float32), np.float32)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: angles `position * theta ** (-2k / dims)`, with scaled frequencies.

    dims: number of dims of a head that rotate, the first ones
    interleaved: pairs are neighbours, not `dims / 2` apart
    attention: factor of sines and cosines
    """

    theta: float
    dims: int
    scaling: Scaling | None = None
    interleaved: bool = False
    attention: float = 1.0

    def frequencies(self) -> Frequencies:
        """Return the frequency of each pair, in radians a position: (dims / 2,)."""
        powers = np.arange(0, self.dims, 2, dtype=np.float32) / np.float32(self.dims)
        found = np.asarray(1 / np.float32(self.theta) ** powers, np.float32)
        return found if self.scaling is None else self.scaling(found, self.theta, self.dims)

    def table(self, of: Callable[[Frequencies], Frequencies], positions: int, size: int) -> Frequencies:
        """Return a table (positions, size / 2) of cosines or sines of heads in the order of `order`."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.frequencies()
        found = of(angles)
        if self.attention != 1:
            found = np.asarray(found * np.float32(self.attention), np.float32)
        still = of(np.zeros((positions, (size - self.dims) // 2), np.float32))
        return np.concatenate((found, still), axis=1) if still.size else found

    def reorders(self, size: int) -> bool:
        """Return True where heads of `size` are stored in another order than `order`."""
        return self.interleaved or self.dims != size

    def order(self, size: int) -> list[int]:
        """Return the dims of a head so that each pair is `size / 2` apart, pairs that rotate first.

        Queries and keys are reordered alike, so their products stay."""
        half, first = self.dims // 2, range(self.dims // 2)
        ones = [2 * k if self.interleaved else k for k in first]
        others = [2 * k + 1 if self.interleaved else k + half for k in first]
        rest = list(range(self.dims, size))
        return ones + rest[: len(rest) // 2] + others + rest[len(rest) // 2 :]

    @property
    def limit(self) -> int | None:
        """The positions up to which the frequencies hold; longer texts have others. None: they hold for all."""
        return self.scaling.original if isinstance(self.scaling, LongRope) else None

    def longer(self) -> Rope:
        """Return the rotation of texts beyond the limit."""
        return (
            replace(self, scaling=replace(self.scaling, is_long=True)) if isinstance(self.scaling, LongRope) else self
        )


@dataclass(frozen=True, slots=True)
class RopeStyle:
    """Rule of a family's rotation.

    theta: value that stands for a missing `theta_key`
    part: fraction of a head that rotates; part_key: field that says so; None: all of it, whatever is written
    dims_key: field with the number of rotated dims instead
    """

    theta: float = 10000.0
    theta_key: str = "rope_theta"
    interleaved: bool = False
    part: float = 1.0
    part_key: str | None = None
    dims_key: str | None = None
    renamed: Mapping[str, str] | None = None
    """Other names of `rope_type`."""


def read_rope(c: ConfigFields, style: RopeStyle, size: int, kind: str | None = None) -> Rope:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling` of older files. size: of a head. kind: of a layer

    Raises ParseError for parameters that are wrong or unknown."""
    key = "rope_parameters" if c.data.get("rope_parameters") is not None else "rope_scaling"
    given = c.data.get(key)
    if given is not None and not isinstance(given, dict):
        raise c.wrong(key, "an object or null")
    if kind is not None and given is not None and isinstance(given.get(kind), dict):
        given = given[kind]
    elif kind == LOCAL and not any(isinstance(v, dict) for v in (given or {}).values()):
        given = None  # scaling of older files is that of the layers that attend to all positions
    elif any(isinstance(v, dict) for v in (given or {}).values()):
        raise c.wrong(key, "one set of parameters for all layers" if kind is None else f"an object with {kind}")
    said: dict[str, Any] = {"rope_theta": c.data.get(style.theta_key, style.theta), **(given or {})}
    said.setdefault("rope_type", said.get("type", "default"))
    said["rope_type"] = (style.renamed or {}).get(str(said["rope_type"]), said["rope_type"])
    r = ConfigFields(said, f"{c.where}: {key}" if given else c.where)
    theta = r.number("rope_theta", None, 1, LARGEST, "a number of at least 1")
    dims = _dims(c, r, style, size)
    name = r.chosen("rope_type", "default", ROPES)
    found = ROPES[name](c, r, theta, dims)
    return replace(found, interleaved=style.interleaved)


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
        part = c.data.get(style.part_key, style.part)
        where, key = (
            (r, "partial_rotary_factor") if r.data.get("partial_rotary_factor") is not None else (c, style.part_key)
        )
        dims = int(size * where.number(key, part, 0, 1.0000001, "a number in (0, 1]"))
    if not 2 <= dims <= size or dims % 2:
        raise c.wrong(
            style.dims_key or style.part_key or "head_dim", f"an even number of rotated dims up to {size}, not {dims}"
        )
    return dims


def _factor(r: ConfigFields, default: float | None = None) -> float:
    if default is not None and r.data.get("factor") is None:
        return default
    return r.number("factor", None, 1, LARGEST, "a number of at least 1")


def _optional(r: ConfigFields, key: str, wanted: str = "a number above 0") -> float | None:
    return None if r.data.get(key) is None else r.number(key, None, 1e-30, LARGEST, wanted)


def _original(c: ConfigFields, r: ConfigFields) -> int:
    """Return the positions that the model was first trained with."""
    key = "original_max_position_embeddings"
    inner, outer = r.data.get(key), c.data.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise r.wrong(key, f"the value that config.json has outside of it, {outer!r:.20}")
    if inner is None and outer is None:
        return c.whole("max_position_embeddings")
    return (c if inner is None else r).whole(key)


def _default(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Rope:
    return Rope(theta, dims)


def _linear(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Rope:
    return Rope(theta, dims, Linear(_factor(r)))


def _dynamic(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Rope:
    """Read dynamic NTK scaling, which changes nothing up to `max_position_embeddings`, the most that is built."""
    r.only("alpha", None)
    _factor(r)
    return Rope(theta, dims)


def _llama3(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Rope:
    factor = _factor(r)
    low = r.number("low_freq_factor", None, 0, LARGEST, "a number of at least 0")
    high = r.number("high_freq_factor", None, 0, LARGEST, "a number above low_freq_factor")
    if high <= low:
        raise r.wrong("high_freq_factor", f"a number above low_freq_factor, {low}")
    return Rope(theta, dims, Llama3(factor, low, high, r.whole("original_max_position_embeddings")))


def _yarn(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Rope:
    r.only("llama_4_scaling_beta", None, 0)
    original = _original(c, r)
    factor = _factor(r, max(1.0, c.whole("max_position_embeddings") / original))
    attention = _optional(r, "attention_factor")
    if attention is None:
        one, all_dims = _optional(r, "mscale"), _optional(r, "mscale_all_dim")
        grown = 0.1 * math.log(factor)
        attention = (one * grown + 1) / (all_dims * grown + 1) if one and all_dims else grown + 1
    fast, slow = (_optional(r, k) or d for k, d in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if theta <= 1:
        raise r.wrong("rope_theta", "a number above 1")
    scaling = Yarn(factor, original, fast, slow, r.truth("truncate", True))
    return Rope(theta, dims, scaling, attention=attention)


def _longrope(c: ConfigFields, r: ConfigFields, theta: float, dims: int) -> Rope:
    original = _original(c, r)
    factor = _factor(r, max(1.0, c.whole("max_position_embeddings") / original))
    attention = _optional(r, "attention_factor")
    if attention is None:
        attention = 1.0 if factor == 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    lists = []
    for key in ("short_factor", "long_factor"):
        found = r.data.get(key)
        if not isinstance(found, list) or len(found) != dims // 2:
            raise r.wrong(key, f"a list of {dims // 2} numbers, one for each pair")
        if not all(type(v) in (int, float) and 0 < v < LARGEST for v in found):
            raise r.wrong(key, "numbers above 0")
        lists.append(tuple(float(v) for v in found))
    return Rope(theta, dims, LongRope(lists[0], lists[1], original), attention=attention)


ROPES: Mapping[str, Callable[[ConfigFields, ConfigFields, float, int], Rope]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "dynamic": _dynamic, "longrope": _longrope,
}  # fmt: skip


def for_lengths(rope: Rope, shortest: int, longest: int) -> Rope:
    """Return the rotation of texts of these lengths. Raises UserError where they need two."""
    limit = rope.limit
    if limit is None or longest <= limit:
        return rope
    if shortest > limit:
        return rope.longer()
    raise UserError(
        f"bounds of n and m: wanted at most {limit} positions in all, or more at every call, found from {shortest} to {longest}, as "
        f"longrope turns all positions otherwise in texts beyond {limit}; lower the upper bounds, or raise the lower ones"
    )
