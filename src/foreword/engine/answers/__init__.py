"""What a user gets: text, deltas, outputs."""
