"""Scheduled functions as parts of a runtime `Program`. Enter by `program_builder`; `prepack` packs weights at build time."""
