"""The end of every import: recognised patterns, and results in separate memory.

Tests: `tests/ir/frontend/onnx/test_onnx_parts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relax_tune.ir.check.aliasing import is_view
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, GVar, Value
from relax_tune.ir.frontend.shared import folded_weights, recognised_masks, recognised_norms
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.rewrite.emitter import Emitter, rewrite_function
from relax_tune.ir.rewrite.rules import rewrite

FINISHED_RULES = (
    recognised_norms.RULES, recognised_masks.CHOICES, recognised_masks.RULES, folded_weights.SCALES, folded_weights.RULES,
)  # fmt: skip
"""Rules of whole programs, one set after the other, as each applies once to what the one before it left."""


def finish_import(w: Writer, items: Sequence[ImportedValue], names: Sequence[str], function: str = "main") -> IRModule:
    """Return the program with recognised patterns, and every result in separate memory.

    Parameters, constants and values returned twice are copied."""
    used, results = set[Value](), []
    for item in items:
        value = root = w.tensor(item)
        while isinstance(root, GVar) and is_view(written := w.definitions.get(root, root)):
            root = written.operands[0]
        # Results need separate memory: an input, a weight, or what another result shares, is copied. The permutation
        # that changes nothing is the copy.
        if root not in w.definitions or root in used:
            value = w.reshape(value, [const(1)]) if item.ndim == 0 else value
            value = root = w.g.call(Permute(tuple(range(max(item.ndim, 1)))), value)
            value = w.reshape(value, item.shape)
        used.add(root)
        results.append(value)
    module = w.g.finish(results if len(results) > 1 else results[0])
    module = with_result_names(module, results, names, function)
    if function != "main":
        return module
    for rules in FINISHED_RULES:
        module = rewrite(module, rules)
    return folded_weights.with_constant_weights(module)


def with_result_names(
    module: IRModule, results: Sequence[Value], given: Sequence[str], function: str = "main"
) -> IRModule:
    """Return the module with the first results of a function named as in the model; others keep their names."""
    names = dict(zip(results, given))

    def visit(out: Emitter, binding: AnyBinding) -> None:
        name = names.get(binding.var)
        if name is None or not isinstance(binding, Binding):
            out.keep(binding)
            return
        var = GVar(name, binding.var.info)
        value = out.value(binding.value)
        out.mapping[binding.var] = var
        out.bindings.append(Binding(var, value))

    renamed = rewrite_function(module.graphs[function], visit)
    return replace(module, functions={**module.functions, function: renamed})
