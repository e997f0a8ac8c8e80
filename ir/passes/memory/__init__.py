"""The static memory plan: live ranges, alias sets, packing, in-place results."""
