"""③ Queries and keys turned by their positions."""
