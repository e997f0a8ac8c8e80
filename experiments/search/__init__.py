"""The search: recorded and synthetic spaces, the prior, throughput, and speed over the time of tuning."""
