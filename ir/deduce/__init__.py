"""Deduction of annotations, and analyses of tensor functions. Any module may be imported from outside."""
