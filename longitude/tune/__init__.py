"""A short fine-tune that makes an extension stick."""
