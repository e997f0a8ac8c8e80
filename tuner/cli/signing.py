"""Detached signatures of files: Ed25519 (RFC 8032) over the BLAKE2b hash of a file, without network access.

A signature identifies the author of an artifact or an export; the hash inside of the file only detects accidental damage.
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
"""Suffix that is appended to the name of the signed file."""
FORMAT = "relax-tune-signature-1"
_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SignedFile:
    """A verified file, with its identity at that time, so that a later read can check that it is the same file.

    Attributes:
        identity: device, inode, size and times of the file.
    """

    path: Path
    identity: tuple[int, ...]

    def check_same(self) -> None:
        """Raise UserError if the file has changed since it was verified."""
        if _identity(os.stat(self.path)) != self.identity:
            raise UserError(f"{self.path}: the file has changed since it was verified; run the command again")


def make_keys(path: Path) -> Path:
    """Create a private key that only its owner can read, and its public key next to it; return the path of the public key.

    Raises:
        UserError: a file exists or cannot be written.
    """
    primitives, serialization = _cryptography()
    key = primitives.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    public_path = path.with_name(path.name + ".pub")
    try:
        for place, mode, content in ((path, 0o600, private), (public_path, 0o644, public)):
            with os.fdopen(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
                file.write(content)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {system_reason(error)}; choose another path") from None
    return public_path


def sign(path: Path, key: Path) -> Path:
    """Write the signature of a file next to it; return its path.

    Raises:
        UserError: a file cannot be read or written, the key is not a private Ed25519 key, or other users can read it.
    """
    primitives, serialization = _cryptography()
    try:
        loaded = serialization.load_pem_private_key(_read(key, "a private key"), None)
    except (ValueError, TypeError):
        loaded = None
    if not isinstance(loaded, primitives.Ed25519PrivateKey):
        raise UserError(
            f"{key}: expected a private Ed25519 key in PEM without a passphrase, got another file; `relax-tune sign --make-key` creates one"
        )
    if os.stat(key).st_mode & 0o077:
        raise UserError(f"{key}: expected a key that only its owner can read, but others can; chmod 600 {key.name}")
    public = loaded.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    digest, _ = _digest(path)
    document = {"format": FORMAT, "key": _text(public), "signature": _text(loaded.sign(_message(digest)))}
    signature_path = path.with_name(path.name + SUFFIX)
    try:
        write_whole(signature_path, memoryview(json.dumps(document).encode() + b"\n"))
    except OSError as error:
        raise UserError(f"{signature_path} cannot be written: {system_reason(error)}; choose another path") from None
    return signature_path


def verify(path: Path, public: Path) -> SignedFile:
    """Check the signature of a file.

    Args:
        public: public key in PEM.

    Raises:
        UserError: the file has no signature, was signed by another key, or was altered.
    """
    primitives, serialization = _cryptography()
    try:
        key = serialization.load_pem_public_key(_read(public, "a public key"))
    except ValueError:
        key = None
    if not isinstance(key, primitives.Ed25519PublicKey):
        raise UserError(f"{public}: expected a public Ed25519 key in PEM, got none; give the .pub file of the signer")
    signature_path = path.with_name(path.name + SUFFIX)
    if not signature_path.exists():
        raise UserError(
            f"{path}: its signature {signature_path.name} does not exist; ask for it, or sign the file with `relax-tune sign`"
        )
    signature, signer = _parts(signature_path)
    if signer != key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw):
        raise UserError(f"{path}: expected a signature by the key in {public}, got one by another key")
    digest, signed = _digest(path)
    try:
        key.verify(signature, _message(digest))
    except importlib.import_module("cryptography.exceptions").InvalidSignature:
        raise UserError(f"{path}: the file was altered after it was signed; get it again") from None
    return signed


def _parts(path: Path) -> tuple[bytes, bytes]:
    """Return the signature and the public key of a signature file."""
    try:
        document = json.loads(_read(path, "a signature"))
    except (ValueError, RecursionError):
        document = None
    if not has_shape(document, {"format": str, "key": str, "signature": str}) or document["format"] != FORMAT:
        raise UserError(f"{path}: expected a signature of `relax-tune sign`, got another file")
    try:
        return base64.b64decode(document["signature"], validate=True), base64.b64decode(document["key"], validate=True)
    except ValueError:  # not base64, or not ASCII
        raise UserError(f"{path}: expected a signature and a key in base64") from None


def _digest(path: Path) -> tuple[bytes, SignedFile]:
    try:
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            digest = hashlib.file_digest(file, "blake2b").digest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}; check the path") from None
    return digest, SignedFile(path, _identity(before))


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _message(digest: bytes) -> bytes:
    return FORMAT.encode() + b"\0" + digest


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _read(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read as {what}: {system_reason(error)}; check the path") from None


def _cryptography() -> tuple[Any, Any]:
    """Import Ed25519 and the serialization of keys. Without the package, raises UserError that names the extra."""
    try:
        primitives = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
        return primitives, importlib.import_module("cryptography.hazmat.primitives.serialization")
    except ImportError as error:
        raise UserError(f"signatures need the package cryptography: {error}; pip install 'relax-tune[sign]'") from None
