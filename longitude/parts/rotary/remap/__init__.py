"""Which positions queries and keys turn to: every remap is a few regions of the (i, j) plane."""
