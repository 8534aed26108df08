"""Short fine-tuning that adapts a checkpoint to a longer context."""
