"""The served sizes on disk, written now and then.

Tests: `tests/tuner/serve/improve/test_sizes.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_tune.errors import UserError
from relax_tune.tuner.serve.improve.sizes import sizes_file
from relax_tune.tuner.serve.models import ModelVersion

SAVE_SECS = 30.0
"""Seconds between writes of the sizes; a server that is killed loses those since the last one."""


class SizesRecorder:
    """Writes the served sizes of models to a folder.

    Args:
        models: The models.
        folder: The folder.
        tell: Receives a sentence when a file cannot be written, once until one can.
    """

    def __init__(self, models: Sequence[ModelVersion], folder: Path, tell: Callable[[str], None]) -> None:
        self._models, self._folder, self._tell = tuple(models), folder, tell
        self._saved: dict[ModelVersion, int] = {}
        self._failed = False

    async def work(self) -> None:
        """Write changed sizes now and then, and a last time when cancelled."""
        try:
            while True:
                await asyncio.sleep(SAVE_SECS)
                await asyncio.to_thread(self.save)
        finally:
            self.save()

    def save(self) -> None:
        """Write the sizes of the models that were called since the last time."""
        for model in self._models:
            calls = model.sizes.calls
            if calls == self._saved.get(model, 0):
                continue
            try:
                model.sizes.save(sizes_file(self._folder, model.name, model.version))
                self._saved[model], self._failed = calls, False
            except UserError as error:
                if not self._failed:
                    self._tell(f"served sizes are not written: {error}")
                self._failed = True
