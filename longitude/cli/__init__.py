"""The command line: one thin file a command, its heavy imports inside it."""
