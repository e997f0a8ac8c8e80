"""The results of a call, in order and by name.

Tests: `tests/runtime/test_arrays.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from relax_tune.errors import UserError


class Results(list[Any]):
    """The results of a call: a list that also takes their names, as `results["logits"]`. `dict(results)` has them by name.

    Attributes:
        names: The name of each result.
    """

    names: Sequence[str] = ()

    def __getitem__(self, key: Any) -> Any:
        """Return a result by number or by name, or several by a slice. Raises UserError for a name that no result has."""
        if isinstance(key, str):
            if key not in self.names:
                raise UserError(f"results: expected a name among {', '.join(self.names)}, got {key!r:.80}")
            key = self.names.index(key)
        return super().__getitem__(key)

    def keys(self) -> Sequence[str]:
        """Return the names, as of a dict."""
        return self.names

    def __contains__(self, key: object) -> bool:
        """Return whether a result has a name; other values are compared with the results."""
        return key in self.names if isinstance(key, str) else super().__contains__(key)

    def __repr__(self) -> str:
        return f"Results({', '.join(f'{name}={value!r}' for name, value in zip(self.names, self))})"


def named(values: Iterable[Any], names: Sequence[str]) -> Results:
    """Return results with their names."""
    # A constructor of Python's would take twice as long as the list's, in every call.
    results = Results(values)
    results.names = names
    return results
