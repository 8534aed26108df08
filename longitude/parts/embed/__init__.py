"""② Vectors added to, or multiplied into, the embeddings."""
