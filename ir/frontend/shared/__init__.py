"""Parts that all importers use: the writer of bindings, compositions, recognised operators."""
