"""Primitives that move, merge, pad or replace blocks."""
