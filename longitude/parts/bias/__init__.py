"""⑤ A term added to each score."""
