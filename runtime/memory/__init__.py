"""Device memory of arrays that stay between launches: weights, values of host programs, states of sessions."""
