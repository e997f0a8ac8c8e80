"""Files of arrays by name, as `numpy.savez` writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of an .npz file, by name. Raises UserError for any other file."""
    what_to_do = "make it with numpy.savez(FILE, NAME=array, ...)"
    if os.path.exists(path) and not os.path.isfile(path):  # reading a device or a pipe may never end
        raise UserError(f"{path}: wanted an .npz file, found something else; {what_to_do}")
    try:
        with open(path, "rb") as file:
            start = file.read(6)
        if not start.startswith(
            (b"PK", b"\x93NUMPY")
        ):  # numpy would take it for a pickle and say how to load that unsafely
            raise UserError(f"{path}: wanted an .npz file of plain arrays, found another kind of file; {what_to_do}")
        data = np.load(path, allow_pickle=False)
        if isinstance(data, np.lib.npyio.NpzFile):
            with data:
                arrays = {name: data[name] for name in data.files}
            # what numpy.savez makes of bfloat16, for which the format has no name
            return {name: a.view("bfloat16") if a.dtype == np.dtype("V2") else a for name, a in arrays.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: wanted an .npz file, found no such file; {what_to_do}") from None
    except UserError:
        raise
    except Exception as error:  # what a damaged zip or array header makes numpy raise is not enumerable
        raise UserError(
            f"{path}: wanted an .npz file of plain arrays, found: {type(error).__name__}: {error!s:.200}; {what_to_do}"
        ) from None
    raise UserError(f"{path}: wanted an .npz file with an array per parameter, found a single array; {what_to_do}")
