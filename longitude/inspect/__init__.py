"""What a scheme does, as numbers: the rows behind every table and picture."""
