"""Files whose weights are mapped: where they lie, what verifies them, and what earlier readers see."""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from relax_tune.errors import ArtifactError
from relax_tune.runtime import hashed_zip
from relax_tune.runtime.hashed_zip import BLOCK_BYTES, PAGE, FileFormat, read_file, write_file

FORM = FileFormat("test", "file", ".tst", 1, (("small", "large", "last"),), "make", "made", "large")
LARGE = bytes(range(256)) * (BLOCK_BYTES // 256) + b"more than a block"
MEMBERS = {"small": b"[1]", "large": LARGE, "last": b"the end"}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write_file(FORM, tmp_path / "a.tst", MEMBERS, {}, {})


def test_mapped_member_starts_at_a_page_and_is_a_view_of_the_file(written: Path) -> None:
    content = read_file(FORM, written)
    assert content.mapped == LARGE and dict(content.members) == {"small": b"[1]", "last": b"the end"}
    assert isinstance(content.mapped.obj, mmap.mmap) and content.mapped.readonly
    assert written.read_bytes().index(LARGE) % PAGE == 0


def test_pieces_give_the_same_bytes_as_one(written: Path, tmp_path: Path) -> None:
    pieces = {**MEMBERS, "large": [memoryview(LARGE)[: 3 << 20], b"", memoryview(LARGE)[3 << 20 :]]}
    assert write_file(FORM, tmp_path / "b.tst", pieces, {}, {}).read_bytes() == written.read_bytes()


def test_earlier_readers_see_a_zip_with_the_hash_of_the_whole(written: Path) -> None:
    data = written.read_bytes()
    assert data[-72:] == b"blake2b:" + hashlib.blake2b(data[:-72], digest_size=32).hexdigest().encode()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None and archive.namelist() == ["manifest.json", *MEMBERS]
        manifest = json.loads(archive.read("manifest.json"))
        for name, member in MEMBERS.items():
            digest = hashlib.blake2b(member, digest_size=32).hexdigest()
            assert archive.read(name) == member and manifest["members"][name] == {
                "bytes": len(member),
                "blake2b": digest,
            }
    assert len(manifest["blocks"]) == 2
    assert hashed_zip.digest_at_end(written) == data[-64:].decode() == read_file(FORM, written).digest


def test_altered_byte_outside_and_inside_of_blocks_is_refused(written: Path) -> None:
    data = written.read_bytes()
    start = data.index(LARGE)
    for place in (
        40,
        start - 1,
        start,
        start + BLOCK_BYTES,
        start + len(LARGE) - 1,
        start + len(LARGE),
        len(data) - 73,
        len(data) - 100,
    ):
        changed = bytearray(data)
        changed[place] ^= 4
        written.write_bytes(changed)
        with pytest.raises(ArtifactError, match=r"a\.tst"):
            read_file(FORM, written)


@pytest.mark.parametrize("start", [0, 1 << 60])
def test_forged_range_of_blocks_is_refused(start: int, written: Path) -> None:
    """Every hash fits, but the range is not the member's: bytes of other members, or none of the file."""
    data = bytearray(written.read_bytes())
    at = len(data) - 72 - hashed_zip._OUTSIDE_BYTES
    data[at + 8 : at + 40] = b"%016x%016x" % (start, start + len(LARGE))
    outside = bytes(data[:start]) + bytes(data[start + len(LARGE) : at + 40])
    data[at + 40 : at + 104] = hashlib.blake2b(outside, digest_size=32).hexdigest().encode()
    written.write_bytes(data)
    with pytest.raises(ArtifactError, match="altered or damaged"):
        read_file(FORM, written)


def test_format_without_mapped_member_verifies_the_hash_of_the_whole(written: Path) -> None:
    """As packs, whose hash people compare."""
    plain = replace(FORM, mapped="")
    assert read_file(plain, written).members["large"] == LARGE
    data = bytearray(written.read_bytes())
    data[-1] = ord("0") if data[-1] != ord("0") else ord("1")
    written.write_bytes(data)
    with pytest.raises(ArtifactError, match="altered or damaged"):
        read_file(plain, written)


def test_replaced_file_leaves_mapped_content(written: Path) -> None:
    content = read_file(FORM, written)
    write_file(FORM, written, {**MEMBERS, "large": b"other"}, {}, {})
    assert content.mapped == LARGE and read_file(FORM, written).mapped == b"other"
