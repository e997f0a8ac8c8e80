"""Artifacts that several tests serve."""

from __future__ import annotations

import shutil

import pytest
from tests.tuner.serve.served import Files


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    return Files(tmp_path_factory.mktemp("served"))
