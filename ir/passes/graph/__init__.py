"""Passes over graph functions: canonical form, CSE, constant folding, precision, layout."""
