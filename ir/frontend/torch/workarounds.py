"""What to do about the refusals of torch.export programs, as the end of a message.

Tests: `tests/ir/frontend/torch/test_workarounds.py`, which carries out each of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

WEIGHTS = "of weights alone, compute it before the export and keep the result by register_buffer; else "
BY_OPERATOR: Mapping[str, str] = {
    r"aten\.(_?linalg_\w+|cholesky\w*|geqrf|lu_\w+|ormqr|orgqr|triangular_solve)": WEIGHTS,
    r"aten\.segment_reduce": "use torch.scatter_reduce with the number of the segment of each row; or ",
    r"aten\.resize\w*": "use reshape, a slice or torch.nn.functional.pad; or ",
    r"aten\.as_strided_scatter": "use torch.slice_scatter or torch.select_scatter; or ",
    r"aten\.fractional_max_pool\w*": "use torch.nn.functional.adaptive_max_pool2d or adaptive_max_pool3d; or ",
    r"aten\._pdist_forward": "use torch.cdist of the rows with themselves, and the pairs of torch.triu_indices; or ",
    r"aten\.\w+_backward": "export the model under torch.no_grad, without its gradients; or ",
}
"""What comes before `decomposition`, by a pattern of the operator."""
FRACTION = "multiply dims by a quotient of whole numbers, as n * 17 // 10 in place of n * 1.7; torch.nn.functional.interpolate takes it as size"
EFFECT = (
    "use a form that checks nothing, such as torch.linalg.inv_ex(x)[0] in place of torch.linalg.inv(x); of weights alone, compute it "
    "before the export and keep the result by register_buffer"
)


def of_operator(op: str) -> str:
    """Return what to do about an operator that is not supported, or not in this form."""
    if re.fullmatch(r"[a-z]\w*\.\w+\.\w+", op) is None or op.startswith(("sym.", "higher_order.")):
        return ""
    first = next((text for pattern, text in BY_OPERATOR.items() if re.match(rf"{pattern}\.", op)), "")
    return f"workaround: {first}{decomposition(op)}"


def decomposition(op: str) -> str:
    """Return how to write an operator with others: torch then replaces it in the exported program."""
    return (
        "write it with supported operators, as a FUNCTION of the same arguments: `table = torch.export.default_decompositions(); "
        f"table[torch.ops.{op}] = FUNCTION; program = program.run_decompositions(table)`, whose dims are named <input>_<axis>"
    )
