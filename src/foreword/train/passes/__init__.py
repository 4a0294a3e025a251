"""Passes over whole texts: the target's, and what all learners share with it."""
