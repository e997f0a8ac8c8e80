"""Measurements of this project and of its peers.

Scripts are run from the repository root: `python -m experiments.FOLDER.SCRIPT`; README.md lists them. The distribution does not
contain this package, and no product module imports it.
"""
