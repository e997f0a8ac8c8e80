"""Einsum of one or two tensors as sums, transpositions and one batched matrix product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_tune.ir.expr import Expr
from relax_tune.ir.frontend.onnx_graph import Handler, Node
from relax_tune.ir.frontend.pieces import permuted
from relax_tune.ir.frontend.writer import Item, Writer, tensor_dims
from relax_tune.ir.graph import Value
from relax_tune.ir.op.base import product
from relax_tune.ir.op.linalg import Matmul
from relax_tune.ir.op.reduce import Sum


def _letters(node: Node) -> tuple[list[str], str]:
    """The letters of every operand and of the result; those that stand for `...` are upper case Greek."""
    equation = node.text("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(node.inputs) or not 1 <= len(terms) <= 2:
        raise node.refuse(f"wanted an equation of one or two operands, as many as inputs, found {equation!r}")
    more = [node.item(p).ndim - len(t.replace("...", "")) for p, t in enumerate(terms)]
    widest = max((m for m, t in zip(more, terms) if "..." in t), default=0)
    spelled = "".join(chr(0x391 + p) for p in range(max(widest, 0)))
    found = []
    for p, (term, extra) in enumerate(zip(terms, more)):
        if extra < 0 or (extra and "..." not in term):
            raise node.refuse(
                f"wanted as many letters as dims in operand {p} of {equation!r}, found {node.item(p).info!r}"
            )
        found.append(term.replace("...", spelled[len(spelled) - extra :] if extra else ""))
    if not arrow:
        every = "".join(found)
        right = "..." + "".join(sorted(c for c in set(every) if every.count(c) == 1 and c not in spelled))
    result = right.replace("...", spelled)
    if any(len(set(t)) != len(t) for t in (*found, result)) or not set(result) <= set("".join(found)):
        raise node.refuse(
            f"wanted every letter once in a term, and the result's among the operands', found {equation!r}"
        )
    return found, result


def _summed(w: Writer, value: Value, letters: str, kept: str) -> tuple[Value, str]:
    """The sum over the letters that nobody else has."""
    axes = tuple(p for p, c in enumerate(letters) if c not in kept)
    if not axes:
        return value, letters
    return w.emit(Sum(axes), value), "".join(c for c in letters if c in kept)


def _turned(w: Writer, value: Value, letters: str, wanted: str) -> Value:
    return permuted(w, value, [letters.index(c) for c in wanted])


def _einsum(w: Writer, node: Node) -> Item:
    terms, result = _letters(node)
    values = [w.tensor(node.item(p)) for p in range(len(terms))]
    if len(terms) == 1:
        value, letters = _summed(w, values[0], terms[0], result)
        return w.of(_turned(w, value, letters, result))
    a, left = _summed(w, values[0], terms[0], result + terms[1])
    b, right = _summed(w, values[1], terms[1], result + terms[0])
    batch = [c for c in result if c in left and c in right]
    inner = [c for c in left if c in right and c not in batch]
    rows, columns = ([c for c in term if c not in batch and c not in inner] for term in (left, right))
    sizes = {c: d for letters, v in ((right, b), (left, a)) for c, d in zip(letters, tensor_dims(v))}

    def dims(letters: Sequence[str]) -> list[Expr]:
        return [sizes[c] for c in letters]

    def flat(letters: Sequence[str]) -> Expr:
        return w.simplify(product(dims(letters)))

    a = w.reshape(_turned(w, a, left, "".join([*batch, *rows, *inner])), [*dims(batch), flat(rows), flat(inner)])
    b = w.reshape(_turned(w, b, right, "".join([*batch, *inner, *columns])), [*dims(batch), flat(inner), flat(columns)])
    value = w.reshape(w.emit(Matmul(), a, b), dims([*batch, *rows, *columns]))
    return w.of(_turned(w, value, "".join([*batch, *rows, *columns]), result))


HANDLERS: Mapping[str, Handler] = {"Einsum": _einsum}
