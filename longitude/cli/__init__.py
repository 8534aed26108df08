"""The command line: thin commands, their heavy imports inside them."""
