"""Parts of importers: the writer of graphs, the protocol of nodes, and rules for decomposed operators. Only importers use it.

`handlers` has the operators that the ONNX and torch importers write alike.
"""
