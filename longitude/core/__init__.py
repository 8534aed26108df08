"""What every other folder builds on: parts, regions, schemes, their written form, the result store."""
