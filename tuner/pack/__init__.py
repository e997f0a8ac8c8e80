"""Packs: a model with records in one portable file, and their installation on a device."""
