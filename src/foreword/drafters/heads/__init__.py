"""Trained heads, which read the target's hidden states."""
