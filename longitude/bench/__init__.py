"""What attention under a scheme costs, beside plain attention and what one would use instead."""
