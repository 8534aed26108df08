"""What a configuration says about rotations: read, written, and its faults."""
