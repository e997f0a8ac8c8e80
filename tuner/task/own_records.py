"""Records that this user's own rules were found to make: remembered in the cache, so that builds need not look again.

Making all sketches of a function to find one record's takes longer than replaying it.
"""

from __future__ import annotations

from contextlib import suppress

from relax_tune.errors import BuildError
from relax_tune.runtime.device.binaries import cache_folder, hashed, is_own_file, private_folder

FOLDER = "own-records"


def known_as_own(*parts: str) -> bool:
    """Return True if `keep_as_own` was called with these texts, by this user and with this cache."""
    with suppress(OSError, BuildError), private_folder(cache_folder() / FOLDER) as folder:
        return is_own_file(folder / hashed(parts))
    return False


def keep_as_own(*parts: str) -> None:
    """Remember that our rules make the record that these texts describe. A cache that cannot be written is left as it is."""
    with suppress(OSError, BuildError), private_folder(cache_folder() / FOLDER) as folder:
        (folder / hashed(parts)).touch(mode=0o600)
