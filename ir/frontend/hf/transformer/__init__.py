"""Transformers: one specification (`spec`) and one builder (`programs`) for all families. Outside, import these two."""
