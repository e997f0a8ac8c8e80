"""Primitives that place, lay out, copy or pipeline buffers."""
