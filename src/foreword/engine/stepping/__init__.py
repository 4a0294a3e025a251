"""What runs in the next step, and steps that are under way."""
