"""⑥ Which keys a query may see."""
