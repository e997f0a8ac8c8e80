"""Operators of neural networks: attention, windows, resampling. From outside import the operator classes."""
