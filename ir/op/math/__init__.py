"""Elementwise operators and quantisation. From outside import the operator classes."""
