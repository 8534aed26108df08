"""What each serving runtime computes from its settings, and how a scheme is written for it."""
