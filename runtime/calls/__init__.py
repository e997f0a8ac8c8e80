"""Calls of a model beside `run`: bound to arrays, with state, in streams."""
