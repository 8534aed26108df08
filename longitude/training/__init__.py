"""Training: the code that the lab and fine-tuning share."""
