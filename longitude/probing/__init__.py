"""What a live server does with a long prompt, found out through its API."""
