"""The check that the text of a recorded function is the one that its key hashes.

Tests: `tests/wrong_input/test_databases.py`.
"""

from __future__ import annotations

import re

from relax_tune.database.records import Workload
from relax_tune.errors import DatabaseError, RelaxTuneError
from relax_tune.ir.check.structural import workload_key
from relax_tune.ir.text.parser import RECORD_CHARACTERS, parse_prim_func

_HASH = re.compile(r"[0-9a-f]{32}")


def verify_text(workload: Workload) -> None:
    """Check the text of a workload against its key. A key that is no hash belongs to no task, so its text is never used.

    Raises:
        DatabaseError: The text is another function, or cannot be parsed.
    """
    if not _HASH.fullmatch(workload.key):
        return
    where = f"workload {workload.key[:12]} ({workload.hint})"
    if len(workload.text) > RECORD_CHARACTERS:
        raise DatabaseError(f"{where}: expected a text of at most {RECORD_CHARACTERS} characters, got more")
    try:
        key = workload_key(parse_prim_func(workload.text))
    except RelaxTuneError as error:
        raise DatabaseError(
            f"{where}: expected the text of a function, got {str(error).splitlines()[0]:.200}"
        ) from None
    if key != workload.key:
        raise DatabaseError(
            f"{where}: expected the text that its key hashes, but of {key[:12]}; the record was altered"
        )
