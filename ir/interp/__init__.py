"""The NumPy interpreter of both levels, the oracle of the tests."""
