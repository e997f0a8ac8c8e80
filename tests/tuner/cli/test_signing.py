"""Signatures of files: whose key, of what, and what a run asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relax_tune.errors import UserError
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.cli.signing import make_keys, sign, verify


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A signed file, the private and the public key."""
    key = tmp_path / "release.key"
    public = make_keys(key)
    file = tmp_path / "model.rta"
    file.write_bytes(bytes(100_000))
    sign(file, key)
    return file, key, public


def test_verify_of_signed_file_knows_later_changes(signed: tuple[Path, Path, Path]) -> None:
    file, key, public = signed
    found = verify(file, public)
    found.check_same()
    assert key.stat().st_mode & 0o777 == 0o600
    file.write_bytes(b"1" + bytes(99_999))
    with pytest.raises(UserError, match="changed since"):
        found.check_same()
    with pytest.raises(UserError, match=r"model\.rta: .* altered after it was signed"):
        verify(file, public)


def test_verify_of_other_keys_and_signatures_raises(signed: tuple[Path, Path, Path], tmp_path: Path) -> None:
    file, _, public = signed
    other = make_keys(tmp_path / "other.key")
    with pytest.raises(UserError, match="got one by another key"):
        verify(file, other)
    signature = tmp_path / "model.rta.sig"
    document = json.loads(signature.read_text())
    for change in (
        {"signature": document["signature"][:-8]},
        {"signature": "?"},
        {"key": "\u00e9"},
        {"format": "2"},
        {"key": 3},
    ):
        signature.write_text(json.dumps({**document, **change}))
        with pytest.raises(UserError):
            verify(file, public)
    signature.unlink()
    with pytest.raises(UserError, match=r"model\.rta\.sig does not exist"):
        verify(file, public)
    with pytest.raises(UserError, match="expected a public Ed25519 key"):
        verify(file, file)


def test_sign_with_unusable_key_raises(signed: tuple[Path, Path, Path]) -> None:
    file, key, public = signed
    with pytest.raises(UserError, match="expected a private Ed25519 key"):
        sign(file, public)
    os.chmod(key, 0o640)
    with pytest.raises(UserError, match=r"chmod 600 release\.key"):
        sign(file, key)
    with pytest.raises(UserError, match="cannot be written: File exists"):
        make_keys(key)


def test_run_of_artifact_not_signed_by_key_is_refused(signed: tuple[Path, Path, Path], tmp_path: Path) -> None:
    file, key, public = signed
    call = ["run", str(file), "--inputs", "none.npz", "--require-signed"]

    def said(*line: str) -> str:
        return " ".join(CliRunner().invoke(app, line).output.split())

    other = make_keys(tmp_path / "other.key")
    assert "got one by another key" in said(*call, str(other))
    assert "signature" not in said(*call, str(public)) and "artifact" in said(
        *call, str(public)
    )  # it is none, but signed
    file.write_bytes(b"altered")
    assert "was altered after it was signed" in said(*call, str(public))
    assert "was altered after it was signed" in said("verify", str(file), "--public", str(public))
    assert "wrote" in said("sign", str(file), "--key", str(key))
    assert "signed by the key in" in said("verify", str(file), "--public", str(public))
    assert "takes no FILE" in said("sign", str(file), "--make-key", str(key))
