"""The permitted values of an input that a model uses as an index, where they are numbers (`ir/deduce/index_ranges`).

Compiled loops read the nearest element for an index outside (`ir/op/indexing/indices`), which is safe but wrong for the user. So a
built model states the range of each such input, and the runtime refuses a call with other values.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.ir.core.expr import as_int
from relax_tune.ir.deduce.index_ranges import IndexRange
from relax_tune.runtime.program.program import Fill


def range_fill(found: Sequence[IndexRange]) -> Fill:
    """Return the fill of a program's input: in all ranges, or plain if there is none, a size is a symbol or a range is of a column."""
    limits = [(as_int(r.low), as_int(r.high)) for r in found]
    known = [(low, high) for low, high in limits if low is not None and high is not None]
    if not found or len(known) < len(found) or any(r.every > 1 for r in found):
        return Fill()
    return Fill("integers", max(low for low, _ in known), min(high for _, high in known))
