"""Library calls as alternatives: recognition, lowering, epilogues."""
