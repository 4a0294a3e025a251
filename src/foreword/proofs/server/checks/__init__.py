"""Claims that a server makes to its users, each a `Check`."""
