"""What a scheme or a checkpoint does, as numbers: the rows behind every table and chart."""
