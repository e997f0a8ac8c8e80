"""Signatures of files beside them: Ed25519 (RFC 8032) over the BLAKE2b hash of a file, made and checked without a network.

A signature says who vouches for an artifact or an export, where the hash inside of one only finds accidents.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_tune.errors import UserError, system_reason
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.atomic_write import write_whole

SUFFIX = ".sig"
"""Ending of the name of a signature, after the whole name of its file."""
FORMAT = "relax-tune-signature-1"
_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SignedFile:
    """A file that was verified: how it was then, so that what is read later can be known for the same file.

    identity: device, inode, size and times of the file
    """

    path: Path
    identity: tuple[int, ...]

    def check_same(self) -> None:
        """Raise UserError for a file that has changed since."""
        if _identity(os.stat(self.path)) != self.identity:
            raise UserError(
                f"{self.path}: wanted the file that was verified, found that it changed since; run it again"
            )


def make_keys(path: Path) -> Path:
    """Make a private key for its owner alone, and its public key beside it. Returns the path of the public key.

    Raises: UserError for a file that exists or cannot be written."""
    primitives, serialization = _cryptography()
    key = primitives.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    beside = path.with_name(path.name + ".pub")
    try:
        for place, mode, content in ((path, 0o600, private), (beside, 0o644, public)):
            with os.fdopen(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
                file.write(content)
    except OSError as error:
        raise UserError(
            f"{error.filename}: wanted to write a new key, found: {system_reason(error)}; choose another place"
        ) from None
    return beside


def sign(path: Path, key: Path) -> Path:
    """Write the signature of a file beside it. Returns its path.

    Raises: UserError for a file that cannot be read or written, and for a key that is none of ours or that others may read."""
    primitives, serialization = _cryptography()
    try:
        loaded = serialization.load_pem_private_key(_read(key, "a private key"), None)
    except (ValueError, TypeError):
        loaded = None
    if not isinstance(loaded, primitives.Ed25519PrivateKey):
        raise UserError(
            f"{key}: wanted a private Ed25519 key in PEM without a passphrase, found none; `relax-tune sign --make-key` makes one"
        )
    if os.stat(key).st_mode & 0o077:
        raise UserError(f"{key}: wanted a key for its owner alone, found that others may read it; chmod 600 {key.name}")
    public = loaded.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    digest, _ = _digest(path)
    document = {"format": FORMAT, "key": _text(public), "signature": _text(loaded.sign(_message(digest)))}
    beside = path.with_name(path.name + SUFFIX)
    try:
        write_whole(beside, memoryview(json.dumps(document).encode() + b"\n"))
    except OSError as error:
        raise UserError(
            f"{beside}: wanted to write a signature, found: {system_reason(error)}; choose another place"
        ) from None
    return beside


def verify(path: Path, public: Path) -> SignedFile:
    """Check that the holder of a key signed a file as it is.

    public: public key in PEM

    Raises: UserError for a file without a signature, of another key, or altered since."""
    primitives, serialization = _cryptography()
    try:
        key = serialization.load_pem_public_key(_read(public, "a public key"))
    except ValueError:
        key = None
    if not isinstance(key, primitives.Ed25519PublicKey):
        raise UserError(f"{public}: wanted a public Ed25519 key in PEM, found none; give the .pub file of the signer")
    beside = path.with_name(path.name + SUFFIX)
    if not beside.exists():
        raise UserError(
            f"{path}: wanted its signature in {beside.name}, found none; ask for it, or `relax-tune sign` it"
        )
    signature, signer = _parts(beside)
    if signer != key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw):
        raise UserError(f"{path}: wanted it signed by the key in {public}, found the signature of another key")
    digest, signed = _digest(path)
    try:
        key.verify(signature, _message(digest))
    except importlib.import_module("cryptography.exceptions").InvalidSignature:
        raise UserError(f"{path}: wanted the file that was signed, found it altered since; get it anew") from None
    return signed


def _parts(path: Path) -> tuple[bytes, bytes]:
    """Return the signature and the public key of a signature's file."""
    try:
        found = json.loads(_read(path, "a signature"))
    except (ValueError, RecursionError):
        found = None
    if not has_shape(found, {"format": str, "key": str, "signature": str}) or found["format"] != FORMAT:
        raise UserError(f"{path}: wanted a signature of `relax-tune sign`, found another file")
    try:
        return base64.b64decode(found["signature"], validate=True), base64.b64decode(found["key"], validate=True)
    except ValueError:  # not base64, or not ASCII
        raise UserError(f"{path}: wanted a signature and a key in base64, found others") from None


def _digest(path: Path) -> tuple[bytes, SignedFile]:
    try:
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            digest = hashlib.file_digest(file, "blake2b").digest()
    except OSError as error:
        raise UserError(f"{path}: wanted a file to read, found: {system_reason(error)}; check the path") from None
    return digest, SignedFile(path, _identity(before))


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _message(digest: bytes) -> bytes:
    return FORMAT.encode() + b"\0" + digest


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _read(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_BYTES)
    except OSError as error:
        raise UserError(f"{path}: wanted {what}, found: {system_reason(error)}; check the path") from None


def _cryptography() -> tuple[Any, Any]:
    """Import Ed25519 and the forms of keys. Raises UserError naming the extra without the package."""
    try:
        primitives = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
        return primitives, importlib.import_module("cryptography.hazmat.primitives.serialization")
    except ImportError as error:
        raise UserError(
            f"wanted the package cryptography for signatures, found: {error}; pip install 'relax-tune[sign]'"
        ) from None
