"""Lowering of scheduled functions to statements without blocks. `generate.lowered_body` calls these modules in order."""
