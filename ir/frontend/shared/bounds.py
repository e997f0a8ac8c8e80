"""Declared bounds of a model's symbols, of every model format.

Tests: `tests/wrong_input/test_models.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from relax_tune.errors import UserError

LARGEST = 2**31 - 1


def checked_bounds(bounds: Mapping[str, tuple[int, int]] | None) -> dict[str, tuple[int, int]]:
    """Return inclusive (lower, upper) by symbol name, as plain ints. The frontend checks that the model has the
    symbols.

    Raises:
        UserError: The bounds are not integers with 0 <= lower <= upper and 1 <= upper <= LARGEST.
    """
    if bounds is None:
        return {}
    if not isinstance(bounds, Mapping):
        raise UserError(
            f"bounds: expected a mapping from symbols to (lower, upper), got a {type(bounds).__name__}; "
            "such as {'n': (1, 512)}"
        )
    checked: dict[str, tuple[int, int]] = {}
    for name, span in bounds.items():
        if not isinstance(name, str) or not name:
            raise UserError(f"bounds: expected the name of a symbol, got {name!r:.80}; such as {{'n': (1, 512)}}")
        try:
            # `index` takes integers of NumPy, and refuses floats.
            low, high = (operator.index(end) for end in span)
        except (TypeError, ValueError):
            raise UserError(
                f"bound of {name:.80}: expected two whole numbers (lower, upper), got {span!r:.80}; such as (1, 8)"
            ) from None
        if not 0 <= low <= high or not 1 <= high <= LARGEST:
            raise UserError(
                f"bound of {name:.80}: expected 0 <= lower <= upper and 1 <= upper <= {LARGEST}, got {low!r:.80} and "
                f"{high!r:.80}; correct the bound"
            )
        checked[name] = (low, high)
    return checked
