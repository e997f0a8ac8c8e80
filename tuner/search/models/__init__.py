"""Cost models, the Gaussian process and the acquisition function of the search strategies."""
