"""Where reports are printed, and how times are written."""

from __future__ import annotations

import math

from rich.console import Console

PLAIN_WIDTH = 160


def make_console(*, stderr: bool = False) -> Console:
    """A console; where there is no terminal to ask for its width, tables may take 160 columns."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    return console


def say(console: Console, text: str) -> None:
    """Print a sentence as it is: no markup, no folding."""
    console.print(text, markup=False, soft_wrap=True)


def cell(text: str) -> str:
    """Text for a table, where brackets would be markup."""
    return text.replace("[", "\\[")


def seconds_text(secs: float | None) -> str:
    """Three digits with a unit: `12.3 us`; `-` for None and NaN."""
    if secs is None or not math.isfinite(secs):
        return "-"
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if secs >= s), ("us", 1e-6))
    value = secs / size
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def ratio_text(base: float | None, best: float | None) -> str:
    """How many times faster than `base`: `1.52x`; `-` where either is unknown."""
    if base is None or best is None or not (math.isfinite(base) and math.isfinite(best)) or best <= 0:
        return "-"
    return f"{base / best:.2f}x"
