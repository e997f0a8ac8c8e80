"""Jobs for several devices: each measures on the device that was named, and nothing is made for a device that is not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.tuner_models import PAPER_DEVICE, QUICK, feed_forward
from tests.tuner.cli.cli_model import make_bert
from tests.wrong_input.storage_cases import refused

from relax_tune.database.store import MemoryStore
from relax_tune.errors import UserError
from relax_tune.tuner.job.job import device_infos, job_for

OTHER = replace(PAPER_DEVICE, kind="opencl")


def test_each_job_keeps_the_name_of_the_device() -> None:
    job = job_for(feed_forward(), {"c": PAPER_DEVICE, "opencl:Simulator": OTHER}, MemoryStore(), QUICK)
    assert {kind: own.settings.target for kind, own in job.parts.items()} == {"c": "c", "opencl": "opencl:Simulator"}


def test_devices_of_one_kind_are_refused() -> None:
    with pytest.raises(UserError, match=r"--target.*opencl twice"):
        job_for(feed_forward(), {"opencl": OTHER, "opencl:Simulator": OTHER}, MemoryStore(), QUICK)
    with pytest.raises(UserError, match=r"--target.*c twice"):
        device_infos("c, c")


def test_missing_device_makes_no_database(tmp_path: Path) -> None:
    make_bert(tmp_path / "bert")
    said = refused(tmp_path, "tune", "bert", "--target", "c,metal", "--db", "new.db", "--out", "bert.rta")
    assert "got 'metal'" in said and not (tmp_path / "new.db").exists()
