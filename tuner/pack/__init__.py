"""Packs: a model with its records in one portable file (`pack.make_pack`, `pack.read_pack`), and its installation (`install.install`)."""
