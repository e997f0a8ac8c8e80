"""A browser's device, as its records describe it: what a model is built for without the browser."""

from __future__ import annotations

from relax_tune.database.store import Store
from relax_tune.errors import UserError
from relax_tune.runtime.device.base import DeviceInfo

PAGE = "webgpu:browser"
_TUNE = "`relax-tune tune MODEL --target webgpu --browser HOST:PORT` makes them"


def page_device(spec: str, store: Store) -> DeviceInfo | None:
    """Return the device of `webgpu:browser`, or of `webgpu:browser:PART` by a part of its name; None for any other spec.

    Raises: UserError where the store has records of no such device, or of several."""
    kind, colon, part = spec.partition(f"{PAGE}:")
    if spec != PAGE and (kind or not colon or not part):
        return None
    pages = [t for t in store.targets() if t.kind == "webgpu" and ("platform", "browser") in t.fingerprint]
    found = [t for t in pages if part.lower() in t.name.lower()]
    if len(found) != 1:
        names = "; ".join(sorted(t.name for t in found or pages)) or "none"
        hint = f"choose with {PAGE}:PART, a part of its name" if pages else _TUNE
        raise UserError(f"{spec}: wanted records of one browser's device in {store.where}, found {names}; {hint}")
    (target,) = found
    return DeviceInfo(target.kind, target.name, target.fingerprint, target.limits, libraries=())
