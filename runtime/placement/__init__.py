"""Artifacts for several devices: where programs run, the machine that runs them side by side, policies that choose."""
