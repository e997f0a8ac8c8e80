"""Primitives that split, fuse, reorder, mark or cut loops."""
