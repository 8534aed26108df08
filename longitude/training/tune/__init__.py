"""A short fine-tune that adapts a checkpoint to an extension."""
