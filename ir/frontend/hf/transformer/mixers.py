"""Specification of mixtures of experts and of state space layers.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GatedNorm = Literal["after_gate", "before_gate", "none"]
"""Whether the norm of a state space layer follows or precedes its gate."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names below a layer of a mixture's weights; `{}` is the number of an expert.

    Attributes:
        joined: one tensor with gate and up projections of all experts
        stacked: path of such a tensor, `gate_up_proj`, and of `down_proj`, which are read where a file has them
        shared_joined, shared_down: joint gate and up projection, and down projection, of the shared expert in place of those
            below `shared`
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    joined: str | None = None
    stacked: str = "mlp.experts"
    shared: str = "mlp.shared_expert"
    shared_joined: str | None = None
    shared_down: str = ""
    shared_gate: str | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts (Shazeer et al. 2017) in place of a feed-forward block.

    Attributes:
        chosen: number of experts per position
        inner: width of one expert
        normalised: the weights of the chosen experts are scaled to sum to 1
        shared: width of an expert that serves every position
    """

    names: ExpertNames
    count: int
    chosen: int
    inner: int
    normalised: bool
    shared: int | None = None


@dataclass(frozen=True, slots=True)
class Conformer:
    """Layers with a convolution over time between attention and feed-forward block (Gulati et al. 2020).

    Attributes:
        biased: convolutions have a bias
    """

    kernel: int
    biased: bool


@dataclass(frozen=True, slots=True)
class AltUp:
    """Several hidden states per position, one computed by each layer (Baykal et al. 2023), and Gemma 3n's layer inputs.

    Attributes:
        streams: number of hidden states
        active: the one that layers compute
        scaled: the computed state is scaled before the layer's own input multiplies it
        rank: of the low-rank projection next to attention (LAuReL; Menghani et al. 2024)
        rows, width: of the table of every layer's own token embeddings
    """

    streams: int
    active: int
    scaled: bool
    rank: int
    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Layer with a recurrent state (Dao and Gu 2024, Mamba-2).

    Attributes:
        name: of its weights below a layer
        heads, size: of the inputs; every head has a state (size, state)
        groups: of heads that share keys and queries (the paper's B and C)
        kernel, conv_biased: of the convolution over positions
        biased: projections have a bias
        norm: `after_gate`, `before_gate`, or `none`
        factors: of the parts of the input projection: gate, inputs, keys, queries, steps
        input_scale, output_scale: of the layer's input and result
    """

    name: str
    heads: int
    size: int
    state: int
    groups: int
    kernel: int
    biased: bool
    conv_biased: bool
    norm: GatedNorm = "after_gate"
    factors: tuple[float, ...] = (1.0,) * 5
    input_scale: float = 1.0
    output_scale: float = 1.0

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return self.heads * self.size + 2 * self.groups * self.state

    @property
    def states(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what a layer keeps of a text, without the batch."""
        return {"inputs": (self.channels, self.kernel - 1), "state": (self.heads, self.size, self.state)}


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Linear attention with a decaying state that is corrected by the error of what it holds (Yang et al. 2024, Gated DeltaNet).

    Attributes:
        name: of its weights below a layer
        heads, size: of the values; every head has a state (size, state)
        state: size of a key
        groups: of heads that share keys and queries
        kernel: of the convolution over positions
        separate: projections of gates, of updates and of steps are separate tensors, in the order of the heads
    """

    name: str
    heads: int
    size: int
    state: int
    groups: int
    kernel: int
    output_scale: float = 1.0
    separate: bool = False

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return self.heads * self.size + 2 * self.groups * self.state

    @property
    def states(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what a layer keeps of a text, without the batch."""
        return {"inputs": (self.channels, self.kernel - 1), "state": (self.heads, self.size, self.state)}


@dataclass(frozen=True, slots=True)
class TimeMix:
    """Layer of RWKV (Peng et al. 2023, version 4): decaying sums in place of attention, and a gated feed-forward block.

    Attributes:
        hidden, width: of the layer, and of its sums
        rescaled: number of layers after which hidden states are halved, which keeps them in the range of 16-bit floats; 0: never
    """

    hidden: int
    width: int
    rescaled: int
    output_scale: float = 1.0

    def scale(self, number: int) -> float:
        """Return the factor of the results of a layer's blocks."""
        return float(0.5 ** (number // self.rescaled)) if self.rescaled else 1.0

    @property
    def states(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what a layer keeps of a text, without the batch."""
        sums = dict.fromkeys(("values", "weights", "exponents"), (self.width,))
        return {"before_mix": (self.hidden,), "before_feed": (self.hidden,), **sums}
