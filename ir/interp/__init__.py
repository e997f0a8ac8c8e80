"""The NumPy interpreter of both levels, the oracle of the tests.

From outside import `interp`, `interp_graph`, `reference`, `rounding_errors` and `empty_reductions`.
"""
