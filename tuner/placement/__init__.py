"""Placement of a model's calls on several devices: costs and links, the choice of devices, the build of one artifact."""
