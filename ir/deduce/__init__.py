"""Deduction of annotations and relations between them."""
