"""How fast each rotary pair turns: the unscaled frequencies, and every way to scale them."""
