"""Lowering of scheduled functions to statements without blocks."""
