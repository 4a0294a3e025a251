"""Use it from the command line."""
