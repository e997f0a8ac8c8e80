"""The check of a recorded function: its text is what its key says."""

from __future__ import annotations

import re

from relax_tune.database.records import Workload
from relax_tune.errors import DatabaseError, RelaxTuneError
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.text.parser import RECORD_CHARACTERS, parse_prim_func

_HASH = re.compile(r"[0-9a-f]{32}")


def verify_text(workload: Workload) -> None:
    """Check the text of a workload against its key. A key that is no hash is no task's, so its text is asked for by nobody.

    Raises:
        DatabaseError: the text is another function's, or cannot be read.
    """
    if not _HASH.fullmatch(workload.key):
        return
    where = f"workload {workload.key[:12]} ({workload.hint})"
    if len(workload.text) > RECORD_CHARACTERS:
        raise DatabaseError(f"{where}: wanted a text of at most {RECORD_CHARACTERS} characters, found more")
    try:
        found = workload_key(parse_prim_func(workload.text))
    except RelaxTuneError as error:
        raise DatabaseError(
            f"{where}: wanted the text of a function, found {str(error).splitlines()[0]:.200}"
        ) from None
    if found != workload.key:
        raise DatabaseError(
            f"{where}: wanted the text that its key hashes, found that of {found[:12]}; the record was altered"
        )
