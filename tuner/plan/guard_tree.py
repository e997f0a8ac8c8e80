"""The guards that divide points among variants at least cost: intervals by dynamic programming, else a tree.

Every point has a cost under every variant. Each further leaf has a price, a remainder test a higher one. Along one quantity (a
symbol, or the product of all symbols) the optimal intervals follow from dynamic programming in time linear in points x variants.
Several quantities or remainders need a tree. For few points the optimal tree follows from recursion over subsets. For many points
the tree grows greedily by the split whose two sides are cheapest as intervals, so it is never worse than the best intervals along
one quantity.

Tests: `tests/tuner/plan/test_select.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Places = NDArray[np.intp]

# Most points for which every tree is tried.
EXACT = 8
# Most promising splits of a larger node that are tried one level deeper.
LOOKED_AT = 6
# Cost of a remainder test in addition to its leaf, since it predicts untimed shapes less well.
REMAINDER_COST = 0.01
# A remainder is tested only if at least this many points have it, and as many do not.
SUPPORT = 3
# Differences below this are rounding.
TINY = 1e-13


@dataclass(frozen=True, slots=True)
class Quantity:
    """`ceildiv(product of symbols[axes], divisor)`, modulo `modulus` where that is not 0."""

    axes: tuple[int, ...]
    divisor: int = 1
    modulus: int = 0

    def at(self, point: Sequence[int]) -> int:
        value = -(-math.prod(point[a] for a in self.axes) // self.divisor)
        return value % self.modulus if self.modulus else value


@dataclass(frozen=True, eq=False)
class Leaf:
    """Points at which one variant, a row of the costs, is dispatched."""

    members: Places
    variant: int


@dataclass(frozen=True, eq=False)
class GuardSplit:
    """`yes` where the quantity is at most `low` (the next value among the points being `high`), or, for a remainder, is `low`."""

    quantity: Quantity
    low: int
    high: int
    yes: Tree
    no: Tree


Tree = Leaf | GuardSplit
Solved = tuple[float, Tree]


def leaves(tree: Tree) -> Iterator[Leaf]:
    """Yield the leaves from left to right."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        yield from leaves(tree.yes)
        yield from leaves(tree.no)


@dataclass(eq=False)
class GuardTree:
    """The search for guards.

    Attributes:
        costs: (variants, points).
        leaf_cost: Price of each leaf after the first.
        ordered, remainders: Quantities that may be tested.
    """

    costs: FloatArray
    points: Sequence[Sequence[int]]
    leaf_cost: float
    ordered: Sequence[Quantity]
    remainders: Sequence[Quantity] = ()
    _values: dict[Quantity, NDArray[np.int64]] = field(init=False)
    _solved: dict[bytes, Solved] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # Products of symbols may exceed 64 bits, so ranks stand for values: only their order matters.
        self._values = {}
        for q in self.ordered:
            exact = [q.at(p) for p in self.points]
            rank = {v: n for n, v in enumerate(sorted(set(exact)))}
            self._values[q] = np.asarray([rank[v] for v in exact], dtype=np.int64)
        for q in self.remainders:
            self._values[q] = np.asarray([q.at(p) for p in self.points], dtype=np.int64)

    def best(self) -> Solved:
        """Return the least cost and its tree."""
        everything = np.arange(self.costs.shape[1])
        if len(self.ordered) == 1 and not self.remainders:
            return self._intervals(self.ordered[0], everything)
        return self._grown(everything)

    # -- one node --------------------------------------------------------------------------------------------------------

    def _leaf(self, members: Places) -> Solved:
        total = self.costs[:, members].sum(axis=1)
        variant = int(np.argmin(total))
        return float(total[variant]), Leaf(members, variant)

    def _intervals(self, quantity: Quantity, members: Places) -> Solved:
        """Return the best intervals along a quantity, by dynamic programming over its values.

        At each value, a variant continues or takes over from the cheapest variant so far.
        """
        values, group = np.unique(self._values[quantity][members], return_inverse=True)
        cost = np.zeros((len(self.costs), len(values)))
        np.add.at(cost.T, group.reshape(-1), self.costs[:, members].T)
        total = cost[:, 0]
        came_from: list[NDArray[np.intp] | None] = [None]
        variants = np.arange(len(total))
        for column in range(1, len(values)):
            least = int(np.argmin(total))
            # Switching is cheapest from the variant with the least total so far, the same one for all variants that take over.
            # Hence O(points x variants) instead of O(points x variants^2).
            switched = total[least] + self.leaf_cost
            # Ties continue the interval, so rounding cannot add a leaf.
            goes_on = total <= switched + TINY
            came_from.append(np.where(goes_on, variants, least))
            total = np.where(goes_on, total, switched) + cost[:, column]
        variant = int(np.argmin(total))
        least_cost = float(total[variant])
        chosen = [variant]
        for back in reversed(came_from[1:]):
            assert back is not None
            chosen.append(int(back[chosen[-1]]))
        chosen.reverse()
        tree: Tree | None = None
        end = len(values)
        for column in range(len(values) - 1, -1, -1):
            if column and chosen[column - 1] == chosen[column]:
                continue
            inside = (group.reshape(-1) >= column) & (group.reshape(-1) < end)
            leaf = Leaf(members[inside], chosen[column])
            tree = leaf if tree is None else self._split(quantity, members[group.reshape(-1) >= column], leaf, tree)
            end = column
        assert tree is not None
        return least_cost, tree

    def _split(self, quantity: Quantity, members: Places, yes: Tree, no: Tree) -> GuardSplit:
        inside = np.concatenate([leaf.members for leaf in leaves(yes)])
        outside = np.setdiff1d(members, inside)
        if quantity.modulus:
            low = quantity.at(self.points[inside[0]])
            return GuardSplit(quantity, low, low, yes, no)
        low = max(quantity.at(self.points[p]) for p in inside)
        high = min(quantity.at(self.points[p]) for p in outside)
        return GuardSplit(quantity, low, high, yes, no)

    # -- trees -----------------------------------------------------------------------------------------------------------

    def _sides(self, members: Places) -> Iterator[tuple[Quantity, float, NDArray[np.bool_]]]:
        """Yield every test of some members: the quantity, the cost, and the members that pass."""
        for q in self.ordered:
            values = self._values[q][members]
            for cut in np.unique(values)[:-1]:
                yield q, self.leaf_cost, values <= cut
        for q in self.remainders:
            values = self._values[q][members]
            for residue, count in zip(*np.unique(values, return_counts=True)):
                if SUPPORT <= count <= len(members) - SUPPORT:
                    yield q, self.leaf_cost + REMAINDER_COST, values == residue

    def _every_tree(self, members: Places) -> Solved:
        # Different orders of cuts lead to the same set of points, which is solved once.
        key = members.tobytes()
        if key not in self._solved:
            solved = self._leaf(members)
            for quantity, price, yes in self._sides(members):
                left, right = self._every_tree(members[yes]), self._every_tree(members[~yes])
                total = left[0] + right[0] + price
                # Ties keep fewer leaves.
                if total < solved[0] - TINY:
                    solved = total, self._split(quantity, members, left[1], right[1])
            self._solved[key] = solved
        return self._solved[key]

    def _grown(self, members: Places) -> Solved:
        if len(members) <= EXACT:
            return self._every_tree(members)
        solved = self._plain(members)
        sides = list(self._sides(members))
        # Splitting every side into intervals would cost O(points^2 x variants). The cost with one leaf per side, a
        # matrix product, preselects the few splits worth it.
        at_once = [self._as_leaves(members, price, yes) for _, price, yes in sides]
        deeper = []
        for number in np.argsort(at_once, kind="stable")[:LOOKED_AT]:
            _, price, yes = sides[number]
            deeper.append((self._plain(members[yes])[0] + self._plain(members[~yes])[0] + price, int(number)))
        if deeper and min(deeper)[0] < solved[0] - TINY:
            quantity, price, yes = sides[min(deeper)[1]]
            left, right = self._grown(members[yes]), self._grown(members[~yes])
            solved = left[0] + right[0] + price, self._split(quantity, members, left[1], right[1])
        return solved

    def _plain(self, members: Places) -> Solved:
        """Return the best intervals along any one quantity, possibly a single leaf."""
        solved = self._leaf(members)
        for quantity in self.ordered:
            solved = min(solved, self._intervals(quantity, members), key=lambda s: s[0])
        return solved

    def _as_leaves(self, members: Places, price: float, yes: NDArray[np.bool_]) -> float:
        costs = self.costs[:, members]
        left = costs @ yes.astype(np.float64)
        return float(left.min() + (costs.sum(axis=1) - left).min() + price)
