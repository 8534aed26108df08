"""Tables and charts, in the terminal and as files. Nothing here imports torch."""
