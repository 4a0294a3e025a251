"""Claims about a server, each a `Check`."""
