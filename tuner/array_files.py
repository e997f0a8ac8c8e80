"""Files of named arrays, as `numpy.savez` writes them.

Tests: `tests/wrong_input/test_commands.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of an .npz file, by name. Raises `UserError` for other files."""
    what_to_do = "make it with numpy.savez(FILE, NAME=array, ...)"
    if os.path.exists(path) and not os.path.isfile(path):  # reading a device or a pipe may never end
        raise UserError(f"{path}: not a regular file; {what_to_do}")
    try:
        with open(path, "rb") as file:
            start = file.read(6)
        if not start.startswith((b"PK", b"\x93NUMPY")):  # numpy would suggest to unpickle the file, which is unsafe
            raise UserError(f"{path}: expected an .npz file of plain arrays, got another kind of file; {what_to_do}")
        data = np.load(path, allow_pickle=False)
        if isinstance(data, np.lib.npyio.NpzFile):
            with data:
                arrays = {name: data[name] for name in data.files}
            # numpy.savez stores bfloat16 as V2, since the format has no name for it.
            return {name: a.view("bfloat16") if a.dtype == np.dtype("V2") else a for name, a in arrays.items()}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {what_to_do}") from None
    except UserError:
        raise
    except Exception as error:  # numpy raises many kinds of exceptions for damaged zips and array headers
        raise UserError(
            f"{path}: expected an .npz file of plain arrays, got: {type(error).__name__}: {error!s:.200}; {what_to_do}"
        ) from None
    raise UserError(f"{path}: expected an .npz file with an array per parameter, got a single array; {what_to_do}")
