"""The names of `pycuda.driver`, of one emulated GPU."""

from tests.cuda_emulation.driver import EmulatedDriver

_DRIVER = EmulatedDriver()


def init() -> None:
    """Nothing has to start."""


def __getattr__(name: str) -> object:
    return getattr(_DRIVER, name)
