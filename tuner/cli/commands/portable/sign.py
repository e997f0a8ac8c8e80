"""`relax-tune sign` and `verify`: signatures of artifacts and exports.

Tests: `tests/tuner/cli/test_signing.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_tune.errors import UserError
from relax_tune.tuner.cli import signing
from relax_tune.tuner.cli.report.console import make_console, say

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="An artifact, an export, or any other file.")]
PublicOption = Annotated[Path, typer.Option("--public", metavar="KEY.pub", help="The public key of the signer.")]


def sign(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="An artifact, an export, or any other file. [default: none]")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="KEY", help="The private key to sign with. [default: none]")
    ] = None,
    make_key: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY", help="Create a private key at this path and its public key next to it. [default: none]"
        ),
    ] = None,
) -> None:
    """Sign a file with your key; write FILE.sig next to it.

    Give the public key, KEY.pub, to everybody who is to trust your files, but not through the channel of the files. Keep KEY secret.
    """
    console = make_console(stderr=True)
    if make_key is not None:
        if file is not None or key is not None:
            raise UserError("--make-key takes no FILE and no --key; sign in a second command")
        say(console, f"wrote {make_key} and {signing.make_keys(make_key)}")
        return
    if file is None or key is None:
        raise UserError("expected FILE and --key KEY to sign with, got one at most; --make-key KEY makes a key")
    say(console, f"wrote {signing.sign(file, key)}")


def verify(file: FileArgument, public: PublicOption) -> None:
    """Check the signature of a file against a public key."""
    signing.verify(file, public)
    say(make_console(stderr=True), f"{file}: signed by the key in {public}")
