"""Export of built artifacts to other languages."""
