"""The sizes that a model is served: the values of the symbols of its last calls, and the times of calls of equal sizes.

Nothing but sizes is recorded, and only of the last `WINDOW` calls, so the counts follow the traffic.

Tests: `tests/tuner/serve/improve/test_sizes.py`.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_tune.errors import ArtifactError, UserError
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.atomic_write import reason, write_whole
from relax_tune.runtime.program.scalars import INT64_MAX
from relax_tune.runtime.shapes import Histogram, Recorder, ShapeProfile
from relax_tune.runtime.validation import parse_json

WINDOW = 1 << 14
"""Calls of a function that are counted."""
MOST_SIZES, MOST_TIMES = 256, 512
"""Sizes whose times are recorded, and times of each: the last ones."""
SUFFIX = ".shapes.json"

Size = tuple[str, tuple[int, ...]]
"""A function, and the values of its symbols in a call."""
Times = Mapping[Size, Sequence[float]]


class ServedSizes:
    """The sizes of a model's last calls. Thread-safe; a `ShapeRecorder`.

    Attributes:
        model: Key of the model; empty until it is opened.
        calls: Number of calls since the start.
    """

    def __init__(self) -> None:
        self.model, self.calls = "", 0
        self._windows: dict[str, tuple[tuple[str, ...], deque[tuple[int, ...]]]] = {}
        self._last: dict[str, tuple[int, ...]] = {}
        self._times: OrderedDict[Size, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def of_model(self, key: str) -> None:
        """Note the key of the model that is opened; counts of another one are dropped."""
        with self._lock:
            if self.model != key:
                self._windows.clear()
            self.model = key

    def recorder(self, function: str, symbols: Sequence[str]) -> Recorder:
        """Return a function that counts one call, given the value of each symbol."""
        window = self._window(function, tuple(symbols))

        def record(values: tuple[int, ...]) -> None:
            with self._lock:
                window.append(values)
                self._last[function] = values
                self.calls += 1

        return record

    def _window(self, function: str, symbols: tuple[str, ...]) -> deque[tuple[int, ...]]:
        with self._lock:
            known = self._windows.get(function)
            if known is None or known[0] != symbols:
                known = self._windows[function] = symbols, deque(maxlen=WINDOW)
            return known[1]

    def timed(self, function: str, secs: float) -> None:
        """Record the time of the last call of a function, in the thread of the call."""
        with self._lock:
            size = function, self._last.get(function, ())
            times = self._times.setdefault(size, deque(maxlen=MOST_TIMES))
            times.append(secs)
            self._times.move_to_end(size)
            if len(self._times) > MOST_SIZES:
                self._times.popitem(last=False)

    def times(self) -> Times:
        """Return the last times of each size."""
        with self._lock:
            return {size: tuple(times) for size, times in self._times.items()}

    def forget_times(self) -> None:
        """Drop all times, of calls of other programs."""
        with self._lock:
            self._times.clear()

    def counts(self) -> dict[Size, int]:
        """Return how often each size occurs among the last calls."""
        with self._lock:
            windows = {function: Counter(window) for function, (_, window) in self._windows.items()}
        return {(function, values): n for function, counts in windows.items() for values, n in counts.items()}

    def profile(self) -> ShapeProfile:
        """Return the last calls as a profile, which `tune --profile` reads."""
        profile = ShapeProfile(self.model)
        with self._lock:
            windows = {function: (symbols, Counter(window)) for function, (symbols, window) in self._windows.items()}
        for function, (symbols, counts) in windows.items():
            for axis, symbol in enumerate(symbols):
                single = Counter[int]()
                for values, n in counts.items():
                    single[values[axis]] += n
                if single:
                    profile.add(function, symbol, Histogram.of(single))
        return profile

    def to_json(self) -> str:
        """Return the text of its file: the one of the profile, with how often sizes occur together."""
        document = json.loads(self.profile().to_json())
        with self._lock:
            document["calls"] = {
                function: {
                    "symbols": symbols,
                    "counts": [[*values, n] for values, n in sorted(Counter(window).items())],
                }
                for function, (symbols, window) in self._windows.items()
            }
        return json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n"

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises UserError when it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, memoryview(self.to_json().encode()))
        except OSError as error:
            raise UserError(f"{path}: expected to write the served sizes, got: {reason(error)}") from None

    @staticmethod
    def read(path: Path) -> ServedSizes:
        """Return the sizes of a file of `save`; none where there is no file. Raises UserError for another file."""
        sizes = ServedSizes()
        try:
            document = parse_json(path.read_text(encoding="utf-8"), "served sizes")
            sizes._read(document)
        except FileNotFoundError:
            return sizes
        except (OSError, ValueError, ArtifactError) as error:
            raise UserError(
                f"{path}: expected the sizes that a server recorded, got: {error!s:.200}; delete it"
            ) from None
        return sizes

    def _read(self, document: Any) -> None:
        if not has_shape(document, {"model": str, "calls": dict}):
            raise ArtifactError("no counts of calls")
        self.model = document["model"]
        for function, data in document["calls"].items():
            if not has_shape(data, {"symbols": list, "counts": list}) or not all(
                isinstance(row, list) and len(row) == len(data["symbols"]) + 1 for row in data["counts"]
            ):
                raise ArtifactError(f"{function!r:.80}: expected counts of sizes")
            if not all(type(x) is int and 0 <= x <= INT64_MAX for row in data["counts"] for x in row):
                raise ArtifactError(f"{function!r:.80}: expected whole numbers, at least 0")
            window = self._window(function, tuple(map(str, data["symbols"])))
            rows = [tuple(values) for *values, n in data["counts"] for _ in range(min(n, WINDOW))]
            # The order of the calls is not stored: in a random one, later calls replace all sizes alike.
            random.Random(0).shuffle(rows)
            window.extend(rows)


def sizes_file(folder: Path, name: str, version: int) -> Path:
    """Return the file of a served model's sizes."""
    return folder / f"{name}.{version}{SUFFIX}"


def drift(before: Mapping[Size, int], now: Mapping[Size, int]) -> float:
    """Return how much the mix of sizes has changed, from 0 to 1: half the sum of the differences of shares, over powers of two."""
    shares = [_shares(counts) for counts in (before, now)]
    return sum(abs(shares[0][size] - shares[1][size]) for size in {**shares[0], **shares[1]}) / 2


def _shares(counts: Mapping[Size, int]) -> Counter[Any]:
    total, shares = max(sum(counts.values()), 1), Counter[Any]()
    for (function, values), n in counts.items():
        shares[function, tuple(v.bit_length() for v in values)] += n / total  # type: ignore[assignment]
    return shares


def sample_sizes(counts: Mapping[Size, int], most: int) -> list[tuple[Size, float]]:
    """Return at most `most` sizes with their shares of the calls: quantiles of the sizes, in their order.

    Args:
        counts: How often each size occurs.
        most: Number of quantiles.
    """
    total, chosen, passed = sum(counts.values()), Counter[Size](), 0
    for size, n in sorted(counts.items()):
        # quantiles (k + 1/2) / most that fall into the calls of this size
        first, last = (passed * most * 2 + total) // (2 * total), ((passed + n) * most * 2 + total) // (2 * total)
        if last > first:
            chosen[size] = last - first
        passed += n
    return [(size, n / most) for size, n in chosen.items()]
