"""`relax-tune sign` and `verify`: signatures of artifacts and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_tune.errors import UserError
from relax_tune.tuner.cli import signing
from relax_tune.tuner.cli.report.console import make_console, say

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="An artifact, an export, or any other file.")]
PublicOption = Annotated[Path, typer.Option("--public", metavar="KEY.pub", help="The public key of whoever signed it.")]


def sign(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="An artifact, an export, or any other file. [default: none]")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="KEY", help="The private key to sign with. [default: none]")
    ] = None,
    make_key: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="Make a private key there, and its public key beside it. [default: none]"),
    ] = None,
) -> None:
    """Sign a file with a key of yours, beside the file as FILE.sig.

    Give the public key, KEY.pub, to those who shall trust your files, by another way than the files. Keep KEY to yourself.
    """
    console = make_console(stderr=True)
    if make_key is not None:
        if file is not None or key is not None:
            raise UserError("--make-key goes alone; sign with the key by another command")
        say(console, f"wrote {make_key} and {signing.make_keys(make_key)}")
        return
    if file is None or key is None:
        raise UserError("wanted FILE and --key KEY to sign with, found one at most; --make-key KEY makes a key")
    say(console, f"wrote {signing.sign(file, key)}")


def verify(file: FileArgument, public: PublicOption) -> None:
    """Check that the holder of a key signed a file as it is."""
    signing.verify(file, public)
    say(make_console(stderr=True), f"{file}: signed by the key in {public}")
