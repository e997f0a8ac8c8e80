"""A content-addressed store of files: models and artifacts in a folder or a bucket that machines share (through fsspec).

The key of a file is the SHA-256 of its bytes, its path is `KEY[:2]/KEY`. Storing a file again changes nothing, and content that is read
is compared with its key. A model is a file that lists the names and keys of its files.

Tests: `tests/tuner/service/test_content.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_tune.errors import MeasureError, RelaxTuneError, TryAgainLater, UserError
from relax_tune.json_shapes import has_shape
from relax_tune.tuner.service.model_files import are_files, model_files
from relax_tune.tuner.service.work_order import check_key

_CHUNK = 1 << 20
_MANIFEST_BYTES = 16 << 20


class FilesAway(TryAgainLater):
    """The folder or bucket of files cannot be reached, or refuses access at the moment."""


class ContentStore:
    """A folder or bucket of files by content.

    Args:
        url: A path, or a URL that fsspec supports, such as s3://BUCKET/FOLDER (with the package s3fs).

    Raises:
        UserError: The kind of URL is unknown.
        FilesAway: The folder or bucket cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        fsspec = _fsspec()
        try:
            self._fs, self._root = fsspec.core.url_to_fs(os.path.expanduser(url))
        except (ImportError, ValueError) as error:
            raise UserError(
                f"--files expects a folder or a URL such as s3://BUCKET/FOLDER, got {url!r:.200}: {error}"
            ) from None
        self._local = "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))

    def put_file(self, path: Path) -> str:
        """Store a file; return its key."""
        key = _hash(path)
        place = self._place(key)
        with self._reached(f"store {path.name}"):
            # An upload that was cut off may have left a shorter file under this key.
            if self._fs.exists(place) and int(self._fs.info(place)["size"]) == path.stat().st_size:
                return key
            self._fs.makedirs(posixpath.dirname(place), exist_ok=True)
            if self._local:  # appears whole or not at all
                part = f"{place}.{os.urandom(8).hex()}.part"
                try:
                    self._fs.put_file(str(path), part)
                    # Renamed into place, so that nobody reads a part of it.
                    os.replace(part, place)
                finally:
                    Path(part).unlink(missing_ok=True)
            else:
                self._fs.put_file(str(path), place)
        return key

    def fetch_file(self, key: str, into: Path) -> Path:
        """Copy a file to the path `into`, which must not exist: no link is followed and no file replaced.

        Raises:
            UserError: The file is missing, or its content does not match its key; `into` is removed then.
        """
        place = self._place(check_key(key))
        digest = hashlib.sha256()
        with self._reached(f"read {key[:12]}"):
            if not self._fs.exists(place):
                raise UserError(
                    f"{self.url} has no file {key[:12]}...; give the --files with which the job was submitted"
                )
            into.parent.mkdir(parents=True, exist_ok=True)
            with self._fs.open(place, "rb") as source, into.open("xb") as target:
                try:
                    while chunk := source.read(_CHUNK):
                        digest.update(chunk)
                        target.write(chunk)
                    if digest.hexdigest() != key:
                        raise UserError(
                            f"the content of {place} does not have the hash in its name: it was altered or truncated; remove it, "
                            "and submit the model again"
                        )
                except BaseException:
                    into.unlink()
                    raise
        return into

    def put_model(self, path: Path, work: Path) -> str:
        """Store a model with all its files; return its key. work: a folder for a temporary file"""
        base, files = model_files(path)
        listed = [[name, self.put_file(base / name)] for name in files]
        manifest = work / "model.json"
        manifest.write_text(json.dumps({"opens": "" if path.is_dir() else path.name, "files": listed}))
        return self.put_file(manifest)

    def fetch_model(self, key: str, folder: Path) -> Path:
        """Copy a model into a folder; return the path to load. Raises `UserError` unless the key is of a list of files."""
        manifest = self.fetch_file(key, folder / "model.json")
        try:
            with manifest.open("rb") as file:
                document: Any = json.loads(file.read(_MANIFEST_BYTES))
        except (ValueError, RecursionError):
            document = None
        manifest.unlink()
        files = document["files"] if has_shape(document, {"opens": str, "files": list}) else None
        if not files or not all(has_shape(f, (str, str)) for f in files) or not are_files([f[0] for f in files]):
            raise UserError(f"the file {key[:12]}... of {self.url} is not a model")
        opens = document["opens"]
        if opens and opens not in {name for name, _ in files}:
            raise UserError(f"the model {key[:12]}... of {self.url} lacks its file {opens!r:.80}")
        base = folder / "model"
        for name, content in files:
            self.fetch_file(content, base / name)
        return base / opens if opens else base

    def _place(self, key: str) -> str:
        return posixpath.join(self._root, key[:2], key)

    @contextlib.contextmanager
    def _reached(self, doing: str) -> Iterator[None]:
        """Turn the errors of all file systems into `FilesAway`."""
        try:
            yield
        except RelaxTuneError:
            raise
        except Exception as error:  # each file system raises different exceptions
            raise FilesAway(
                f"{self.url}: could not {doing}: {type(error).__name__}: {error!s:.300}; check that this machine can reach it "
                "and may write to it"
            ) from error


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsspec() -> Any:
    try:
        import fsspec  # here, since only submitted jobs need it (extra `jobs`)
        import fsspec.core
    except ImportError:
        raise MeasureError(
            "files of jobs need fsspec, which is not installed; pip install 'relax-tune[jobs]'"
        ) from None
    return fsspec
