"""Operators that move, gather and scatter elements. From outside import the operator classes."""
