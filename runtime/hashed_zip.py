"""Files that are a zip of a manifest and members, with a hash over the whole: artifacts and packs.

The zip is uncompressed, so any tool can look inside. Its first member, `manifest.json`, names the format, its schema and the hash
of every other member. The zip's comment is the BLAKE2 hash of every byte before it: a truncated or altered file is refused before
anything in it is read. There are no timestamps: the same members give the same bytes.

Tests: `tests/runtime/test_artifact.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from relax_tune.errors import ArtifactError, system_reason
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.atomic_write import reason, write_whole

MANIFEST = "manifest.json"
# The earliest date that ZIP can hold, for all entries: equal contents give equal files.
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
_COMMENT = b"blake2b:"
_COMMENT_BYTES = len(_COMMENT) + 64
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
    """

    name: str
    noun: str
    suffix: str
    schema: int
    members: tuple[tuple[str, ...], ...]
    make: str
    participle: str


@dataclass(frozen=True, slots=True)
class Content:
    """The verified content of a file.

    Attributes:
        manifest: Its manifest, with the object `extra`.
        members: Bytes by name, without the manifest.
        digest: The hash in the file's comment.
    """

    manifest: Mapping[str, Any]
    members: Mapping[str, bytes]
    digest: str


def digest_of(data: bytes | memoryview) -> str:
    """Return the BLAKE2 hash of some bytes, in hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def tool_version() -> str:
    """Return the installed version of relax-tune; `0` when run from a folder that is not installed."""
    try:
        return version("relax-tune")
    except PackageNotFoundError:
        return "0"


def write_file(
    form: FileFormat,
    path: str | os.PathLike[str],
    members: Mapping[str, bytes],
    extra: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> Path:
    """Write a file; readers see the old one or the whole new one. Same arguments, same bytes.

    Args:
        form: Kind of the file.
        path: The file.
        members: Bytes by name, in the order of the format.
        extra: JSON values of the manifest's field `extra`.
        fields: Further fields of the manifest.

    Raises:
        ArtifactError: A value is no JSON value, or the file cannot be written.
    """
    where = f"{form.noun} {path}"
    manifest = {
        "format": form.name,
        "schema": form.schema,
        "tool_version": tool_version(),
        "members": {name: {"bytes": len(data), "blake2b": digest_of(data)} for name, data in members.items()},
        "extra": dict(extra),
        **fields,
    }
    try:
        first = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{where}: expected JSON values in manifest_extra, got others: {error}") from None
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {MANIFEST: first, **members}.items():
            entry = zipfile.ZipInfo(name, _ZIP_DATE)
            # always as on Unix (3): the defaults depend on the writing system
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, data)
        archive.comment = _COMMENT + b"0" * 64
    view = stream.getbuffer()
    view[-64:] = digest_of(view[:-_COMMENT_BYTES]).encode()
    target = Path(path)
    if os.path.exists(target) and not os.path.isfile(target):
        what = "a folder" if os.path.isdir(target) else "a device or pipe"
        raise ArtifactError(
            f"{form.noun} {target}: expected the name of a file to write, got {what}; give another, such as model{form.suffix}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, view)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{form.noun} {target}: expected to write it, got: {reason(error)}") from None
    return target


def read_file(form: FileFormat, path: str | os.PathLike[str]) -> Content:
    """Read a file and verify every hash. Executes nothing.

    Raises: ArtifactError for a file that is missing, truncated, altered, of another format or a newer schema.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArtifactError(
            f"{form.noun}: expected the path of a file, got a {type(path).__name__}; give text or a Path"
        )
    where = f"{form.noun} {path}"
    data = _read_bytes(form, where, Path(path))
    comment = data[-_COMMENT_BYTES:]
    if not comment.startswith(_COMMENT):
        raise ArtifactError(
            f"{where}: expected a content hash at its end, got none: truncated, or another kind of zip; copy or {form.make} it again"
        )
    digest = digest_of(memoryview(data)[:-_COMMENT_BYTES])
    if digest.encode() != comment[len(_COMMENT) :]:
        raise ArtifactError(
            f"{where}: expected content that fits its hash, got other: altered or damaged; {form.make} or copy it again"
        )
    permitted = [[MANIFEST, *names] for names in form.members]
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
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
            members = {entry.filename: archive.read(entry.filename) for entry in entries}
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
        raise ArtifactError(f"{where}: expected a zip file, got a damaged one: {error}; {form.make} it again") from None
    manifest = _read_manifest(form, where, members.pop(MANIFEST), members)
    return Content(manifest, members, digest)


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


def _read_bytes(form: FileFormat, where: str, path: Path) -> bytes:
    """Return the bytes of a file. A large file of another kind is not read to its end."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ArtifactError(f"{where}: expected a readable file, got a folder; give the {form.suffix} file in it")
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{where}: expected a readable file, got a device or pipe; copy it into a file first")
        with path.open("rb") as file:
            start = file.read(4)
            if start != b"PK\x03\x04":
                kind = "an empty file" if not start else "another kind of file"
                raise ArtifactError(
                    f"{where}: expected a {form.name} ({form.suffix}), got {kind}; give one that was {form.participle}"
                )
            return start + file.read()
    except FileNotFoundError:
        raise ArtifactError(
            f"{where}: expected a readable file, got no such file; check its name, or {form.make} it"
        ) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{where}: expected a readable file, got: {system_reason(error)}; check its name and permissions"
        ) from None
    except MemoryError:
        raise ArtifactError(
            f"{where}: expected it in memory, got too little; free some, or use a larger machine"
        ) from None


def _read_manifest(form: FileFormat, where: str, data: bytes, members: Mapping[str, bytes]) -> dict[str, Any]:
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
    for name, facts in listed.items():
        if facts != {"bytes": len(members[name]), "blake2b": digest_of(members[name])}:
            raise ArtifactError(f"{where}: {name}: expected the hash in the manifest, got another: altered; {again}")
    return manifest


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
