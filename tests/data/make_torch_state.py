"""Record a program of torch that writes to its buffers, and what torch computes: `python -m tests.data.make_torch_state` (needs torch).

Three calls of a fresh module, with its buffers after each.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax_tune.ir.frontend.torch.export import plain_program
from relax_tune.ir.frontend.torch.program import to_json

HERE = Path(__file__).parent


class Smoothed(torch.nn.Module):  # type: ignore[misc]
    """Batch normalisation in training, a counter, and a moving average that an input is also written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.ones(2, 4))
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        self.last.copy_(self.last * 0.5 + y[:2])
        self.count.add_(1)
        x.mul_(2)
        return y + self.count + self.last.sum()


def main() -> None:
    torch.manual_seed(3)
    rows = torch.export.Dim("rows", min=2, max=16)
    program = plain_program(
        torch.export.export(Smoothed(), (torch.randn(5, 4),), dynamic_shapes={"x": {0: rows}}, strict=False)
    )
    eager, arrays = Smoothed(), {f"weight.{k}": a for k, a in program.weights.items()}
    for call, n in enumerate((5, 2, 16)):
        x = torch.randn(n, 4)
        arrays[f"x.{call}"] = x.numpy().copy()
        arrays[f"y.{call}"] = eager(x).detach().numpy()
        for name, value in eager.named_buffers():
            arrays[f"{name.replace('.', '_')}.{call}"] = value.detach().numpy().copy()
    (HERE / "torch_state.json").write_text(to_json(program))
    np.savez(HERE / "torch_state.npz", **arrays)


if __name__ == "__main__":
    main()
