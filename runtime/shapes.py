"""Profiles of served shapes: a compact histogram for each symbol of a model's functions.

Up to `EXACT` distinct values are counted one by one; beyond that counts go to bins whose edges are fixed once and for all, so that
histograms can be merged in any order: single values below `2 * STEPS`, then `STEPS` equal bins for each power of two. A bin is never
wider than a `STEPS`th of its lower edge, and there are fewer than a thousand.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax_tune.errors import ArtifactError, UserError
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.atomic_write import reason, write_whole
from relax_tune.runtime.program.scalars import INT64_MAX
from relax_tune.runtime.validation import parse_json

EXACT = 256
STEPS = 16
FORMAT, SCHEMA = "relax-tune shapes", 1
# Calls are first counted by all their symbols at once, in one dictionary; at this many entries it is added to the histograms.
_PENDING = 1024

Recorder = Callable[[tuple[int, ...]], None]


class ShapeRecorder(Protocol):
    """What counts the calls of a model, from any thread."""

    def of_model(self, key: str) -> None:
        """Note the key of the model that is opened. Raises UserError where another model's calls are counted."""
        ...

    def recorder(self, function: str, symbols: Sequence[str]) -> Recorder:
        """Return a function that counts one call, given the value of each symbol."""
        ...


def bin_of(value: int) -> tuple[int, int]:
    """Return the edges, both inclusive, of the bin that a value >= 0 falls into."""
    shift = max(0, value.bit_length() - STEPS.bit_length())
    lower = value >> shift << shift
    return lower, lower + (1 << shift) - 1


@dataclass(frozen=True, slots=True)
class Histogram:
    """The counts of one symbol's values.

    Attributes:
        bins: (lower edge, upper edge, count), ascending, edges inclusive; single values unless `binned`.
        low: The smallest value.
        high: The largest value.
    """

    bins: tuple[tuple[int, int, int], ...] = ()
    low: int = 0
    high: int = 0
    binned: bool = False

    @property
    def total(self) -> int:
        """The number of counted calls."""
        return sum(count for _, _, count in self.bins)

    @property
    def values(self) -> dict[int, int]:
        """Value -> count, ascending. A bin counts at its middle, the outermost ones at `low` and `high`."""
        counts: dict[int, int] = {}
        for lower, upper, count in self.bins:
            middle = self.low if lower <= self.low else self.high if upper >= self.high else (lower + upper) // 2
            counts[middle] = count
        return counts

    def merged(self, other: Histogram) -> Histogram:
        """Return the histogram of the calls of both. Merging is commutative and associative."""
        if not (self.bins and other.bins):
            return self if self.bins else other
        ends = min(self.low, other.low), max(self.high, other.high)
        binned = self.binned or other.binned
        return _counted([*self.bins, *other.bins], *ends, binned)

    @staticmethod
    def of(counts: Mapping[int, int]) -> Histogram:
        """Return the histogram of values >= 0 with their counts."""
        if not counts:
            return Histogram()
        return _counted([(v, v, c) for v, c in counts.items()], min(counts), max(counts), False)


def _counted(parts: Iterable[tuple[int, int, int]], low: int, high: int, binned: bool) -> Histogram:
    counts: dict[tuple[int, int], int] = {}
    for lower, upper, count in parts:
        edges = bin_of(lower) if binned else (lower, upper)
        counts[edges] = counts.get(edges, 0) + count
    if len(counts) > EXACT and not binned:
        return _counted(((a, b, c) for (a, b), c in counts.items()), low, high, True)
    return Histogram(tuple((a, b, counts[a, b]) for a, b in sorted(counts)), low, high, binned)


class ShapeProfile:
    """Histograms of a model's symbols, by function and symbol. Give one to `Artifact.open` and it counts every call from then on.

    model: key of its model; "" until it is opened with one. Thread-safe.
    """

    def __init__(self, model: str = "") -> None:
        self.model = model
        self._known: dict[str, dict[str, Histogram]] = {}
        self._pending: list[tuple[str, tuple[str, ...], dict[tuple[int, ...], int]]] = []
        self._lock = threading.RLock()

    def of_model(self, key: str) -> None:
        """Set the model of these shapes. Raises UserError when they are already another model's."""
        with self._lock:
            if self.model and key and self.model != key:
                raise UserError(
                    f"shape profile: expected one of the model {key[:12]}, got one of {self.model[:12]}; "
                    "keep a file of shapes for each model"
                )
            self.model = self.model or key

    def recorder(self, function: str, symbols: Sequence[str]) -> Recorder:
        """Return a function that counts one call, given the value of each symbol."""
        counts: dict[tuple[int, ...], int] = {}
        lock = self._lock
        with lock:
            self._pending.append((function, tuple(symbols), counts))

        def record(values: tuple[int, ...]) -> None:
            with lock:
                counts[values] = counts.get(values, 0) + 1
                if len(counts) > _PENDING:
                    self._fold()

        return record

    @property
    def histograms(self) -> Mapping[str, Mapping[str, Histogram]]:
        """Histograms by function, then symbol; the histograms of one function count the same calls."""
        with self._lock:
            self._fold()
            return {f: dict(symbols) for f, symbols in sorted(self._known.items())}

    def add(self, function: str, symbol: str, histogram: Histogram) -> None:
        """Add the counts of another histogram."""
        with self._lock:
            own = self._known.setdefault(function, {})
            own[symbol] = own.get(symbol, Histogram()).merged(histogram)

    def merge(self, other: ShapeProfile) -> None:
        """Add the counts of another profile. Raises UserError when it is another model's."""
        self.of_model(other.model)
        for function, symbols in other.histograms.items():
            for symbol, histogram in symbols.items():
                self.add(function, symbol, histogram)

    def _fold(self) -> None:
        for function, symbols, counts in self._pending:
            for axis, symbol in enumerate(symbols):
                single: dict[int, int] = {}
                for values, count in counts.items():
                    single[values[axis]] = single.get(values[axis], 0) + count
                if single:
                    self.add(function, symbol, Histogram.of(single))
            counts.clear()

    def to_json(self) -> str:
        """Return the text of its file: one JSON document."""
        functions = {
            function: {
                symbol: {"binned": h.binned, "low": h.low, "high": h.high, "counts": [list(b) for b in h.bins]}
                for symbol, h in symbols.items()
            }
            for function, symbols in self.histograms.items()
        }
        document = {"format": FORMAT, "schema": SCHEMA, "model": self.model, "functions": functions}
        return json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n"

    def save(self, path: Path | str) -> None:
        """Write the file atomically. Raises UserError when it cannot be written."""
        target = Path(path)
        try:
            if target.exists() and not target.is_file():
                raise UserError(f"{target}: expected the name of a file to write, got something else; give another")
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, memoryview(self.to_json().encode()))
        except (OSError, ValueError) as error:
            raise UserError(f"{target}: expected to write a shape profile, got: {reason(error)}") from None

    @staticmethod
    def read(path: Path | str) -> ShapeProfile:
        """Return a profile from its file. Raises UserError for a file that is missing, torn or none of ours."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or "no text"
            raise UserError(
                f"{path}: expected a shape profile, got: {problem}; make one with `relax-tune run --record-shapes FILE`"
            ) from None
        try:
            return ShapeProfile.from_json(text)
        except ArtifactError as error:
            raise UserError(f"{path}: {error}; make one with `relax-tune run --record-shapes FILE`") from None

    @staticmethod
    def from_json(text: str) -> ShapeProfile:
        """Return a profile from the text of `to_json`. Raises ArtifactError for anything else."""
        document = parse_json(text, "shape profile")
        if not has_shape(document, {"format": object}) or document["format"] != FORMAT:
            raise ArtifactError(f"shape profile: expected JSON of format {FORMAT!r}, got another kind of text")
        if document.get("schema") != SCHEMA:
            raise ArtifactError(f"shape profile: expected schema {SCHEMA}, got {document.get('schema')!r:.40}")
        if not has_shape(document, {"model": str, "functions": dict}):
            raise ArtifactError("shape profile: expected a model and its functions, got none")
        profile = ShapeProfile(document["model"])
        for function, symbols in document["functions"].items():
            if not has_shape(symbols, {}):
                raise ArtifactError(f"shape profile: {function!r:.80}: expected symbols, got others")
            for symbol, data in symbols.items():
                profile.add(function, symbol, _histogram(data, f"shape profile: {function}.{symbol}"))
            if len({h.total for h in profile._known.get(function, {}).values()}) > 1:
                raise ArtifactError(f"shape profile: {function}: expected as many calls of each symbol, got others")
        return profile


def _histogram(data: Any, where: str) -> Histogram:
    """Return a histogram read from a file, every number checked."""
    if not has_shape(data, dict.fromkeys(("binned", "low", "high", "counts"), object)) or len(data) != 4:
        raise ArtifactError(f"{where}: expected binned, low, high and counts, got others")
    binned, low, high, counts = data["binned"], data["low"], data["high"], data["counts"]
    if not has_shape((binned, counts), (bool, list)) or not counts:
        raise ArtifactError(f"{where}: expected a list of counts, got {counts!r:.40}")
    for row in counts:
        if not (has_shape(row, (int, int, int)) and all(type(x) is int and 0 <= x <= INT64_MAX for x in row)):
            raise ArtifactError(f"{where}: expected [lower edge, upper edge, count], got {row!r:.60}")
        if (row[0], row[1]) != (bin_of(row[0]) if binned else (row[0], row[0])) or row[2] < 1:
            raise ArtifactError(f"{where}: expected one of the fixed bins with a count, got {row!r:.60}")
    bins = tuple((a, b, c) for a, b, c in counts)
    ordered = all(before[1] < after[0] for before, after in zip(bins, bins[1:]))
    if not ordered or not (binned or len(bins) <= EXACT):
        raise ArtifactError(f"{where}: expected ascending bins, at most {EXACT} of single values, got others")
    inside = type(low) is int and type(high) is int and low <= high
    if not (inside and bins[0][0] <= low <= bins[0][1] and bins[-1][0] <= high <= bins[-1][1]):
        raise ArtifactError(
            f"{where}: expected low and high within the first and last bin, got {low!r:.30}, {high!r:.30}"
        )
    return Histogram(bins, low, high, binned)
