"""Training: the lab and fine-tuning."""
