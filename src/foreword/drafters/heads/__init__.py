"""Guesses of trained heads, which read the target's hidden states."""
