"""Training: what the lab and fine-tuning share."""
