"""Drafting beside the target and on nodes, measured in one run."""
