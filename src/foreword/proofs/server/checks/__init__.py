"""One claim a server makes to its users per file; all have the interface of `check.py`."""
