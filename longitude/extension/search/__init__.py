"""Search for better parameters around the leading schemes."""
