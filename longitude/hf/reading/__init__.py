"""What many windows of one text need of transformers: their caches, their positions, `generate`."""
