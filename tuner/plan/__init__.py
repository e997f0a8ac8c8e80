"""Plans: selection of variants by measured times, guard trees, validation, stored sets."""
