"""One address in front of several targets."""
