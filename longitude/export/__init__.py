"""A scheme as the settings of a runtime: which can serve it as it is, and by what."""
