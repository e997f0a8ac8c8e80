"""A device, and stores of every kind as the tests of the database make them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.database.conftest import postgres_server, postgres_url, sql_url, store
from tests.support.tuner_models import opened

from relax_tune.runtime.device.base import Device

__all__ = ["device", "postgres_server", "postgres_url", "sql_url", "store"]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """The processor, through generated C; skips without a compiler."""
    with opened("c") as found:
        yield found
