"""Rewriting to a fixpoint: each value is rewritten as it is emitted, until no rule of a table matches it.

Operands are emitted before the value that reads them, so a function is at its fixpoint once its last value is emitted. Importers
rewrite this way while they emit operators, and passes while they rebuild a function. An importer does not know the readers
of a value yet, so there `Pattern.once` never matches.

Aliases, branches and common subexpressions are out of scope: a pattern looks through aliases and stops at branches, and two equal
computations are two roots.

Tests: `tests/ir/rewrite/test_rule_tables.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.check.inplace import ordering_constrained
from relax_tune.ir.core import graph as g
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph_walk import all_uses, used_vars
from relax_tune.ir.core.struct_info import ObjectInfo
from relax_tune.ir.deduce.deduce import infer_value
from relax_tune.ir.op.base import Deduction, env_of
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, returned, rewrite_function
from relax_tune.ir.rewrite.match import Scope, find_matches
from relax_tune.ir.rewrite.pattern import (
    Annotated,
    Conditional,
    Either,
    Named,
    Once,
    Operation,
    Packed,
    Pattern,
    TupleField,
)
from relax_tune.ir.rewrite.rules import MAX_ROUNDS, Parts, Rule, Site, Unfit


@dataclass(slots=True)
class RuleTable:
    """Rules in the order in which they are tried, indexed by the operator or tuple at their roots.

    Attributes:
        readers: the number of values that read each variable, for patterns that need it.
    """

    rules: tuple[Rule, ...]
    readers: Mapping[g.GVar, int] = field(default_factory=dict)
    _by_root: dict[type, tuple[Rule, ...]] = field(default_factory=dict)

    def at(self, value: g.Value) -> tuple[Rule, ...]:
        """Return the rules whose pattern may match `value`."""
        if not isinstance(value, (g.Call, g.TupleItem, g.TupleValue)):
            return ()
        kind = type(value.op) if isinstance(value, g.Call) else type(value)
        if kind not in self._by_root:
            roots = [(r, root_kinds(r.pattern)) for r in self.rules]
            self._by_root[kind] = tuple(r for r, kinds in roots if kinds is None or issubclass(kind, kinds))
        return self._by_root[kind]

    def put(
        self,
        value: g.Value,
        definitions: dict[g.GVar, g.Value],
        module: IRModule,
        env: Env,
        var: g.GVar | None = None,
    ) -> g.Value | None:
        """Return the replacement of `value` by the first matching rule, None when no rule matches. It may be nested.

        Args:
            definitions: the value of each variable so far.
            var: the variable that `value` is bound to, if any.
        """
        rules = self.at(value)
        if not rules:
            return None
        # A pattern matches variables, so the value needs one while it is matched. Its definition is removed again,
        # since the value may be replaced.
        root = var or g.GVar("root", ObjectInfo())
        before = definitions.get(root)
        definitions[root] = value
        try:
            scope = Scope(module, env, definitions, self.readers)
            for rule in rules:
                for match in find_matches(rule.pattern, root, scope):
                    # A rule must hold at every size, so a condition that is not proved counts as false.
                    if match.unknown:
                        continue
                    try:
                        replacement = rule.put(Site(match, root.info, rule.level, Parts.none()))
                    except Unfit:
                        continue
                    if replacement is not None:
                        return replacement
        finally:
            del definitions[root]
            if before is not None:
                definitions[root] = before
        return None

    def rewritten(
        self,
        value: g.Value,
        var: g.GVar,
        definitions: dict[g.GVar, g.Value],
        module: IRModule,
        out: Emitter,
        keep: Callable[[g.Value], bool] = lambda _: False,
    ) -> g.Value:
        """Rewrite `value` until no rule matches; bind new parts in `out`.

        Args:
            keep: whether an existing value must not replace `var`, which then stays computed.
        """
        for _ in range(MAX_ROUNDS):
            replacement = self.put(value, definitions, module, out.env, var)
            if replacement is None:
                return value
            new = self._over_atoms(replacement, definitions, module, out)
            if new.is_atom:
                # The value stays computed, but in the form that the rules have reached so far.
                return value if keep(new) else new
            value = new
        raise AssertionError(f"the rules {[r.title for r in self.at(value)]} undo each other at {value!r:.200}")

    def _over_atoms(
        self, value: g.Value, definitions: dict[g.GVar, g.Value], module: IRModule, out: Emitter
    ) -> g.Value:
        """Return `value` over atoms. Each nested part is rewritten and bound, a repeated one once."""
        # A stack and not recursion, because a replacement may be nested more deeply than Python's stack.
        atoms: dict[int, g.Value] = {}
        stack = [value]
        while True:
            v = stack[-1]
            nested = [a for a in v.operands if not a.is_atom and id(a) not in atoms]
            if nested:
                stack += nested
                continue
            stack.pop()
            part = v.with_operands([atoms.get(id(a), a) for a in v.operands])
            if not stack:
                return part
            if id(v) not in atoms:
                atoms[id(v)] = self._bound(part, definitions, module, out)

    def _bound(self, part: g.Value, definitions: dict[g.GVar, g.Value], module: IRModule, out: Emitter) -> g.Value:
        """Bind a rewritten part and return its variable, or the existing value that it became."""
        var = g.GVar("part", infer_value(part, Deduction(out.env)))
        part = self.rewritten(part, var, definitions, module, out)
        if part.is_atom:
            return part
        bound = out.bind(part, infer_value(part, Deduction(out.env)), _hint(part))
        definitions[bound] = part
        return bound


def _hint(value: g.Value) -> str:
    return str(getattr(value.op, "name", "v")) if isinstance(value, g.Call) else "v"


def root_kinds(p: Pattern) -> tuple[type, ...] | None:
    """Return the operators and tuples that a value matched by `p` can have at its root. None for a pattern of any
    value.
    """
    if isinstance(p, (Named, Once, Annotated, Conditional)):
        return root_kinds(p.inner)
    # A rule whose pattern may match any value has to be tried at every value; one open alternative suffices for that.
    if isinstance(p, Either):
        kinds = [root_kinds(c) for c in p.choices]
        return None if None in kinds else tuple(k for ks in kinds if ks is not None for k in ks)
    if isinstance(p, TupleField):
        return (g.TupleItem,)
    if isinstance(p, Packed):
        return (g.TupleValue,)
    return (p.operator,) if isinstance(p, Operation) else None


@dataclass(frozen=True)
class RewriteToFixpoint:
    """A pass that applies rules until none matches.

    Results stay computed. Rules do not match through a value that must be computed before its operand is overwritten.
    """

    rules: tuple[Rule, ...]

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)

        def function(f: g.Function, _: FunctionTable) -> g.Function:
            definitions: dict[g.GVar, g.Value] = {}
            fixed = ordering_constrained(f)
            protected = returned(f) | fixed
            table = RuleTable(self.rules, Counter(v for value in all_uses(f) for v in used_vars(value)))

            def visit(out: Emitter, binding: g.AnyBinding) -> None:
                old = out.value(binding.value)
                if isinstance(binding, g.MatchCast):
                    out.keep(binding)
                    return
                value = table.rewritten(old, binding.var, definitions, module, out, lambda _: binding.var in protected)
                if value.is_atom and not old.is_atom:
                    out.mapping[binding.var] = value
                    return
                # Without a definition, patterns stop here: a match through the value would move its computation
                # behind the overwrite.
                if binding.var not in fixed:
                    definitions[binding.var] = value
                if value is old:
                    out.keep(binding)
                else:
                    out.bindings.append(g.Binding(binding.var, value))

            return rewrite_function(f, visit, env)

        return map_graphs(module, function)
