"""Records of unfused variants: a task cut into several functions, each computed by its own variant."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from relax_tune.database.records import VARIANT_KINDS, VariantRecord
from relax_tune.errors import DatabaseError, ParseError

# Most unfused variants of a task that are measured; each combination of variants for its parts is one.
VARIANTS_IN_PARTS = 4
_START = '{"parts":'


@dataclass(frozen=True, slots=True)
class UnfusedVariant:
    """A cut of a task, and the variant of each part.

    Attributes:
        begins: Names of the blocks that begin the second and later parts.
        variants: One for each part.
    """

    begins: tuple[str, ...]
    variants: tuple[VariantRecord, ...]

    def record(self) -> VariantRecord:
        """Return the unfused variant as one record. Its kind is `library` if any part calls a library."""
        traces = [[v.kind, v.sketch, json.loads(v.trace)] for v in self.variants]
        return VariantRecord(
            "library" if any(v.kind == "library" for v in self.variants) else "tuned",
            " | ".join(v.sketch for v in self.variants),
            json.dumps({"parts": traces, "begins": self.begins}, separators=(",", ":")),
            json.dumps({f"{k}.{n}": x for k, v in enumerate(self.variants) for n, x in v.values.items()}),
        )


def in_parts(record: VariantRecord) -> bool:
    """Return True if a record is of an unfused variant."""
    return record.trace.startswith(_START)


def parts_of(record: VariantRecord) -> UnfusedVariant:
    """Return the parts that a record describes.

    Raises:
        ParseError: The record has another form.
    """
    try:
        data = json.loads(record.trace)
        begins, variants = tuple(data["begins"]), []
        values: list[dict[str, int]] = [{} for _ in data["parts"]]
        for name, value in record.values.items():
            number, _, own = name.partition(".")
            values[int(number)][own] = value
        for (kind, sketch, trace), own_values in zip(data["parts"], values, strict=True):
            variants.append(VariantRecord(kind, sketch, json.dumps(trace), json.dumps(own_values)))
        if len(variants) != len(begins) + 1 or not all(isinstance(b, str) for b in begins):
            raise ValueError(f"{len(variants)} parts of cuts at {begins!r}")
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, DatabaseError) as error:
        raise ParseError(
            f"expected the trace of a variant in parts, begins and [kind, sketch, trace] with a kind of {VARIANT_KINDS} "
            f"for each, got {record.trace:.80}: {error}"
        ) from None
    return UnfusedVariant(begins, tuple(variants))


def routines_of(record: VariantRecord) -> frozenset[str]:
    """Return the library routines that a variant's record names; empty if the record cannot be parsed."""
    try:
        variants = parts_of(record).variants if in_parts(record) else (record,)
    except ParseError:
        return frozenset()
    return frozenset(v.sketch.split("+")[0] for v in variants if v.kind == "library")


def choices_of_parts(
    options: Sequence[Sequence[VariantRecord]], limit: int = VARIANTS_IN_PARTS
) -> tuple[tuple[VariantRecord, ...], ...]:
    """Return up to `limit` combinations of an option for each part, ordered by their number of libraries."""

    def mixed(chosen: tuple[VariantRecord, ...]) -> int:
        free = [v for v, had in zip(chosen, options, strict=True) if len(had) > 1]
        return len({v.sketch.split(".")[0] if v.kind == "library" else "" for v in free})

    return tuple(sorted(itertools.product(*options), key=mixed)[:limit])
