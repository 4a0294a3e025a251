"""What the controller does and why, for people and their tools."""
