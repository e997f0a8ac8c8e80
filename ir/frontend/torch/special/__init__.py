"""Import of ATen special functions, by series and rational functions in float64, and of random numbers."""
