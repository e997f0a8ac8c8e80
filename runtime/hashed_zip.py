"""Files that are a zip of a manifest and members, with a hash over the whole: artifacts and packs.

The zip is uncompressed, so any tool can look inside. Its first member, `manifest.json`, names the format, its schema and the hash
of every other member. The zip's comment ends with the BLAKE2 hash of every byte before it: a truncated or altered file is refused before
anything in it is read. There are no timestamps: the same members give the same bytes.

A format may have one member that is mapped, such as weights. Its bytes start at a page. If they are many, the manifest's `blocks` has the
hash of every 8 MiB of them, which are verified on all processors, and the comment begins with their range and a hash of the bytes outside
of it. Readers of version 0.2 verify the last hash, which is of the whole file.

Tests: `tests/runtime/test_artifact.py`, `tests/runtime/test_hashed_zip.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, Union

from relax_tune.errors import ArtifactError, system_reason
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.atomic_write import reason, write_with
from relax_tune.runtime.mapped_file import Range, hash_ranges, map_file

MANIFEST = "manifest.json"
# The earliest date that ZIP can hold, for all entries: equal contents give equal files.
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
_COMMENT = b"blake2b:"
_COMMENT_BYTES = len(_COMMENT) + 64
_OUTSIDE_BYTES = len(b"outside:") + 32 + 64
_PADDING = 0xD935
"""Kind of an entry's extra field that moves its bytes to a page, as Android's zipalign writes it."""
PAGE = 4096
BLOCK_BYTES = 8 << 20
Buffer: TypeAlias = Union[bytes, memoryview]
Pieces: TypeAlias = Sequence[Buffer]
Member: TypeAlias = Union[bytes, Pieces]
"""Bytes in one piece or several."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of file.

    Attributes:
        name: First field of its manifest.
        noun: Word for one such file.
        suffix: End of its name.
        schema: Version that is written and read.
        members: Permitted lists of members, in order, without the manifest.
        make: Verb for writing such a file, such as `build`.
        participle: Its past participle, such as `built`.
        mapped: Member that readers map instead of reading it; it starts at a page, and a large one is hashed in blocks.
    """

    name: str
    noun: str
    suffix: str
    schema: int
    members: tuple[tuple[str, ...], ...]
    make: str
    participle: str
    mapped: str = ""


@dataclass(frozen=True, slots=True)
class Content:
    """The verified content of a file.

    Attributes:
        manifest: Its manifest, with the object `extra`.
        members: Bytes by name, without the manifest and the mapped member.
        digest: The hash in the file's comment. It was not verified for a file with blocks, whose other hashes were.
        mapped: View of the member that is mapped, in the file.
    """

    manifest: Mapping[str, Any]
    members: Mapping[str, bytes]
    digest: str
    mapped: memoryview = field(default_factory=lambda: memoryview(b""))


def digest_of(data: Buffer) -> str:
    """Return the BLAKE2 hash of some bytes, in hexadecimal digits."""
    return _digest_of((data,))


def _digest_of(pieces: Pieces) -> str:
    state = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def _digests_of_blocks(pieces: Pieces) -> list[str]:
    """Return the hash of each `BLOCK_BYTES` of a member."""
    states = [hashlib.blake2b(digest_size=32)]
    left = BLOCK_BYTES
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            if left == 0:
                states.append(hashlib.blake2b(digest_size=32))
                left = BLOCK_BYTES
            part, rest = rest[:left], rest[left:]
            states[-1].update(part)
            left -= len(part)
    return [state.hexdigest() for state in states]


def tool_version() -> str:
    """Return the installed version of relax-tune; `0` when run from a folder that is not installed."""
    try:
        return version("relax-tune")
    except PackageNotFoundError:
        return "0"


def write_file(
    form: FileFormat,
    path: str | os.PathLike[str],
    members: Mapping[str, Member],
    extra: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> Path:
    """Write a file; readers see the old one or the whole new one. Same arguments, same bytes.

    Args:
        form: Kind of the file.
        path: The file.
        members: Bytes by name, in one piece or several, in the order of the format.
        extra: JSON values of the manifest's field `extra`.
        fields: Further fields of the manifest.

    Raises:
        ArtifactError: A value is no JSON value, or the file cannot be written.
    """
    where = f"{form.noun} {path}"
    pieces = {name: (data,) if isinstance(data, bytes) else tuple(data) for name, data in members.items()}
    sizes = {name: sum(len(piece) for piece in parts) for name, parts in pieces.items()}
    in_blocks = sizes.get(form.mapped, 0) > BLOCK_BYTES
    manifest = {
        "format": form.name,
        "schema": form.schema,
        "tool_version": tool_version(),
        "members": {name: {"bytes": sizes[name], "blake2b": _digest_of(parts)} for name, parts in pieces.items()},
        "extra": dict(extra),
        **fields,
        **({"blocks": _digests_of_blocks(pieces[form.mapped])} if in_blocks else {}),
    }
    try:
        first = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{where}: expected JSON values in manifest_extra, got others: {error}") from None
    target = Path(path)
    if os.path.exists(target) and not os.path.isfile(target):
        what = "a folder" if os.path.isdir(target) else "a device or pipe"
        raise ArtifactError(
            f"{form.noun} {target}: expected the name of a file to write, got {what}; give another, such as model{form.suffix}"
        )
    aligned, outside = {form.mapped}, form.mapped if in_blocks else None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_with(target, lambda file: _write_zip(file, {MANIFEST: (first,), **pieces}, aligned, outside))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{form.noun} {target}: expected to write it, got: {reason(error)}") from None
    return target


def _write_zip(file: BinaryIO, members: Mapping[str, Pieces], aligned: Collection[str], in_blocks: str | None) -> None:
    """Write members and the hashes in the comment.

    Args:
        file: An empty file that is open for reading, too.
        members: Pieces by name.
        aligned: Members that start at a multiple of the page size.
        in_blocks: The member whose bytes only the manifest's hashes and the last hash are of; None for none.
    """
    spans: dict[str, Range] = {}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, pieces in members.items():
            entry = zipfile.ZipInfo(name, _ZIP_DATE)
            # always as on Unix (3): the defaults depend on the writing system
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            entry.file_size = sum(len(piece) for piece in pieces)
            # from that size on, `ZipFile.open` adds a field of sizes of 64 bits
            header = 30 + len(name.encode()) + (20 if entry.file_size * 1.05 > zipfile.ZIP64_LIMIT else 0)
            if name in aligned:
                padding = -(file.tell() + header + 4) % PAGE
                entry.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
                header += 4 + padding
            start = file.tell() + header
            spans[name] = start, start + entry.file_size
            with archive.open(entry, "w") as output:
                for piece in pieces:
                    output.write(piece)
        archive.comment = b"0" * (_COMMENT_BYTES if in_blocks is None else _OUTSIDE_BYTES + _COMMENT_BYTES)
    size = file.seek(0, os.SEEK_END)
    file.flush()
    if in_blocks is not None:
        start, end = spans[in_blocks]
        at = size - _COMMENT_BYTES - _OUTSIDE_BYTES
        text = b"outside:%016x%016x" % (start, end)
        file.seek(at)
        file.write(text)
        file.flush()
        (digest,) = hash_ranges(file.fileno(), [((0, start), (end, at + len(text)))])
        file.write(digest.encode())
        file.flush()
    (digest,) = hash_ranges(file.fileno(), [((0, size - _COMMENT_BYTES),)])
    file.seek(size - _COMMENT_BYTES)
    file.write(_COMMENT + digest.encode())


def read_file(form: FileFormat, path: str | os.PathLike[str]) -> Content:
    """Read a file and verify its hashes. Executes nothing. The format's member `mapped` stays in the file.

    Raises: ArtifactError for a file that is missing, truncated, altered, of another format or a newer schema.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArtifactError(
            f"{form.noun}: expected the path of a file, got a {type(path).__name__}; give text or a Path"
        )
    where = f"{form.noun} {path}"
    with _opened(form, where, Path(path)) as file:
        try:
            return _read_content(form, where, file)
        except OSError as error:
            raise _unreadable(where, error) from None
        except MemoryError:
            raise ArtifactError(
                f"{where}: expected it in memory, got too little; free some, or use a larger machine"
            ) from None


def _read_content(form: FileFormat, where: str, file: BinaryIO) -> Content:
    data = map_file(file.fileno())
    comment = bytes(data[-_COMMENT_BYTES:])
    if not comment.startswith(_COMMENT):
        raise ArtifactError(
            f"{where}: expected a content hash at its end, got none: truncated, or another kind of zip; copy or {form.make} it again"
        )
    inside = _inside(data) if form.mapped else None
    ranges, stored = [(0, len(data) - _COMMENT_BYTES)], comment[len(_COMMENT) :]
    if inside is not None:
        end = len(data) - _COMMENT_BYTES - 64
        ranges, stored = [(0, inside[0]), (inside[1], end)], bytes(data[end : end + 64])
    if hash_ranges(file.fileno(), [ranges])[0].encode() != stored:
        raise _altered(form, where)
    spans = _spans(form, where, file, data)
    members = {name: bytes(data[a:b]) for name, (a, b) in spans.items() if name != form.mapped}
    manifest = _read_manifest(form, where, members.pop(MANIFEST), set(spans) - {MANIFEST})
    mapped = spans.get(form.mapped)
    if inside is not None:
        _check_blocks(form, where, file, inside, mapped, manifest.get("blocks"))
    for name, content in members.items():
        # the mapped member has been verified with the file or by blocks
        if manifest["members"][name] != {"bytes": len(content), "blake2b": digest_of(content)}:
            raise ArtifactError(
                f"{where}: {name}: expected the hash in the manifest, got another: altered; {form.make} it again"
            )
    view = memoryview(b"") if mapped is None else data[slice(*mapped)]
    if len(view) <= BLOCK_BYTES:
        view = memoryview(bytes(view))  # a small one is read, so that the file may change afterwards
    return Content(manifest, members, comment[len(_COMMENT) :].decode("latin-1"), view)


def _inside(data: memoryview) -> Range | None:
    """Return the range that the manifest's hashes of blocks cover, in a file that has some."""
    text = bytes(data[-_COMMENT_BYTES - _OUTSIDE_BYTES : -_COMMENT_BYTES])
    if re.fullmatch(rb"outside:[0-9a-f]{96}", text) is None:
        return None
    start, end = int(text[8:24], 16), int(text[24:40], 16)
    return (start, end) if start <= end <= len(data) - _COMMENT_BYTES - _OUTSIDE_BYTES else None


def _check_blocks(
    form: FileFormat, where: str, file: BinaryIO, inside: Range, mapped: Range | None, digests: object
) -> None:
    """Raise ArtifactError unless a member has the hashes of its blocks in the manifest."""
    start, end = inside
    blocks = [((at, min(at + BLOCK_BYTES, end)),) for at in range(start, end, BLOCK_BYTES)]
    if mapped != inside or digests != hash_ranges(file.fileno(), blocks):
        raise _altered(form, where)


def _altered(form: FileFormat, where: str) -> ArtifactError:
    return ArtifactError(
        f"{where}: expected content that fits its hash, got other: altered or damaged; {form.make} or copy it again"
    )


def _spans(form: FileFormat, where: str, file: BinaryIO, data: memoryview) -> dict[str, Range]:
    """Return the bytes of each member. Raises ArtifactError for other members, or ones that are not stored as they are."""
    permitted = [[MANIFEST, *names] for names in form.members]
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if [entry.filename for entry in entries] not in permitted:
                raise ArtifactError(
                    f"{where}: expected the members {tuple(permitted[0])}, got {[e.filename for e in entries]!r:.300}; "
                    f"{form.make} it again"
                )
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
                raise ArtifactError(
                    f"{where}: expected stored members, got compressed or encrypted ones; {form.make} it again"
                )
            spans = {}
            for entry in entries:
                archive.open(entry).close()  # checks the local header
                name, extra = struct.unpack_from("<HH", data, entry.header_offset + 26)
                start = entry.header_offset + 30 + name + extra
                if entry.file_size != entry.compress_size or start + entry.file_size > len(data):
                    raise ValueError(f"{entry.filename} ends beyond the file")
                spans[entry.filename] = start, start + entry.file_size
            return spans
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OSError, EOFError) as error:
        raise ArtifactError(f"{where}: expected a zip file, got a damaged one: {error}; {form.make} it again") from None


def digest_at_end(path: Path) -> str:
    """Return the hash that a verified file carries at its end. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        file.seek(-64, os.SEEK_END)
        return file.read().decode("latin-1")


def read_text(form: FileFormat, where: str, member: str, data: bytes, read: Callable[[str], T]) -> T:
    """Read a member that is text. Raises ArtifactError for another encoding, and as `read` does, naming the member."""
    try:
        return read(data.decode())
    except UnicodeDecodeError:
        raise ArtifactError(
            f"{where}: {member}: expected UTF-8 text, got something else; {form.make} it again"
        ) from None
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {member}: {error}; {form.make} it again, or update relax-tune") from None


@contextmanager
def _opened(form: FileFormat, where: str, path: Path) -> Iterator[BinaryIO]:
    """Open a file that begins as a zip. Raises ArtifactError for another one."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ArtifactError(f"{where}: expected a readable file, got a folder; give the {form.suffix} file in it")
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{where}: expected a readable file, got a device or pipe; copy it into a file first")
        file = path.open("rb")
    except FileNotFoundError:
        raise ArtifactError(
            f"{where}: expected a readable file, got no such file; check its name, or {form.make} it"
        ) from None
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from None
    with file:
        start = file.read(4)
        if start != b"PK\x03\x04":
            kind = "an empty file" if not start else "another kind of file"
            raise ArtifactError(
                f"{where}: expected a {form.name} ({form.suffix}), got {kind}; give one that was {form.participle}"
            )
        yield file


def _unreadable(where: str, error: OSError | ValueError) -> ArtifactError:
    return ArtifactError(
        f"{where}: expected a readable file, got: {system_reason(error)}; check its name and permissions"
    )


def _read_manifest(form: FileFormat, where: str, data: bytes, members: Collection[str]) -> dict[str, Any]:
    again = f"{form.make} it again"
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: {MANIFEST}: expected JSON, got something else: {error}; {again}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != form.name:
        raise ArtifactError(f"{where}: {MANIFEST}: expected format {form.name!r}, got another; {again}")
    schema = manifest.get("schema")
    if type(schema) is not int or schema != form.schema:
        raise ArtifactError(
            f"{where}: expected schema {form.schema} (relax-tune {tool_version()}), got {schema!r:.40} "
            f"(written by {manifest.get('tool_version')!r:.40}); update relax-tune or {form.make} again"
        )
    listed: Any = manifest.get("members")
    extra: Any = manifest.get("extra")
    if not has_shape((listed, extra), (dict, dict)) or set(listed) != set(members):
        raise ArtifactError(
            f"{where}: {MANIFEST}: expected hashes of {_listed(sorted(members))}, and `extra`, got others; {again}"
        )
    return manifest


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
