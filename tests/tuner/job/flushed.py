"""What filling a device's caches does to the buffer it is done with."""

from __future__ import annotations

import numpy as np

from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.service_kernels import LINE_BYTES, MARK
from relax_tune.tuner.measure.device_process.flush import CacheFlush


def every_line_is_read(device: Device, flush: CacheFlush) -> None:
    """The mark is found in the first word of every line, and nothing else is touched."""
    words = LINE_BYTES // 4
    marked = np.full(flush.buffer.nbytes // 4, MARK, np.int32)
    device.upload(flush.buffer, marked)
    flush.run()
    found = device.download(flush.buffer, marked.dtype, marked.shape).reshape(-1, words)
    assert not found[:, 0].any() and (found[:, 1:] == MARK).all()
