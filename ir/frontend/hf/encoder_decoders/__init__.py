"""Import of encoder-decoder models: their families and a builder of their three functions."""
