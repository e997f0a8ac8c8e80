"""Reductions, scans, products and contractions. From outside import the operator classes."""
