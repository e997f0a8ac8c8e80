"""The decoders that `suite.py` runs, in our process and in torch's."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.harness.e2e_cases import SMALL, Decoder

# A layer of the size of those of large models, and of nothing else; and one that an emulation runs in a moment.
LAYER = Decoder(layers=1, width=4096, heads=32, groups=8, inner=14336, vocabulary=64)
LEAST = Decoder(1, 32, 2, 1, 40, 17)
DECODERS: Mapping[str, Decoder] = {"small": SMALL, "layer": LAYER, "tiny": LEAST}
LENGTHS: Mapping[str, tuple[int, ...]] = {"small": (16, 128, 512), "layer": (16, 128, 512), "tiny": (3, 5)}
