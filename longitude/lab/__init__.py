"""Train short, test long: small models that differ in nothing but their scheme."""
