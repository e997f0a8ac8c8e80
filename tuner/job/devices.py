"""The devices of a job: opened to measure, or described from a table or from records when they are not available."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from relax_tune.database.store import Store
from relax_tune.errors import UserError
from relax_tune.ir.codegen.generate import CodeTarget, Language
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.c_objects import check_families
from relax_tune.runtime.device.registry import ALIASES, concrete_name, open_device
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.browser.runner import BrowserRunner
from relax_tune.tuner.measure.cluster.address import tls_files
from relax_tune.tuner.measure.cluster.runner import DaskRunner
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.processors import described_device
from relax_tune.tuner.settings import Settings

_LOG = logging.getLogger("relax_tune")
PAGE = "webgpu:browser"
_TUNE = "`relax-tune tune MODEL --target webgpu --browser HOST:PORT` makes them"


def target_names(target: str) -> list[str]:
    """Return the devices that a target lists.

    Raises:
        UserError: A device is listed twice.
    """
    names = [name.strip() for name in target.split(",")]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--target expects devices of distinct kinds, got {name} twice; leave one out")
    return names


def compiled_kinds(cpu: Sequence[str], target: str) -> tuple[str, ...]:
    """Return the distinct kinds of processors that a build for `target` compiles kernels for.

    Raises:
        UserError: A kind is unknown, or the target has no kernels in C.
    """
    kinds = check_families(cpu)
    if kinds and not any(name.partition(":")[0] == "c" for name in target_names(target)):
        raise UserError(f"cpu: expected the target c, got {target}; leave the kinds of processors out")
    return kinds


def with_concrete_target(settings: Settings, notice: Callable[[str], None] = _LOG.info) -> Settings:
    """Return settings whose target names devices of this machine in place of `auto`, `cpu` and `gpu`.

    A page in a browser measures `webgpu`.

    Args:
        notice: Receives a sentence that names the device of an alias.

    Raises:
        UserError: There is no such device here, or workers measure, whose devices have other names.
    """
    names = target_names(settings.target)
    if not set(names) & set(ALIASES):
        return settings
    if settings.browser is not None and settings.target == "auto":
        return replace(settings, target="webgpu")
    check_named(settings.target, settings.scheduler is not None, "a device of the workers of --scheduler")
    chosen = replace(settings, target=",".join(map(concrete_name, names)))
    notice(f"target {chosen.target}, chosen for {settings.target}; --target names another")
    return chosen


def check_submitted(settings: Settings) -> None:
    """Refuse a job whose target is chosen by the devices of this machine. Raises UserError."""
    check_named(settings.target, True, "a class of device that a service takes jobs for")


def check_named(target: str, is_remote: bool, what: str) -> None:
    """Refuse names that stand for a device of this machine where another machine has the device.

    Raises:
        UserError: The target has such a name; the message says that it names `what`.
    """
    if is_remote and set(target_names(target)) & set(ALIASES):
        raise UserError(
            f"--target {target}: expected the name of {what}, such as c or cuda, since another machine has it"
        )


def open_runner(settings: Settings, notice: Callable[[str], None] = lambda _: None) -> Runner:
    """Open a device process on this machine, the workers of a cluster, or a page in a browser, as the settings say.

    Args:
        notice: Receives a sentence when a worker is left out, or while something is waited for.

    Raises:
        MeasureError: It cannot be opened.
        UserError: Settings that exclude each other, or some but not all of the certificate files.
    """
    if settings.browser is not None:
        if settings.scheduler is not None or settings.target != "webgpu":
            raise UserError(
                f"--browser expects --target webgpu and no --scheduler, got {settings.target!r:.80}"
                f"{' and a scheduler' if settings.scheduler else ''}"
            )
        files = {"certificate": settings.certificate, "key": settings.key}
        return BrowserRunner(settings.browser, **files, wait_secs=settings.wait_secs, notice=notice)
    if settings.scheduler is not None:
        tls = tls_files(settings.ca, settings.certificate, settings.key)
        return DaskRunner(settings.scheduler, settings.target, tls=tls, open_secs=settings.wait_secs, notice=notice)
    return LocalRunner(settings.target, wait_secs=settings.wait_secs, notice=notice)


def code_target(info: DeviceInfo) -> CodeTarget:
    """Return what code generation needs to know of a device."""
    hardware, limits = HardwareInfo.from_limits(info.kind, dict(info.limits)), dict(info.limits)
    return CodeTarget(
        cast(Language, hardware.language),
        hardware.lanes,
        hardware.local_bytes if hardware.has_grid else None,
        limits.get("max_bindings"),
        limits.get("loop_passes"),
    )


def device_info(spec: str, store: Store | None = None) -> DeviceInfo:
    """Describe a device. It is opened and closed, unless a table or the store's records describe it (`described`)."""
    info = described(spec, store)
    if info is not None:
        return info
    device = open_device(spec)
    try:
        return device.info
    finally:
        device.close()


def described(spec: str, store: Store | None) -> DeviceInfo | None:
    """Return a processor of `tuner/processors` or a browser's device on record; None for a device that has to be opened."""
    processor = described_device(spec)
    return browser_device(spec, store) if processor is None and store is not None else processor


def browser_device(spec: str, store: Store) -> DeviceInfo | None:
    """Return the recorded device of `webgpu:browser`, or of `webgpu:browser:PART` by a part of its name.

    Returns None for any other spec.

    Raises:
        UserError: The store has records of no such device, or of several.
    """
    prefix, colon, part = spec.partition(f"{PAGE}:")
    if spec != PAGE and (prefix or not colon or not part):
        return None
    recorded = [t for t in store.targets() if t.kind == "webgpu" and ("platform", "browser") in t.fingerprint]
    matching = [t for t in recorded if part.lower() in t.name.lower()]
    if len(matching) != 1:
        names = "; ".join(sorted(t.name for t in matching or recorded)) or "none"
        hint = f"choose with {PAGE}:PART, a part of its name" if recorded else _TUNE
        raise UserError(f"{spec}: expected records of one browser's device in {store.where}, got {names}; {hint}")
    (target,) = matching
    return DeviceInfo(target.kind, target.name, target.fingerprint, target.limits, libraries=())
