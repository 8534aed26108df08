"""Every way to a longer context, measured on one model: what to try, and what to use."""
