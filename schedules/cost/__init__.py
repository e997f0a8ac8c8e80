"""Closed-form cost features and constraints of sketches, compiled to NumPy."""
