"""The operator's policy file at work in an engine."""
