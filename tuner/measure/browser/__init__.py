"""A page in a browser as the device of a tuning job: server, protocol, and the runner. From outside import `runner`."""
