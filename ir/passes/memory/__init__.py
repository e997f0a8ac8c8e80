"""Memory planning: live ranges, packing of storages, bounds of sizes, in-place outputs, caches that grow in place.

From outside, import `memory_plan`, `inplace`, and `append.Appended`.
"""
