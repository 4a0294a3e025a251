"""Frames and processes: an engine in a process of its own."""
