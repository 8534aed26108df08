"""Question answering over texts longer than the window, without changing positions."""
