"""What passes, steps and the parts of a step cost."""
