"""Passes over whole texts, of the target and of learners."""
