"""Clusters of targets and draft nodes, started from one file."""
