"""Import of decoders: one table of families, one builder."""
