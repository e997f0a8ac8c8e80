"""Measurement of candidates. `base` has the `Runner` contract, `messages` its requests and results; `supervised` implements it
over the transports that `local`, `cluster.runner` and `browser.runner` open. Other packages open runners and import these.
"""
