"""Passes over graph functions: canonical form, CSE, constant folding, precision, legalisation, layout.

From outside, import the pass classes, and `constant_fold.add_constant`.
"""
