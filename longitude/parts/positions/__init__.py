"""① A number for each token."""
