"""The names of `pycuda.driver`, of one emulated GPU."""

from contextlib import suppress

from tests.cuda_emulation.cublas import NAMES, StandIn
from tests.cuda_emulation.driver import EmulatedDriver

_DRIVER = EmulatedDriver()
with suppress(OSError):  # where LD_LIBRARY_PATH names no folder of `cublas.library_folder`
    _CUBLAS = StandIn(NAMES[0], _DRIVER)


def init() -> None:
    """Do nothing: the emulation needs no start."""


def __getattr__(name: str) -> object:
    return getattr(_DRIVER, name)
