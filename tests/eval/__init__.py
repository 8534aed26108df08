"""What scores are taken on, and how."""
