"""Each part against its paper's formula, written out again in float64."""
