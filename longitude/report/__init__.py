"""Tables and pictures of rows, in the terminal and as files. Nothing here imports torch."""
