"""How a checkpoint is loaded: where it lies, what it runs on, what its files leave out."""
