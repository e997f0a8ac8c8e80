"""What filling a device's caches does to the buffer it is done with."""

from __future__ import annotations

import numpy as np

from relax_tune.runtime.device.base import Device
from relax_tune.tuner.measure.flush import LINE_BYTES, CacheFlush


def every_line_once_more(device: Device, flush: CacheFlush) -> None:
    """Each run writes to every line of the buffer, and nowhere else."""
    words = LINE_BYTES // 4
    zeros = np.zeros(flush.buffer.nbytes // 4, np.int32)
    device.upload(flush.buffer, zeros)
    for _ in range(2):
        flush.run()
    found = device.download(flush.buffer, zeros.dtype, zeros.shape).reshape(-1, words)
    assert (found[:, 0] == 2).all() and not found[:, 1:].any()
