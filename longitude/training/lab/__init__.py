"""Train short, test long: small models that differ only in their scheme."""
