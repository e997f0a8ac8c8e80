"""A page in a browser as the device of a tuning job: the server, the protocol, and the runner over it."""
