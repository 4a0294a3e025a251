"""Processes and their messages: the engine and draft nodes."""
