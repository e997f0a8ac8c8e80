"""Generation of tokens with a decoder: settings, choice of tokens, ends, beams, text."""
