"""Inlining, outlining of subgraphs, shapes known only at run time."""
