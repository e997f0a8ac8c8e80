"""Files by their content: models and artifacts in a folder or a bucket that machines share (through fsspec).

A file's key is the SHA-256 of its bytes, its place `KEY[:2]/KEY`. Storing a file again changes nothing, and what is read is
compared with its key. A model is a file that lists the names and keys of its files.
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
from relax_tune.tuner.service.model_files import is_inside, model_files
from relax_tune.tuner.service.work_order import check_key

_CHUNK = 1 << 20
_MANIFEST_BYTES = 16 << 20


class FilesAway(TryAgainLater):
    """The folder or bucket of files cannot be reached, or refuses for now."""


class ContentStore:
    """A folder or bucket of files by content.

    url: a path, or a URL that fsspec knows, such as s3://BUCKET/FOLDER (with the package s3fs)

    Raises UserError for a URL of an unknown kind, FilesAway for a place that cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        fsspec = _fsspec()
        try:
            self._fs, self._root = fsspec.core.url_to_fs(os.path.expanduser(url))
        except (ImportError, ValueError) as error:
            raise UserError(
                f"--files wants a folder or a URL such as s3://BUCKET/FOLDER, found {url!r:.200}: {error}"
            ) from None
        self._local = "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))

    def put_file(self, path: Path) -> str:
        """Store a file; return its key."""
        key = _hash(path)
        place = self._place(key)
        with self._reached(f"store {path.name}"):
            if self._fs.exists(place) and int(self._fs.info(place)["size"]) == path.stat().st_size:
                return key
            self._fs.makedirs(posixpath.dirname(place), exist_ok=True)
            if self._local:  # appears whole or not at all
                part = f"{place}.{os.urandom(8).hex()}.part"
                try:
                    self._fs.put_file(str(path), part)
                    os.replace(part, place)
                finally:
                    Path(part).unlink(missing_ok=True)
            else:
                self._fs.put_file(str(path), place)
        return key

    def fetch_file(self, key: str, into: Path) -> Path:
        """Copy a file to the path `into`. Raises UserError when it is missing or is not what its key says."""
        place = self._place(check_key(key))
        digest = hashlib.sha256()
        with self._reached(f"read {key[:12]}"):
            if not self._fs.exists(place):
                raise UserError(
                    f"wanted the file {key[:12]}... in {self.url}, found none; give the --files that it was submitted with"
                )
            into.parent.mkdir(parents=True, exist_ok=True)
            with self._fs.open(place, "rb") as source, into.open("wb") as target:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
        if digest.hexdigest() != key:
            raise UserError(
                f"wanted the content of {place} to have the hash of its name, found another: it was altered or cut; remove "
                "it, and submit the model again"
            )
        return into

    def put_model(self, path: Path, work: Path) -> str:
        """Store a model with the files that it consists of; return its key. work: a folder for the list"""
        base, files = model_files(path)
        listed = [[name, self.put_file(base / name)] for name in files]
        manifest = work / "model.json"
        manifest.write_text(json.dumps({"opens": "" if path.is_dir() else path.name, "files": listed}))
        return self.put_file(manifest)

    def fetch_model(self, key: str, folder: Path) -> Path:
        """Copy a model into a folder; return the path to load. Raises UserError for a list of files that is none of ours."""
        manifest = self.fetch_file(key, folder / "model.json")
        try:
            document: Any = json.loads(manifest.read_bytes()[:_MANIFEST_BYTES])
        except (ValueError, RecursionError):
            document = None
        manifest.unlink()
        files = document["files"] if has_shape(document, {"opens": str, "files": list}) else None
        if not files or not all(has_shape(f, (str, str)) and is_inside(f[0]) for f in files):
            raise UserError(f"wanted a model in the file {key[:12]}... of {self.url}, found something else")
        base = folder / "model"
        for name, content in files:
            self.fetch_file(content, base / name)
        opens = document["opens"]
        if opens and opens not in {name for name, _ in files}:
            raise UserError(
                f"wanted a model in the file {key[:12]}... of {self.url}, found that it lacks {opens!r:.80}"
            )
        return base / opens if opens else base

    def _place(self, key: str) -> str:
        return posixpath.join(self._root, key[:2], key)

    @contextlib.contextmanager
    def _reached(self, doing: str) -> Iterator[None]:
        """Turn the errors of all kinds of file systems into one."""
        try:
            yield
        except RelaxTuneError:
            raise
        except Exception as error:  # each file system raises kinds of its own
            raise FilesAway(
                f"{self.url}: could not {doing}: {type(error).__name__}: {error!s:.300}; check that this machine reaches the "
                "place and may write it"
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
            "wanted fsspec for files of jobs, found it not installed; pip install 'relax-tune[jobs]'"
        ) from None
    return fsspec
