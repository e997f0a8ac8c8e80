"""What an artifact may be written over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.tuner_models import attention, feed_forward, paper_job, row_scale

from relax_tune.errors import UserError
from relax_tune.tuner.cli.destination import check_destination
from relax_tune.tuner.job.lowered_model import model_key


def test_models_are_told_apart_by_program_and_weights_but_not_by_bounds() -> None:
    keys = {model_key(m) for m in (feed_forward(), feed_forward(width=25), attention(), row_scale())}
    assert len(keys) == 4
    assert model_key(feed_forward(upper=128)) == model_key(feed_forward(upper=64))
    changed = feed_forward()
    changed.constants["b1"][0] += 1  # a tuned-further model of the same form is another model
    assert model_key(changed) not in keys


def test_the_same_model_is_written_again_and_another_is_not(tmp_path: Path) -> None:
    path = tmp_path / "m.rta"
    job = paper_job(row_scale)
    job.artifact(job.build()).save(path)
    check_destination(path, model_key(row_scale()), overwrite=False)
    with pytest.raises(UserError, match=r"m\.rta is there already .*another model; .*--overwrite"):
        check_destination(path, model_key(attention()), overwrite=False)
    check_destination(path, model_key(attention()), overwrite=True)


@pytest.mark.parametrize("content", [b"", b"precious notes", b"PK\x03\x04 cut short"])
def test_check_destination_keeps_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.onnx is there .*no whole artifact .*--overwrite"):
        check_destination(path, "k", overwrite=False)
    assert path.read_bytes() == content
    check_destination(path, "k", overwrite=True)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"name of a file, got a folder; .*model\.rta"):
        check_destination(tmp_path, "k", overwrite=True)
    check_destination(tmp_path / "not" / "yet" / "m.rta", "k", overwrite=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"a file to write, .*Not a directory"):
        check_destination(tmp_path / "file" / "m.rta", "k", overwrite=False)
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(0o500)
        with pytest.raises(UserError, match="expected a folder that can be written"):
            check_destination(tmp_path / "locked" / "m.rta", "k", overwrite=False)
