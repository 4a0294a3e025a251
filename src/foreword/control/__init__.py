"""What to draft for whom."""
