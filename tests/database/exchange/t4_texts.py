"""T4 texts of measurements, and measurements of T4 texts."""

from __future__ import annotations

import io
from collections.abc import Iterable

from relax_tune.database.exchange.t4 import read_t4, t4_parts
from relax_tune.database.records import Measurement, Target


def t4_text(target: Target, measurements: Iterable[Measurement]) -> str:
    return "".join(t4_parts(target, measurements, "0.1.0"))


def t4_measurements(text: str, workload: str | None, target: str, *, trust_checks: bool = False) -> list[Measurement]:
    return [r.measurement for r in read_t4(lambda: io.StringIO(text), workload, target, trust_checks=trust_checks)]
