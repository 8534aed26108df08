"""④ A factor for each query."""
