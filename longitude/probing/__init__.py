"""What a live server does with a long prompt, measured through its API."""
