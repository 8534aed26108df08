"""The command line: thin commands, which import what is heavy inside their functions."""
